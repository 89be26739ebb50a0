"""Asks this machine's GPUs and NCCL about their state, where they exist. This installs nothing."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from clew.hang import proc
from clew.hang.equal_stacks import by_value
from clew.hang.observed import Launched, Snapshot

LIMIT_S = 3.0
RAS_ADDRESS = "localhost:28028"
"""Address at which NCCL 2.24 and later answers, unless RAS_VARIABLE names another."""
RAS_VARIABLE = "NCCL_RAS_ADDR"
RAS_LINES = 40
LONGEST = 16_000_000
"""Maximum number of bytes of an answer that are read."""


def with_machine(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot, with what GPUs and NCCL report."""
    return with_ras(replace(snapshot, machine=(*snapshot.machine, *gpus())))


def gpus() -> tuple[str, ...]:
    """Return a line for each GPU that nvidia-smi names: how busy it is, its memory, power and power limit."""
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
    """Return a snapshot with what NCCL's RAS says about its communicators, at each address that the processes use.

    The answer covers the whole job, and names processes by pid. A pid that occurs twice in a communicator is left out.
    """
    environments = [proc.environment_of(each.pid) for each in snapshot.processes]
    lines, launched = list[str](), dict[int, dict[str, Launched]]()
    for address in dict.fromkeys(each.get(RAS_VARIABLE, RAS_ADDRESS) for each in environments):
        answer = _ask(address, b"set format json\nverbose status\n")
        said, found = parse_ras(answer)
        if answer and not said:  # NCCL before 2.28 knows no JSON
            said = _ask(address, b"verbose status\n").splitlines()
        lines += said
        pids = Counter((pid, each.communicator) for pid, each in found)
        for pid, each in found:
            if pids[pid, each.communicator] == 1:
                launched.setdefault(pid, {})[each.communicator] = each
    # RAS reports a process's pid as the process itself sees it, also in a container.
    of = {each.pid: launched.get(proc.pid_within(each.pid), {}) for each in snapshot.processes}
    processes = tuple(replace(each, launched=tuple(of[each.pid].values())) for each in snapshot.processes)
    told = tuple(f"NCCL: {line}" for line in [line for line in dict.fromkeys(lines) if line.strip()][:RAS_LINES])
    return replace(snapshot, processes=processes, machine=(*snapshot.machine, *told))


def _ask(address: str, request: bytes) -> str:
    """Return what RAS answers at host:port within the time limit; "" if nothing listens."""
    host, _, port = address.rpartition(":")
    text, until = b"", time.monotonic() + LIMIT_S
    with (
        suppress(OSError, OverflowError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=LIMIT_S) as connection,
    ):
        connection.sendall(request)
        while len(text) < LONGEST and time.monotonic() < until and (chunk := connection.recv(65536)):
            text += chunk
    return text.decode(errors="replace")


def parse_ras(text: str) -> tuple[list[str], list[tuple[int, Launched]]]:
    """Return lines about the communicators in RAS's JSON answer, and what each process has launched, by pid.

    Both are empty if the text is something else.
    """
    # NCCL 2.28 forgets the comma before the state of a rank that does not answer.
    text = re.sub(r'(\d)(\s*"status")', r"\1,\2", text[text.find("{") :])
    lines, launched = list[str](), list[tuple[int, Launched]]()
    try:
        for one in json.loads(text)["communicators"]:
            name, size = str(one["hash"]), int(one["size"])
            counts = {int(r["rank"]): {op: int(n) for op, n in r["collective_counts"].items()} for r in one["ranks"]}
            for rank in one["ranks"]:
                each = tuple(sorted(counts[int(rank["rank"])].items()))
                launched.append((int(rank["pid"]), Launched(communicator=name, size=size, counts=each)))
            ops = dict.fromkeys(op for each in counts.values() for op, number in each.items() if number)
            said = [f"{op}: {by_value((rank, str(each[op])) for rank, each in counts.items())}" for op in ops]
            said += [f"rank {int(r['rank'])} (pid {int(r['pid'])}) does not answer" for r in one["missing_ranks"]]
            lines.append(f"communicator {name} of {size} ranks: {', '.join(said) or 'nothing launched'}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [], []
    return lines, launched
