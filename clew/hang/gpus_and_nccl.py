"""Asks the GPUs of this machine and NCCL about themselves, where they exist. Nothing is installed for it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from clew.hang import proc
from clew.hang.classes import ranges
from clew.hang.observed import Launched, Snapshot

LIMIT_S = 3.0
RAS_ADDRESS = "localhost:28028"
"""Address at which NCCL 2.24 and later answers, unless RAS_VARIABLE names another."""
RAS_VARIABLE = "NCCL_RAS_ADDR"
RAS_LINES = 40
LONGEST = 16_000_000
"""Number of bytes of an answer that are read."""


def with_machine(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with what GPUs and NCCL say."""
    return with_ras(replace(snapshot, machine=(*snapshot.machine, *gpus())))


def gpus() -> tuple[str, ...]:
    """Return a line for each GPU that nvidia-smi names: how busy it is, its memory, its power and the limit of it."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ()
    query = "--query-gpu=index,utilization.gpu,memory.used,power.draw,power.limit"
    with suppress(OSError, subprocess.SubprocessError):
        command = [program, query, "--format=csv,noheader"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        rows = [line.split(", ") for line in ended.stdout.splitlines()]
        return tuple(
            f"GPU {index}: {busy} busy, {used} used, {power} of {limit}"
            for index, busy, used, power, limit in (row for row in rows if len(row) == 5)
        )
    return ()


def with_ras(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with what NCCL's RAS says about its communicators, wherever the processes have it listen.

    The answer covers the whole job, and names processes by pid. A pid that occurs on two nodes is left out.
    """
    addresses = dict.fromkeys(
        proc.environment_of(each.pid).get(RAS_VARIABLE, RAS_ADDRESS) for each in snapshot.processes
    )
    lines = list[str]()
    launched: dict[int, list[Launched]] = defaultdict(list)
    for address in addresses:
        said, found = parse_ras(_ask(address, b"set format json\nverbose status\n"))
        lines += said or _ask(address, b"verbose status\n").splitlines()[:RAS_LINES]  # NCCL before 2.28 knows no JSON
        for pid, each in found:
            launched[pid].append(each)
    unique = {
        pid: tuple(each) for pid, each in launched.items() if len({one.communicator for one in each}) == len(each)
    }
    processes = tuple(replace(each, launched=unique.get(each.pid, ())) for each in snapshot.processes)
    told = tuple(f"NCCL: {line}" for line in lines if line.strip())
    return replace(snapshot, processes=processes, machine=(*snapshot.machine, *told))


def _ask(address: str, request: bytes) -> str:
    """Return what RAS answers at host:port; "" if nothing listens."""
    host, _, port = address.rpartition(":")
    text = b""
    where = (host.strip("[]"), int(port) if port.isdigit() else 0)
    with suppress(OSError, OverflowError), socket.create_connection(where, timeout=LIMIT_S) as connection:
        connection.sendall(request)
        while len(text) < LONGEST and (chunk := connection.recv(65536)):
            text += chunk
    return text.decode(errors="replace")


def parse_ras(text: str) -> tuple[list[str], list[tuple[int, Launched]]]:
    """Return lines about the communicators in RAS's answer in JSON, and what each process, by pid, has launched.

    Both are empty if the text is something else.
    """
    # NCCL 2.28 forgets the comma before the state of a rank that does not answer.
    text = re.sub(r'(\d)(\s*"status")', r"\1,\2", text[text.find("{") :])
    lines = list[str]()
    found = list[tuple[int, Launched]]()
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        answer = json.loads(text)
        for one in answer["communicators"]:
            ranks = [(each["rank"], each["pid"], each["collective_counts"]) for each in one["ranks"]]
            for _, pid, counts in ranks:
                each = Launched(communicator=one["hash"], size=one["size"], counts=tuple(sorted(counts.items())))
                found.append((pid, each))
            names = dict.fromkeys(name for _, _, counts in ranks for name, number in counts.items() if number)
            said = [f"{name} {_by_number((rank, counts[name]) for rank, _, counts in ranks)}" for name in names]
            said += [f"rank {each['rank']} (pid {each['pid']}) does not answer" for each in one["missing_ranks"]]
            lines.append(f"communicator {one['hash']} of {one['size']} ranks: {'; '.join(said) or 'nothing launched'}")
        return lines, found
    return [], []


def _by_number(ranks: Iterable[tuple[int, int]]) -> str:
    """Return numbers as text, each with the ranks that share it."""
    shared: dict[int, list[int]] = defaultdict(list)
    for rank, number in ranks:
        shared[number].append(rank)
    return ", ".join(f"{number} on rank {ranges(each)}" for number, each in shared.items())
