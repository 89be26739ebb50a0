"""Asks Clew's processes for their asyncio tasks, which no stack shows."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clew.asyncio_tasks import DUMP_SIGNAL
from clew.hang import proc
from clew.hang.observed import Snapshot

PATIENCE_S = 1.0
"""Seconds that a process has to answer. A process that is blocked in C code cannot answer."""


def with_tasks(snapshot: Snapshot, status: Path) -> Snapshot:
    """Return a snapshot of a run with the asyncio tasks of its processes on this machine.

    Call this after the processes were watched: the signal wakes them up, which would look like progress.

    Args:
        status: The run's folder of status files, to which the processes answer.
    """
    asked: dict[int, Path] = {}
    began = time.time()
    for process in snapshot.processes:
        if process.name and process.last.state not in "ZXTt" and catches(process.pid):
            with suppress(OSError):
                os.kill(process.pid, DUMP_SIGNAL or 0)
                asked[process.pid] = status / f"{process.name}.tasks"
    found: dict[int, tuple[str, ...]] = {}
    while len(found) < len(asked) and time.time() < began + PATIENCE_S:
        time.sleep(0.02)
        for pid in asked.keys() - found.keys():
            with suppress(OSError, ValueError, KeyError, TypeError):
                value = json.loads(asked[pid].read_text())
                if value["pid"] == pid and value["at"] >= began:
                    found[pid] = tuple(map(str, value["tasks"]))
    labels = [process.label for process in snapshot.processes if process.pid in asked.keys() - found.keys()]
    notes = [f"{label} did not write its asyncio tasks: its main thread is blocked" for label in labels]
    processes = tuple(replace(each, tasks=found.get(each.pid, ())) for each in snapshot.processes)
    return replace(snapshot, processes=processes, notes=(*snapshot.notes, *notes))


def catches(pid: int) -> bool:
    """Return whether a process has a handler for the signal. Without one, the signal would end the process."""
    caught = int(proc.status_of(pid).get("SigCgt", "0"), 16)
    return DUMP_SIGNAL is not None and bool(caught >> (DUMP_SIGNAL - 1) & 1)
