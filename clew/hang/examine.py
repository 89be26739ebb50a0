"""Watches a job until enough was seen of it, and judges it."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clew.errors import LaunchError, RecordError
from clew.hang import jobs, proc
from clew.hang.collect import UNREADABLE, snapshot, sources_of, unseen_ranks
from clew.hang.judge import judge
from clew.hang.observed import Look, Process, Snapshot
from clew.hang.verdict import SOUND

WATCH_S = 10.0
"""Longest time in seconds for which processes are watched before they are judged."""
SHORTEST_S = 2.0
FEWEST_LOOKS = 3
"""Minimum number of looks to end early: on a busy machine a single look can take seconds, and shows no progress."""


def enough(processes: Sequence[Process], seconds: float) -> bool:
    """Return whether to stop looking: the time is up, nothing outside can end the wait, or everything moves."""
    looks = max((len(each.looks) for each in processes), default=0)
    if (seconds >= WATCH_S and looks > 1) or all(each.last.state == "X" for each in processes):
        return True
    if seconds < SHORTEST_S or looks < FEWEST_LOOKS:
        return False
    if all(each.last.error.startswith(UNREADABLE) for each in processes):
        return True  # no later look can read more
    # The final verdict also uses the exit code of what has ended, and the kernel function in which a process sleeps.
    processes = [
        replace(each, exit=each.exit or proc.exit_of(each.pid))
        if each.last.state in "ZX"
        else replace(each, waits_in=proc.blocked_in(each.pid))
        for each in processes
    ]
    unseen, sources = unseen_ranks(processes), sources_of(processes)
    seen = Snapshot(processes=tuple(processes), seconds=seconds, unseen=unseen, sources=sources)
    verdict = judge(seen)
    # A healthy job is watched for half of WATCH_S, and must then look healthy in the newest looks alone: what moved two
    # seconds ago may stand still now. It must not look like a complete hang in the last two looks. A slow job may turn
    # out to do nothing but reject what it makes.
    if verdict.pattern != "healthy" or seconds <= WATCH_S / 2:
        return verdict.structural
    return judge(_newest(seen, 4)).pattern in SOUND and not judge(_newest(seen, 2)).structural


def _newest(seen: Snapshot, count: int) -> Snapshot:
    """Return a snapshot with only the newest looks at each process."""
    return replace(seen, processes=tuple(replace(each, looks=each.looks[-count:]) for each in seen.processes))


def just_stopped(seen: Snapshot) -> bool:
    """Return whether a job that moved before looks hung in its last three looks.

    No number in the user's frames may have changed in them, either: three looks alone can miss slow progress, because
    some counters are trusted only with more values.
    """
    newest = _newest(seen, 3)
    still = all(_numbers(look) == _numbers(each.last) for each in newest.processes for look in each.looks)
    return still and judge(seen).pattern in SOUND and judge(newest).exit_code == 1


def _numbers(look: Look) -> list[tuple[str, str, str]]:
    """Return the numbers in the user's frames: the function, the name and the value of each."""
    frames = (frame for thread in look.threads for frame in thread.user_frames)
    every = [(frame.function, *local) for frame in frames for local in frame.locals.items()]
    return sorted(each for each in every if re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", each[2]))


def examine(pids: Sequence[int], named: dict[int, Process] | None = None, *, once: bool = False) -> Snapshot:
    """Return a snapshot of the jobs of these processes.

    Args:
        pids: Ranks, launchers or other processes. Their descendants, peers and local servers are found.
        named: Processes from the status files of a Clew run, by pid; see `processes_of_run`.
        once: Take one look, which is enough to print stacks, instead of watching until a verdict is certain.
    """
    every = _living(pids)
    seen = snapshot(every, (lambda processes, seconds: True) if once else enough)
    if not once and judge(seen).exit_code == 1 and (born := _born(pids, seen)):
        seen = snapshot([*every, *born], enough)  # what hangs may wait for processes that it has just started
    by_pid = named or {}
    processes = tuple(
        replace(each, name=by_pid[each.pid].name, waits=by_pid[each.pid].waits) if each.pid in by_pid else each
        for each in seen.processes
    )
    seen_pids = {process.pid for process in processes}
    gone = [each for pid, each in by_pid.items() if pid not in seen_pids]
    says = {"failed": "with an error"}
    ended = (replace(p, exit=says.get(p.doing, "(its status file does not say that it ended)")) for p in gone)
    seen = replace(seen, processes=(*processes, *ended))
    if not once and just_stopped(seen):
        just = "nothing moved in the last three looks: if the job has just begun to hang, ask again in a few seconds"
        seen = replace(seen, notes=(*seen.notes, just))
    return seen


def _born(pids: Sequence[int], seen: Snapshot) -> list[int]:
    """Return the processes of these jobs that began during the watch; empty if one has ended, which tells more."""
    known = {process.pid for process in seen.processes}
    ended = any(each.last.state in "ZX" and each.looks[0].state not in "ZX" for each in seen.processes)
    with suppress(LaunchError):  # one of `pids` has just ended
        return [] if ended else [pid for pid in _living(pids) if pid not in known]
    return []


def _living(pids: Sequence[int]) -> list[int]:
    return [pid for pid in jobs.with_peers(pids) if pid != os.getpid()]


def run_of(pids: Sequence[int]) -> Path | None:
    """Return the Clew run directory that one of these processes or their descendants belongs to; None without one."""
    opened = (Path(link) for pid in proc.below(list(pids)) for link in proc.descriptors_of(pid))
    locks = (path for path in opened if path.suffix == ".lock" and path.parent.name == "status")
    return next((path.parent.parent for path in locks if path.with_suffix(".json").exists()), None)


def processes_of_run(folder: Path) -> dict[int, Process]:
    """Return the processes that the status files of a Clew run name, with their waits, by pid.

    Raises:
        RecordError: The folder is no run directory, or a status file cannot be read.
        LaunchError: None of its processes is alive on this machine.
    """
    status = folder / "status"
    if not status.is_dir():
        raise RecordError(f"Cannot look at {folder}: it holds no status/, so it is no run directory.")
    found, host = dict[int, Process](), socket.gethostname()
    for path in sorted(status.glob("[!.]*.json")):
        try:
            value = json.loads(path.read_text())
            pid, doing = int(value["pid"]), str(value["doing"])
            fresh = time.time() - value["updated"] < WATCH_S
            waits = tuple({**each, "for_s": value["updated"] - each["since"]} for each in value["waits"] if fresh)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"Cannot read {path}: {type(error).__name__}: {error}") from error
        if not doing.startswith("ended") and value.get("host", host) == host:
            found[pid] = Process(pid=pid, name=path.stem, doing=doing, waits=waits, host=host)
    alive = [pid for pid in found if proc.stat_of(pid) is not None]
    if not alive:
        raise LaunchError(f"Cannot look at {folder}: none of its processes is alive on this machine.")
    return found
