"""Says whether a native program that a process waits for does any work: it computes or moves data.

Such a program has no stack to read. Its CPU time and the bytes that it reads and writes show that it works.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from clew.hang.activity import Activity
from clew.hang.looks import recent
from clew.hang.observed import NO_PYTHON, Process
from clew.hang.progress import in_polling_loop
from clew.hang.source import calls_of

COMPUTES = 0.05
"""Share of a core from which a program counts as computing. One that only wakes up and polls uses 0.01."""
STARTS_MANY = 0.2
"""Share of a core from which the ended children of a program count as its work. A shell that calls `sleep 0.01` in a
loop uses 0.1 to start it."""
STREAMS = ("network", "http")
"""Kinds of a coroutine that reads from a stream, which may also be a pipe."""
MOVES = 4096
"""Bytes per second from which a program counts as moving data: a log of its waiting stays below this."""


def native(process: Process) -> bool:
    """Return whether a process is a program without Python, as far as it could be read."""
    unread = not process.threads and any(look.error.startswith(NO_PYTHON) for look in process.looks)
    return unread and "python" not in name_of(process)


def with_python_parents(processes: Sequence[Process]) -> list[Process]:
    """Return the processes. Those that a native program started become children of the nearest ancestor with Python."""
    by_pid = {each.pid: each for each in processes}
    found = []
    for process in processes:
        parent, seen = process.parent, {process.pid}
        while parent in by_pid and native(by_pid[parent]) and parent not in seen:
            seen.add(parent)
            parent = by_pid[parent].parent
        found.append(replace(process, parent=parent) if parent in by_pid else process)
    return found


def awaited_work(process: Process, activity: Activity, processes: Sequence[Process], sources: Mapping[str, str]) -> str:
    """Return words about the native program that a process waits for and that works; "" if there is none.

    Args:
        process: The process that waits.
        activity: The wait that decides what it does.
        processes: All processes of the job, with the parents that started them.
        sources: Text of the users' source files, by path.
    """
    if not _waits_for_program(activity, sources):
        return ""
    children = [each for each in processes if each.parent == process.pid]
    if process.awaited_child:
        children = [each for each in children if each.pid == process.awaited_child]
    elif activity.kind != "pipe" and any(each.threads for each in children):
        return ""  # it may wait for a Python child, whose own stack shows whether it works
    for program in filter(native, children):
        family = [program, *_below(program, processes)]
        shared = {pipe for each in family for pipe in each.pipes} & {*process.pipes}
        # Pipes are known only after the last look. Before, a coroutine that reads may also read from a server.
        reads = (activity.kind == "pipe" and process.pipes) or activity.kind in STREAMS
        if reads and not shared:
            continue
        for one in sorted(family, key=_rates, reverse=True):
            if work := _work(one):
                whose = "which" if one is program else f"whose child {name_of(one)} (pid {one.pid})"
                return f"waits for {name_of(program)} (pid {program.pid}), {whose} {work}"
    share = _rates(process)[1]
    if activity.kind == "process" and share >= STARTS_MANY and not in_polling_loop(process, sources):
        return f"waits for programs, one after another: those that have ended used {share:.2f} s of CPU time per second"
    return ""


def name_of(process: Process) -> str:
    """Return the name of the program that a process runs."""
    return PurePath(process.command[0]).name if process.command else "a program"


def _waits_for_program(activity: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a process waits for a child to end or to write, or asks again and again whether it has ended."""
    loop = activity.loop_in(sources) if activity.kind == "sleep" else None
    polls = isinstance(loop, ast.While) and any(name.rstrip("()").endswith(".poll") for name in calls_of(loop))
    return activity.kind in ("process", "pipe") or (activity.task and activity.kind in STREAMS) or polls


def _below(program: Process, processes: Sequence[Process]) -> Iterator[Process]:
    """Yield the native programs that a native program has started, and those that they have started."""
    for each in processes:
        if each.parent == program.pid != each.pid and native(each):
            yield each
            yield from _below(each, processes)


def _work(program: Process) -> str:
    """Return words about the work that a native program did in the newest looks; "" if it did none."""
    own, ended, moved = _rates(program)
    looks = recent(program).looks
    # On a busy machine a program may get little of a core, although it is always ready to run.
    ready = own > 0 and sum(look.state == "R" for look in looks) > max(2, 0.8 * len(looks))
    if own >= COMPUTES or ended >= STARTS_MANY or ready:
        return f"computes: {own + ended:.2f} s of CPU time per second"
    return f"moves data: {moved:,.0f} bytes per second" if moved >= MOVES else ""


def _rates(process: Process) -> tuple[float, float, float]:
    """Return what a process did per second: CPU seconds, those of its ended children, and bytes read and written."""
    looks = [look for look in recent(process).looks if look.state not in "ZX"]
    if len(looks) < 2 or looks[-1].at <= looks[0].at:
        return 0.0, 0.0, 0.0
    first, last = looks[0], looks[-1]
    seconds = last.at - first.at
    moved = last.written - first.written
    # The kernel adds what ended children have read, and the dynamic loader reads some kilobytes to start each one.
    if last.children_faults == first.children_faults:
        moved += last.read - first.read
    ended = last.children_cpu_s - first.children_cpu_s
    return (last.cpu_s - first.cpu_s) / seconds, ended / seconds, moved / seconds
