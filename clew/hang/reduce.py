"""Reduces a job to a few representatives of each state, so that nodes send little and a merge stays small.

Ranks in the same state (equal stacks, equal counters, both moving or both not) are represented by two of them. The
first lists the others as `alike`. Parts may be reduced first, then merged and reduced again: the result is the same as
reducing all at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clew.hang.activity import LOOP_COUNTER, WORKS, activity_of
from clew.hang.observed import Frame, Process, Snapshot, Thread

KEPT = 2
"""Number of ranks of one state that are kept as they were seen."""
JUDGED = 256
"""Number of processes up to which all are judged. Above it, only some of each state are judged."""
MAKING = ("init", "new_group")
MEETING = ("hostname", "port", "group_name", "ranks")
"""Local variables of torch that say where ranks that are making a group meet, and which group it is."""
COUNTERS = re.compile(r"(\w*step\w*|it|iter\w*|i|n|epoch|batch\w*|micro\w*|idx|index|(group_)?(src|dst))$")
"""Local integers that must be equal for ranks of one state: they show which call a rank is in and whom it awaits."""


class Reducer:
    """Takes processes one by one, and keeps the representatives."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Begin without processes.

        Args:
            sources: Text of the source files in the stacks, which say who belongs to a group. It may grow meanwhile.
        """
        self._sources = sources
        self._kept = defaultdict[Hashable, list[Process]](list)
        self._alike = defaultdict[Hashable, list[tuple[int, int, str]]](list)

    def add(self, process: Process, state: Hashable = None) -> None:
        """Add a process.

        Args:
            state: State that `raw_state` gave; None to find it out.
        """
        if process.rank is None:
            key: Hashable = (len(self._kept), process.pid)
        else:
            key = state_of(process, self._sources) if state is None else state
        if len(self._kept[key]) < KEPT:
            self._kept[key].append(replace(process, alike=()) if process.alike else process)
        else:
            assert process.rank is not None
            self._alike[key].append((process.rank, process.pid, process.host))
        self._alike[key] += process.alike

    def stands_for(self, state: Hashable) -> bool:
        """Return whether there are enough representatives of a state that `raw_state` gave."""
        return len(self._kept.get(state, ())) >= KEPT

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return the representatives; the first of each state lists the ranks that it stands for."""
        found = []
        for key, kept in self._kept.items():
            alike = tuple(sorted(self._alike[key]))
            found += [replace(kept[0], alike=alike) if alike else kept[0], *kept[1:]]
        return tuple(found)


def reduced(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with the representatives only."""
    reducer = Reducer(snapshot.sources)
    for process in snapshot.processes:
        reducer.add(process)
    return replace(snapshot, processes=reducer.processes)


def state_of(process: Process, sources: Mapping[str, str]) -> Hashable:
    """Return the state of a rank, as a key: of ranks with equal keys, one can stand for the others."""
    last, main = process.last, process.last.main(process.pid)
    # A rank that has moved is alone in its state: its looks are its own, even if the last one equals that of others.
    alone = len({tuple(_frames(look.threads)) for look in process.looks[:-1]}) > 1
    threads = tuple(_frames(last.threads))
    one = activity_of(process, main, sources, process.world) if main is not None else None
    operation: tuple[Hashable, ...] = ()
    if main is not None and one is not None:  # everything by which `same_call` tells ranks apart
        counts = [each for each in one.counters.items() if LOOP_COUNTER.search(each[0]) or WORKS.search(each[0])]
        met = [frame.locals.get(name) for frame in main.frames for name in MEETING] if one.kind in MAKING else []
        met += [frame.locals.get("rank") for frame in main.frames if _joins(frame) and not _joins(frame, process.rank)]
        operation = (one.op, one.group, one.members, one.peers, one.tag, one.branch, one.root, one.shape, *counts, *met)
    seen = (last.state, last.error, process.wakeups > 1, process.exit, process.waits_in, process.world)
    return threads, *operation, *seen, process.calls, process.launched, alone and process.pid


def _frames(threads: Sequence[Any]) -> Iterator[Hashable]:
    for thread in threads:
        yield tuple((f.function, f.file, f.line, *_counters(f.locals)) for f in thread.frames)


def _counters(values: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items() if value.isdigit() and COUNTERS.match(name)]


def raw_state(threads: list[dict[str, Any]]) -> Hashable:
    """Return the state of a JSON dump of py-spy, without making objects of it. May raise KeyError or TypeError."""
    stacks = []
    for thread in threads:
        stack = []
        for frame in thread["frames"]:
            values = {local["name"]: str(local["repr"]) for local in frame.get("locals") or ()}
            stack.append((frame["name"], frame["filename"], frame["line"], *_counters(values)))
        stacks.append(tuple(stack))
    return tuple(stacks)


def to_judge(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot in which ranks that others stand for are processes again: all, or a share of each state."""
    total = len(snapshot.processes) + sum(len(each.alike) for each in snapshot.processes)
    if total == len(snapshot.processes) <= JUDGED:
        return snapshot
    share = total if total <= JUDGED else max(4, JUDGED // max(1, len(snapshot.processes)))
    found = list[Process]()
    for process in snapshot.processes:
        found.append(replace(process, alike=process.alike[share:]))
        found += [_as(process, *alike) for alike in process.alike[:share]]
    notes = snapshot.notes
    if len(found) < total:
        notes = (*notes, f"judged by {len(found)} of {total} processes: a few of each state, and all of rare states")
    return replace(snapshot, processes=tuple(found), notes=notes)


def _joins(frame: Frame, rank: int | None = None) -> bool:
    """Return whether a frame makes torch's default group; with a rank, whether it does so as this rank."""
    return frame.name == "init_process_group" and (rank is None or frame.locals.get("rank") == str(rank))


def _as(process: Process, rank: int, pid: int, host: str) -> Process:
    def own_frame(frame: Frame) -> Frame:
        joins = _joins(frame, process.rank)
        return replace(frame, locals={**frame.locals, "rank": str(rank)}) if joins else frame

    def own_thread(thread: Thread) -> Thread:
        number = pid if thread.os_id == process.pid else thread.os_id
        return replace(thread, os_id=number, frames=tuple(map(own_frame, thread.frames)))

    looks = tuple(replace(look, threads=tuple(map(own_thread, look.threads))) for look in process.looks)
    # `roles` reads a rank from these groups, and above from a call, so each process needs its own rank there.
    groups = tuple(each if each.rank is None else replace(each, rank=rank) for each in process.inside.groups)
    inside = replace(process.inside, groups=groups)
    return replace(
        process,
        rank=rank,
        pid=pid,
        host=host,
        looks=looks,
        inside=inside,
        alike=(),
        awaits=(),  # what its own system calls wait for was not kept
        ends=(),
        awaited_child=0,
    )
