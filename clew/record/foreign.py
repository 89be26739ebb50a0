"""Whose words a run directory holds: the user's own, or a stranger's, which may name code to run."""

from __future__ import annotations

import os
import time

from clew.record import rows
from clew.record.files import read_json, write_json
from clew.record.run import RunDirectory

NAME = "bundle.json"
"""The file in which a bundle says what it holds. It lies in a folder that somebody unpacked by hand, too."""

IMPORTED = "clew import"
"""What run.json names as the trainer of a run that was imported."""

ORIGIN = "foreign"
"""The fact in run.json that says why a run is a stranger's where it was begun with a stranger's record."""


def why_foreign(run: RunDirectory) -> str | None:
    """Say why the configuration of a run may be a stranger's; None where it is this user's own.

    A run is foreign when it was imported, when it came as a bundle or began with a foreign one, and when any file that
    the configuration is read from is owned by another user than the one who asks, root included.
    """
    facts = run.facts()
    if facts.get(ORIGIN):
        return f"{run.path} began with a stranger's record: {facts[ORIGIN]}"
    if facts.get("trainer") == IMPORTED:
        return f"{run.path} was imported (`clew import`)"
    if (run.path / NAME).exists():
        return f"{run.path} was unpacked from a bundle"
    us = os.geteuid()
    for path in (run.path, run.steps.folder, run.run_json, run.config_path, *run.steps.folder.glob("*.json")):
        for owner in {path.lstat().st_uid, path.stat().st_uid} if path.exists() else ():
            if owner != us:
                return f"{run.path} belongs to another user ({path} to user {owner}, and you are {us})"
    return None


def mark_foreign(run: RunDirectory, why: str) -> None:
    """Have run.json say that a new run began with a stranger's record, so that its code is not trusted either."""
    facts = read_json(run.run_json) if run.run_json.exists() else {"created": time.time()}
    write_json(run.run_json, {"clew_format": rows.FORMAT, **facts, ORIGIN: why})
