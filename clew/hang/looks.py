"""Says what the looks at a process show by themselves: its newest ones, whole stacks, and whether it computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from clew.hang.observed import Process, Thread

SPINNING = 0.3
"""Share of one core from which a `while` without counters that advance is taken for endless."""
STEADY_LOOKS = 5
"""Minimum number of looks for a number that only rises, or only falls, to show progress. Of the 120 orders of five
numbers, only 2 rise or fall throughout."""
RECENT_S = 1.5
"""Last seconds in which a process has to move; half of the watched time if that is longer. What moved earlier may hang
by now."""


def recent(process: Process) -> Process:
    """Return the process with its newest looks only: what moved before may stand still now."""
    if len(process.looks) < 3:
        return process
    last = process.last.at
    since = last - max(RECENT_S, (last - process.first.at) / 2)
    kept = tuple(look for look in process.looks if look.at >= since)
    return replace(process, looks=kept if len(kept) > 1 else process.looks[-2:])


def without_torn(process: Process) -> Process:
    """Return the process without torn stacks, which lack outer frames because the process ran meanwhile."""
    bottoms = [(t.frames[-1].file, t.frames[-1].function) for t in mains_of(process)]
    if len(set(bottoms)) < 2:
        return process
    common = Counter(bottoms).most_common(1)[0][0]
    torn = {id(t) for t, bottom in zip(mains_of(process), bottoms, strict=True) if bottom != common}
    looks = (replace(x, threads=()) if id(x.main(process.pid)) in torn else x for x in process.looks)
    return replace(process, looks=tuple(looks))


def with_missed_tasks(process: Process) -> Process:
    """Return the process with the tasks that its last look missed, as they were in the look before.

    A task that runs while tasks are read is not among them: its frames are its thread's, whose stack may have been read
    a moment earlier or later.
    """
    if len(process.looks) < STEADY_LOOKS:
        return process
    *earlier, last = process.looks
    often = Counter(t.at for look in earlier for t in look.threads if t.task and not t.ended and t.user_frames)
    known = {t.at for t in last.threads} | {0}
    running = {frame.function for t in last.threads if not t.task for frame in t.frames}
    before = (t for t in earlier[-1].threads if t.at not in known and often[t.at] >= 0.8 * len(earlier))
    missed = [t for t in before if t.frames[-1].function not in running]
    return replace(process, looks=(*earlier, replace(last, threads=(*last.threads, *missed)))) if missed else process


def mains_of(process: Process) -> list[Thread]:
    """Return the stacks of the main thread that were read, one for each look."""
    return [thread for look in process.looks if (thread := look.main(process.pid)) and thread.frames]


def places(process: Process) -> list[tuple[tuple[str, str, int], ...]]:
    """Return where the user's frames of the main thread were in each look."""
    return [tuple((f.file, f.function, f.line) for f in thread.user_frames) for thread in mains_of(process)]


def never_woken(process: Process) -> bool:
    """Return whether the main thread was not woken up during the whole watch. False if it has never waited."""
    return process.first.switches > 0 and not process.wakeups


def busy(process: Process) -> bool:
    """Return whether a process computes: it used much of a core, or was nearly always ready to run."""
    first, last, count = process.first, process.last, len(process.looks)
    ready = sum(look.state == "R" for look in process.looks)
    # The switches are those of the main thread, the CPU time is that of all threads.
    never_waited = last.switches == first.switches >= 0 and last.cpu_s > first.cpu_s and ready > 0
    return cpu_share(process) > SPINNING or never_waited or (count > 2 and ready >= 0.8 * count)


def own_code_only(process: Process, name: str = "MainThread") -> bool:
    """Return whether no look found a thread in an installed package: it computes in the user's own Python."""
    if name != "MainThread":  # its outer frames belong to a library, so look at its innermost frame only
        others = [t for look in process.looks for t in look.threads if t.name == name and t.frames]
        return len(others) > 2 and all(thread.frames[0].of_user for thread in others)
    # What called the user's code, such as a data loader or multiprocessing, does not count.
    mains = mains_of(process)
    return len(mains) > 2 and all(t.user_frames == t.frames[: len(t.user_frames)] != () for t in mains)


def cpu_share(process: Process) -> float:
    """Return the share of one core that a process used while it was watched."""
    first, last = process.first, process.last
    return (last.cpu_s - first.cpu_s) / (last.at - first.at) if last.at > first.at else 0.0
