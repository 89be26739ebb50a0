"""Reads dumps that were taken elsewhere: reports of `clew hang --json`, and JSON dumps of py-spy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clew.errors import RecordError
from clew.hang.collect import sources_of, threads_from, unseen_ranks
from clew.hang.observed import PIDS_PER_NODE, Look, Process, Snapshot, snapshot_from
from clew.hang.reduce import Reducer, raw_state

LARGEST = 500_000_000
"""Files larger than this number of bytes are not read."""


def read_dumps(folder: Path) -> Snapshot:
    """Return what the JSON files of a folder hold, as one snapshot. Other files are never opened.

    A py-spy dump may carry its rank in its name: rank3.json, rank-3.json, dump_rank_3.json.

    Raises:
        RecordError: The folder does not exist, or has no dump that can be read.
    """
    if not folder.is_dir():
        raise RecordError(f"Cannot read dumps from {folder}: there is no such folder.")
    paths, notes = list[Path](), list[str]()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json" and not path.is_symlink() and path.is_file():
            paths.append(path)
        else:
            notes.append(f"{path.name} was not read: only plain .json files are")
    merge = Merge()
    for path in paths:
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError("it is too large")
            merge.add_text(path.read_text(errors="replace"), path.stem)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            notes.append(f"{path.name} was not understood: {type(error).__name__}: {error}")
    if merge.empty:
        raise RecordError(
            f"Cannot read dumps from {folder}: no file there is a report of `clew hang --json` or a JSON dump of "
            f"py-spy. {' '.join(notes[:3])}"
        )
    return merge.snapshot(notes)


class Merge:
    """Merge of several snapshots, such as those of several nodes. Only representatives of each state stay in memory."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}
        self._reducer = Reducer(self._sources)
        self._pids = set[int]()
        self._offset = 0
        self._nodes = 0
        self._reports: list[Snapshot] = []
        """Snapshots that were added, without their processes and sources."""

    @property
    def empty(self) -> bool:
        """Return whether nothing was added."""
        return self._nodes == 0

    def add_text(self, text: str, name: str = "") -> None:
        """Add a report of `clew hang --json`, or a JSON dump of py-spy.

        Args:
            name: Name of the file, in which a dump may carry its rank.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: It is something else.
        """
        value = json.loads(text)
        if isinstance(value, dict):
            self.add(snapshot_from(value["snapshot"]))
            return
        number = re.search(r"rank[-_]?(\d{1,7})", name)
        rank = int(number[1]) if number else None
        pid = next((each["pid"] for each in value if isinstance(each.get("pid"), int)), 0)
        state = raw_state(value)
        # Making objects takes long, and those of most ranks would not be kept.
        represented = rank is not None and self._reducer.stands_for(state)
        looks = () if represented else (Look(at=0.0, state="S", threads=threads_from(value)),)
        (process,) = self._with_own_pids((Process(pid=pid, rank=rank, looks=looks),))
        self._reducer.add(process, state)
        self._nodes += 1

    def add(self, snapshot: Snapshot) -> None:
        """Add what one node saw."""
        self._sources.update(snapshot.sources)
        for process in self._with_own_pids(snapshot.processes):
            self._reducer.add(process)
        self._reports.append(replace(snapshot, processes=(), sources={}))
        self._nodes += 1

    def _with_own_pids(self, processes: tuple[Process, ...]) -> tuple[Process, ...]:
        """Return a node's processes, with other pids if an earlier node has a process with the same pid."""
        pids = _pids(processes)
        if pids & self._pids:
            self._offset += PIDS_PER_NODE
            processes = tuple(renumbered(process, self._offset) for process in processes)
            pids = _pids(processes)
        # A report that was merged before has shifted pids itself: the next shift has to lie above them.
        self._offset = max(self._offset, max(pids, default=0) // PIDS_PER_NODE * PIDS_PER_NODE)
        self._pids |= pids
        return processes

    def snapshot(self, notes: Sequence[str] = ()) -> Snapshot:
        """Return what was added so far."""
        processes = self._reducer.processes
        every = [each for each in processes if each.rank is not None]
        ranks = {each.rank for each in every} | {rank for each in every for rank, _, _ in each.alike}
        if self._nodes == 1 and self._reports:
            unseen = set(self._reports[0].unseen)
        elif any(each.local_world for each in every):
            # A node whose report is missing may have the ranks that are missing.
            known = [replace(each, rank=rank) for each in every for rank in (each.rank, *(r for r, _, _ in each.alike))]
            unseen = set(unseen_ranks(known)) - ranks
        else:
            unseen = set(range(max((each.world or 0 for each in every), default=0))) - ranks
        return Snapshot(
            processes=processes,
            unseen=tuple(sorted(unseen)),
            absent=tuple(node for each in self._reports for node in each.absent),
            machine=tuple(line for each in self._reports for line in each.machine),
            seconds=max((each.seconds for each in self._reports), default=0.0),
            notes=(*(note for each in self._reports for note in each.notes), *notes),
            sources={**sources_of(processes), **self._sources},
        )


def _pids(processes: tuple[Process, ...]) -> set[int]:
    return {pid for process in processes for pid in (process.pid, *(pid for _, pid, _ in process.alike))}


def renumbered(process: Process, offset: int) -> Process:
    """Return a process with pids that are higher by an offset."""
    looks = tuple(
        replace(look, threads=tuple(replace(each, os_id=each.os_id + offset) for each in look.threads))
        for look in process.looks
    )
    return replace(
        process,
        pid=process.pid + offset,
        parent=process.parent + offset,
        looks=looks,
        alike=tuple((rank, pid + offset, host) for rank, pid, host in process.alike),
        awaits=tuple((thread + offset, own, other) for thread, own, other in process.awaits),
        awaited_child=process.awaited_child + offset if process.awaited_child else 0,
    )
