"""Finds a group or episode in a run directory by its ID. It reads the index, and only those files that may hold it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from clew.errors import RecordError
from clew.printing import visible
from clew.reading import FileMissing, flat, read_yaml
from clew.record import rows
from clew.record.inbox import group_name, group_number
from clew.record.rows import Sequence, by_episode
from clew.record.run import RunDirectory

_ID = re.compile(r"((?:v(\d+)\.)?[^/*?\[]+?)(?:(\.e\d+)(\.[is]\d+)?)?")


@dataclass(frozen=True)
class Name:
    """The parts of an ID, such as g000123, g000123.e2, g000123.e2.s0, g000123.e2.i0; in an evaluation v000020.g000123.

    Another trainer's groups may have other names.
    """

    group: str
    episode: str | None = None
    part: str | None = None
    """ID of a sequence or an interaction of the episode."""
    version: int | None = None
    """Version whose evaluation the ID belongs to; None outside evaluations."""

    @classmethod
    def parse(cls, text: str) -> Name:
        """Return the parts of an ID. Raises RecordError if `text` is not an ID."""
        found = _ID.fullmatch(text)
        if found is None:
            raise RecordError(
                f"Cannot find {text!r}: it is neither a step nor an ID. Expected a step such as 137, a group such as "
                f"g000123, an episode such as g000123.e2, or a sequence such as g000123.e2.s0."
            )
        group, version, episode, part = found.groups()
        return cls(group, episode and group + episode, text if part else None, int(version) if version else None)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A group, and what happened to it."""

    id: str
    fate: str
    sequences: list[Sequence] = field(default_factory=list)
    """Sequences in the file that holds the group."""
    failed: list[Sequence] = field(default_factory=list)
    """Sequences of failed episodes, which are in rejected/ if the other episodes are trained on."""
    step: int | None = None
    """Step that trains, or trained, on the group; None if there is none."""
    committed: bool = False
    """True if that step is committed."""

    def episodes(self) -> dict[str, list[Sequence]]:
        """Return the sequences of each episode, including failed ones."""
        found = by_episode([*self.sequences, *self.failed])
        return dict(sorted(found.items(), key=lambda item: _number(item[0])))


def find_group(run: RunDirectory, name: Name) -> Found:
    """Return a group by its ID, from an evaluation, a step, the inbox or rejected/. Raises RecordError if absent."""
    group = name.group
    if name.version is not None:
        return _of_evaluation(run, group, name.version)
    # Look in the order in which a group moves through the record, so that one that moves meanwhile is not missed.
    admitted = run.inbox.running().get(group)
    waiting = list[Sequence]()
    with suppress(FileMissing):  # it was never there, or the trainer has committed its step and removed it
        waiting = rows.from_table(run.inbox.read(group))
    rejected = _rows(run.rejected / f"{group}.parquet")
    failed = [row for path in sorted(run.rejected.glob(f"{group}.e*.parquet")) for row in _rows(path)]
    index = run.steps.index()
    step = next((entry["step"] for entry in reversed(index) if group in entry["groups"]), None)
    if step is not None:
        # Failed episodes lie in rejected/, so they can be shown even if the step's own data was removed.
        only_failed = not run.steps.has_data(step) and name.episode in {row.episode_id for row in failed}
        trained = [] if only_failed else _of_group(run.steps.data_path(step), run.steps.read_table(step), group)
        fate = f"consumed by step {step}"
        return Found(id=group, fate=fate, sequences=trained, failed=failed, step=step, committed=True)
    step = len(index)
    batch = run.steps.read_data(step) if run.steps.has_data(step) else []
    chosen = [row for row in batch if row.group_id == group]
    if chosen:
        fate = f"chosen for step {step}, which is not committed yet"
        return Found(id=group, fate=fate, sequences=chosen, failed=failed, step=step)
    if waiting:
        return Found(id=group, fate="waiting in the inbox", sequences=waiting, failed=failed)
    if rejected:
        # A failed episode has its own error; all others have the reason why the group was rejected.
        reasons = [row.error for row in rejected if row.finish_reason != "error"]
        why = reasons[0] if reasons else f"all {len(rejected)} episodes failed"
        return Found(id=group, fate=f"rejected: {why}", sequences=rejected)
    if admitted is not None:
        return Found(id=group, fate=f"being made, admitted at version {admitted}")
    whole = group_name(group_number(group)) if re.fullmatch(r"g\d+", group) else group
    meant = f" Did you mean {whole}?" if whole != group else ""
    raise RecordError(
        f"{run.path} has no group {group}: {committed_steps(len(index))}, {_range(index)}, and it is neither chosen, "
        f"waiting in the inbox, being made, nor in rejected/.{meant}"
    )


def episode_of(run: RunDirectory, found: Found, name: Name) -> list[Sequence]:
    """Return the rows of an episode of a group. Raises RecordError if there is no such episode."""
    episodes = found.episodes()
    if name.episode not in episodes:
        there = f"its episodes are {', '.join(episodes)}" if episodes else "it has no episode yet"
        raise RecordError(
            f"{run.path} has no episode {name.episode or name.group}. Group {found.id}: "
            f"{visible(found.fate, keep='')}; {there}."
        )
    return episodes[name.episode]


def read_batch(run: RunDirectory, step: int) -> list[Sequence]:
    """Return all sequences of a step, without their interactions, which may be long. Raises RecordError."""
    return rows.checked(run.steps.data_path(step), run.steps.read_table(step).drop_columns("interactions"))


def settings_of(run: RunDirectory) -> dict[str, Any]:
    """Return config.yaml by dotted names, without nulls; empty if there is none. Raises RecordError if it is not YAML.

    It is not checked: the run may be of another version of Clew, or of another trainer.
    """
    values = read_yaml(run.config_path) if run.config_path.exists() else {}
    return {name: value for name, value in flat(values).items() if value is not None}


def committed_steps(count: int) -> str:
    """Return a clause for a message that says which steps are committed."""
    return {0: "no step is committed yet", 1: "step 0 is committed"}.get(count, f"steps 0 to {count - 1} are committed")


def _range(index: list[dict[str, Any]]) -> str:
    groups = [group for entry in index for group in entry["groups"]]
    return f"with groups from {min(groups)} to {max(groups)}" if groups else "with no group"


def _number(episode_id: str) -> int:
    number = episode_id.rpartition(".e")[2]
    return int(number) if number.isdecimal() else 0


def _of_evaluation(run: RunDirectory, group: str, version: int) -> Found:
    path = run.evals.folder / f"version-{version:06d}.parquet"
    sequences = _of_group(path, rows.read_table(path), group) if path.exists() else []
    if not sequences:
        versions = ", ".join(str(entry["version"]) for entry in run.evals.read_all())
        evaluated = f"versions {versions} are evaluated" if versions else "no version is evaluated yet"
        raise RecordError(f"{run.path} has no {group}: {evaluated}.")
    return Found(id=group, fate=f"evaluation of version {version}", sequences=sequences)


def _rows(path: Path) -> list[Sequence]:
    return rows.checked(path, rows.read_table(path)) if path.exists() else []


def _of_group(path: Path, table: pa.Table, group: str) -> list[Sequence]:
    """Return the rows of a group, without unpacking the others. path: where the table was read from, for errors."""
    places = [place for place, name in enumerate(table.column("group_id").to_pylist()) if name == group]
    return rows.checked(path, table.take(places)) if places else []
