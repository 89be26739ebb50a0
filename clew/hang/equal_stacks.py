"""Groups processes whose main threads have equal stacks, and writes ranks as ranges, such as 0-3, 7."""

from __future__ import annotations

from collections.abc import Iterable

from clew.hang.observed import PIDS_PER_NODE, Process, Thread

Stack = tuple[str, ...]
RanksByStack = dict[Stack, tuple[tuple[int, int], ...]]
"""Ranks of each stack, as ranges of first and last."""


def stack_of(thread: Thread) -> Stack:
    """Return a thread's stack with the outermost frame first. Line numbers within torch drift, so they are left out."""
    return tuple(
        f"{frame.function} ({'torch/' if '/torch/' in frame.file else ''}{frame.file.rpartition('/')[2]}"
        + (")" if "/torch/" in frame.file else f":{frame.line})")
        for frame in reversed(thread.frames)
    )


def ranks_by_stack(processes: Iterable[Process]) -> RanksByStack:
    """Return the stacks of main threads, each with its ranks. A process without a rank counts as its negative pid."""
    found: dict[Stack, list[int]] = {}
    for process in processes:
        if (thread := process.main) is not None:
            numbers = found.setdefault(stack_of(thread), [])
            numbers.append(process.rank if process.rank is not None else -process.pid)
            numbers += [rank for rank, _, _ in process.alike]
    return {stack: as_ranges(numbers) for stack, numbers in found.items()}


def as_ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as sorted ranges of first and last."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1 and number != 0:  # -1 is pid 1, and 0 is rank 0
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as 0-3, 7."""
    return ranges_text(as_ranges(numbers))


def by_value(texts: Iterable[tuple[int, str]]) -> str:
    """Return each distinct text once, after the ranks that share it, such as `rank 0-3: in call 7`."""
    shared: dict[str, list[int]] = {}
    for rank, text in texts:
        shared.setdefault(text, []).append(rank)
    return "; ".join(f"rank {ranges(numbers)}: {text}" for text, numbers in shared.items())


def ranges_text(pairs: Iterable[tuple[int, int]]) -> str:
    """Return ranges as text; a negative number is a pid."""
    said = []
    for first, last in pairs:
        if first < 0:
            said += [f"pid {-number % PIDS_PER_NODE}" for number in range(first, last + 1)]
        else:
            said.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(said)
