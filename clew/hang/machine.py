"""Asks the GPUs of this machine and NCCL about themselves, where they exist. Nothing is installed for it."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace

from clew.hang.observed import Snapshot

LIMIT_S = 3.0
RAS_PORT = 28028
"""Port at which NCCL 2.24 and later answers on loopback, unless NCCL_RAS_ADDR says otherwise."""
RAS_LINES = 40


def with_machine(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with what GPUs and NCCL say."""
    return replace(snapshot, machine=(*snapshot.machine, *gpus(), *ras()))


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


def ras(port: int = RAS_PORT) -> tuple[str, ...]:
    """Return what NCCL's RAS says about its communicators; empty if nothing listens. Written from its documentation."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.sendall(b"verbose status\n")
        text = b""
        with suppress(OSError):
            while chunk := connection.recv(65536):
                text += chunk
        return tuple(f"NCCL: {line}" for line in text.decode(errors="replace").splitlines()[:RAS_LINES] if line.strip())
    return ()
