"""Origin of a run directory: the user's own run, or someone else's, whose configuration may name code to run."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from clew.record import rows
from clew.record.files import write_json
from clew.record.run import RunDirectory

NAME = "bundle.json"
"""Name of the file in which a bundle describes itself. It is also in a folder that somebody unpacked by hand."""

IMPORTED = "clew import"
"""Name of the trainer in run.json for a run that was imported."""

ORIGIN = "foreign"
"""Key in run.json for a run that began with someone else's record; its value says why the record is foreign."""


def why_foreign(run: RunDirectory) -> str | None:
    """Return why the configuration of a run may be someone else's; None if the run is this user's own.

    A run is foreign if it was imported, came as a bundle, or began with a foreign record. It is also foreign if any
    file that the configuration is read from belongs to another user than the present one, root included.
    """
    facts = run.facts()
    if facts.get(ORIGIN):
        return f"{run.path} began with a stranger's record: {facts[ORIGIN]}"
    if facts.get("trainer") == IMPORTED:
        return f"{run.path} was imported (`clew import`)"
    if (run.path / NAME).exists():
        return f"{run.path} was unpacked from a bundle"
    us = os.geteuid()
    entries = os.scandir(run.steps.folder) if run.steps.folder.is_dir() else []
    steps = [entry.path for entry in entries if entry.name.endswith(".json")]
    for path in (run.path, run.steps.folder, run.run_json, run.config_path, *steps):
        for owner in _owners(path):
            if owner != us:
                return f"{run.path} belongs to another user ({path} to user {owner}, and you are {us})"
    return None


def _owners(path: Path | str) -> Iterator[int]:
    """Yield the owner of a file and, if it is a link, of what it points to; nothing if the file does not exist.

    A link to itself or to what this user cannot reach points to nothing: its reader says so when it opens the file.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    yield found.st_uid
    if stat.S_ISLNK(found.st_mode):
        with suppress(OSError):
            yield Path(path).stat().st_uid


def mark_foreign(run: RunDirectory, why: str) -> None:
    """Note in run.json that a new run began with someone else's record, so that its code is not trusted either."""
    facts = run.facts() or {"created": time.time()}
    write_json(run.run_json, {"clew_format": rows.FORMAT, **facts, ORIGIN: why})
