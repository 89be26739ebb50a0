"""Reads dumps that were taken elsewhere: reports of `clew hang --json`, and JSON dumps of py-spy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from clew.errors import RecordError
from clew.hang.collect import parse_dump, sources_of
from clew.hang.observed import Look, Process, Snapshot, snapshot_from

LARGEST = 500_000_000
"""Size in bytes from which a file is not read."""


def read_dumps(folder: Path) -> Snapshot:
    """Return what the JSON files of a folder hold, as one snapshot. Other files are never opened.

    A py-spy dump may carry its rank in its name: rank3.json, rank-3.json, dump_rank_3.json.

    Raises:
        RecordError: The folder does not exist, or has no dump that can be read.
    """
    if not folder.is_dir():
        raise RecordError(f"Cannot read dumps from {folder}: there is no such folder.")
    found, notes = list[Snapshot](), list[str]()
    for path in sorted(folder.iterdir()):
        if path.suffix != ".json" or path.is_symlink() or not path.is_file():
            notes.append(f"{path.name} was not read: only plain .json files are")
            continue
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError("it is too large")
            found.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            notes.append(f"{path.name} was not understood: {type(error).__name__}: {error}")
    if not found:
        raise RecordError(
            f"Cannot read dumps from {folder}: no file there is a report of `clew hang --json` or a JSON dump of "
            f"py-spy. {' '.join(notes[:3])}"
        )
    return merged(found, notes)


def merged(every: list[Snapshot], notes: list[str]) -> Snapshot:
    """Return one snapshot of several, such as those of several nodes."""
    processes = tuple(
        renumbered(process, place * APART) for place, each in enumerate(every) for process in each.processes
    )
    if len({process.pid % APART for process in processes}) == len(processes):
        processes = tuple(process for each in every for process in each.processes)
    sources = {file: text for each in every for file, text in each.sources.items()}
    worlds = [each.world for each in every if each.world]
    return Snapshot(
        processes=processes,
        seconds=max(each.seconds for each in every),
        world=worlds[0] if worlds else None,
        notes=tuple([note for each in every for note in each.notes] + notes),
        sources={**sources_of(processes), **sources},
    )


APART = 10_000_000
"""Distance between the pids of two nodes, of which each may have a process with the same pid."""


def renumbered(process: Process, offset: int) -> Process:
    """Return a process with pids that are higher by an offset."""
    looks = tuple(
        replace(look, threads=tuple(replace(each, os_id=each.os_id + offset) for each in look.threads))
        for look in process.looks
    )
    return replace(process, pid=process.pid + offset, parent=process.parent + offset, looks=looks)


def _read(path: Path) -> Snapshot:
    text = path.read_text(errors="replace")
    value = json.loads(text)
    if isinstance(value, dict):
        return snapshot_from(value["snapshot"])
    threads = parse_dump(text)
    pid = next((each["pid"] for each in value if isinstance(each.get("pid"), int)), 0)
    rank = re.search(r"rank[-_]?(\d{1,7})", path.stem)
    look = Look(at=0.0, state="S", threads=threads)
    return Snapshot(processes=(Process(pid=pid, rank=int(rank[1]) if rank else None, looks=(look,)),))
