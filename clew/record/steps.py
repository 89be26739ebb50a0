"""steps/: the batch that each step consumed, what was computed from it, and the JSON that commits the step.

A step is written in this order, so that a crash at any point has one meaning:

1. ``step-N.parquet``          the chosen batch; as long as 3 is missing, the same batch is trained on again
2. ``step-N/rank-R.parquet``   the stages that each rank computed
3. ``step-N.json``             commits the step: now its groups are consumed
4. a line in ``index.jsonl``   follows from 3; `Steps.repair` adds what a crash left out
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from clew.errors import RecordError
from clew.reading import RESTORE, FileMissing, read_bytes, read_json
from clew.record import chain, rows, summary
from clew.record.batch_digest import RowDigest
from clew.record.files import explain_disk_errors, remove_strays, write_bytes

OF_ROWS = {"id": pa.string(), "digest": pa.uint64(), "origin": pa.uint64()}
"""Columns of a file of stages that are not stages, and their types."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Values that were computed for a step's sequences."""

    digests: dict[str, RowDigest]
    """Digests of each sequence as training read it, by its ID."""
    arrays: dict[str, dict[str, np.ndarray]]
    """Values by stage and sequence ID: float32, aligned with the tokens, 0 where a token is not trained on."""


def parse_steps(text: str, count: int) -> range:
    """Return which of `count` steps `text` means: "137", or as Python slices "130:140" (130 to 139), ":10", "-5:".

    Raises:
        RecordError: `text` is neither form, or means no committed step.
    """
    try:
        bounds = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        bounds = []
    if len(bounds) == 1 and bounds[0] is not None:
        bounds.append(bounds[0] + 1 or None)
    if len(bounds) != 2:
        raise RecordError(
            f"--steps {text}: expected one step, such as 137, or FIRST:END, such as 130:140 (130 to 139) or -5:."
        )
    if not count:
        raise RecordError("This run has no committed step.")
    meant = range(count)[slice(*bounds)]
    if not meant:
        raise RecordError(f"--steps {text} names no committed step: there are {count}, counted from 0.")
    return meant


def steps_in_words(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


class Steps:
    """The committed steps of a run, and the step that is being made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def data_path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.parquet"

    def json_path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.json"

    def stage_path(self, step: int, rank: int) -> Path:
        return self.folder / f"step-{step:06d}" / f"rank-{rank}.parquet"

    def stage_paths(self, step: int) -> list[Path]:
        """Return the stage files of a step, one per rank; if there are none, the path that rank 0's would have."""
        folder = self.stage_path(step, 0).parent
        return sorted(folder.glob("rank-*.parquet")) or [self.stage_path(step, 0)]

    @property
    def index_path(self) -> Path:
        return self.folder / "index.jsonl"

    def write_data(self, step: int, table: pa.Table) -> None:
        """Write the batch of `step` (item 1 above), on which it is trained now, on resume and in every replay."""
        rows.write_table(self.data_path(step), table)

    def read_data(self, step: int) -> list[rows.Sequence]:
        """Return the batch of `step`. Raises RecordError if it is missing, truncated or altered."""
        return rows.checked(self.data_path(step), self.read_table(step))

    def has_data(self, step: int) -> bool:
        return self.data_path(step).exists()

    def read_table(self, step: int) -> pa.Table:
        """Return the batch of `step` as a table, without checking its rows. Raises RecordError."""
        path = self.data_path(step)
        if not self.json_path(step).exists():
            return rows.read_table(path, "remove it: the step is not committed, and its batch is chosen again")
        if not path.exists():
            show = f"clew show {self.folder.parent} {step}"
            raise RecordError(f"{self.gone(step)} What the step committed is still there: `{show}`.")
        return rows.read_table(path)

    def gone(self, step: int) -> str:
        """Return the message for a committed step whose data is missing."""
        count = self.count()
        there = next((later for later in range(step + 1, count) if self.has_data(later)), None)
        nearest = "no later step has its own" if there is None else f"the next that has its own is step {there}"
        return (
            f"the sequences of step {step} are gone: {self.data_path(step)} is missing. Either "
            f"record.keep_steps no longer keeps it, or somebody removed it; {nearest}. Restore it from a copy of the "
            f"run directory."
        )

    def write_stages(
        self, step: int, rank: int, digests: Mapping[str, RowDigest], stages: Mapping[str, Sequence[np.ndarray]]
    ) -> None:
        """Write what `rank` computed from its rows (item 2 of the module's list).

        Args:
            digests: Digests of the sequences that the rank read, by ID; see `clew.record.batch_digest.digest_rows`.
            stages: By stage, one array per sequence in the order of `digests`, aligned with its tokens. They are kept
                as float32.
        """
        columns: dict[str, pa.Array] = {
            "id": pa.array(list(digests)),
            "digest": pa.array([each.data for each in digests.values()], pa.uint64()),
            "origin": pa.array([each.origin for each in digests.values()], pa.uint64()),
        }
        for name, values in stages.items():
            offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
            flat = np.concatenate([np.empty(0, np.float32), *values]).astype(np.float32, copy=False)
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
        path = self.stage_path(step, rank)
        path.parent.mkdir(exist_ok=True)
        rows.write_table(path, pa.table(columns, metadata={"clew_format": str(rows.FORMAT)}))

    def read_stages(self, step: int, batch: Sequence[rows.Sequence] = ()) -> Stages:
        """Return what the ranks computed at `step`.

        Raises:
            RecordError: A file is missing, truncated or altered, or there is nothing for a sequence in `batch`.
        """
        environment = self.read(step).get("environment", {}) if self.json_path(step).exists() else {}
        ranks = range(0, environment.get("ranks", 1), environment.get("tp", 1))  # the first rank of a tp group writes
        # The paths of all ranks are read, so that a file that is missing raises an error.
        paths = sorted({*self.stage_paths(step), *(self.stage_path(step, rank) for rank in ranks)})
        tables = [rows.read_table(path) for path in paths]
        for path, table in zip(paths, tables, strict=True):
            _check_stages(path, table, tables[0])
        table = pa.concat_tables(tables)
        ids = table.column("id").to_pylist()
        names = [name for name in table.column_names if name not in OF_ROWS]
        digests = map(RowDigest, table.column("digest").to_pylist(), table.column("origin").to_pylist())
        recorded = dict(zip(ids, digests, strict=True))
        if unknown := [row.id for row in batch if row.id not in recorded]:
            raise RecordError(
                f"Cannot read step {step}: {self.data_path(step)} has the sequence {unknown[0]}, and "
                f"{self.stage_path(step, 0)} does not. One of the two was altered."
            )
        return Stages(
            digests=recorded,
            arrays={
                name: dict(zip(ids, rows.split_lists(table.column(name), np.float32), strict=True)) for name in names
            },
        )

    def commit(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write `step-N.json`, which commits the step, and its line of the index (items 3 and 4 of the module's list).

        Args:
            step: The number of the step. Its data and the stages of all ranks are already written.
            facts: Content of the JSON, see `clew.record.summary`. The format, the number and the chain are added; the
                index repeats `groups`, `versions` and `digests`.
        """
        link = chain.link(self, step, facts.get("evaluation"))
        content = json.dumps({"clew_format": rows.FORMAT, "step": step, "chain": link, **facts}).encode()
        write_bytes(self.json_path(step), content)
        line = {**_entry(step, facts), "json": chain.digest(content)}
        with explain_disk_errors(self.index_path), self.index_path.open("ab") as index:
            index.write(_line(line))

    def read(self, step: int) -> dict[str, Any]:
        """Return the JSON of the committed `step`. Raises RecordError if it is missing, altered or too new."""
        path = self.json_path(step)
        if not path.exists():
            count = self.count()
            if step >= 0 and (step < count or self.committed_after(step) is not None):
                raise RecordError(
                    f"Cannot read step {step}: {path} is missing, although the step was committed (a later step or "
                    f"index.jsonl says so). {RESTORE.capitalize()}."
                )
            raise RecordError(f"{path} is missing: step {step} was not committed; the next step is {count}.")
        facts = read_json(path)
        summary.check(path, step, facts, by_clew=self.by_clew)
        return facts

    def committed_after(self, step: int) -> int | None:
        """Return the first later step whose JSON exists; None if there is no such step."""
        names = (path.stem.removeprefix("step-") for path in self.folder.glob("step-*.json"))
        return min((int(name) for name in names if name.isdecimal() and int(name) > step), default=None)

    @cached_property
    def by_clew(self) -> bool:
        """True if Clew trained these steps: run.json names no other trainer."""
        run_json = self.folder.parent / "run.json"
        return not run_json.exists() or read_json(run_json, dict[str, Any]).get("trainer") is None

    def index(self) -> list[dict[str, Any]]:
        """Return a dictionary for each committed step (step, groups, versions, digests), in order.

        A torn or altered line of index.jsonl is replaced by what the step's own JSON says.
        """
        return [_entry(line["step"], line) for line in self.index_lines()]

    def index_lines(self) -> list[dict[str, Any]]:
        """Return the entries of `index` with the digest of each step's JSON (`json`), which formats before 4 lack."""
        entries: list[dict[str, Any]] = []
        for line in self._raw_lines():
            if (entry := _parse_line(line, len(entries))) is None:  # altered: the rest is read from the steps' JSON
                break
            entries.append(entry)
        while self.json_path(len(entries)).exists():  # committed, but killed before its line was written
            step = len(entries)
            entries.append(_entry(step, self.read(step)) | {"json": chain.committed_digest(self, step)})
        return entries

    def count(self) -> int:
        """Return the number of committed steps, which is also the number of the next one.

        Only the last line of the index is parsed: to parse ten thousand takes a tenth of a second.
        """
        lines = self._raw_lines()
        count = len(lines)
        if lines and _parse_line(lines[-1], count - 1) is None:
            return len(self.index_lines())
        while self.json_path(count).exists():  # committed, but killed before its line was written
            count += 1
        return count

    def _raw_lines(self) -> list[bytes]:
        """Return the complete lines of index.jsonl; empty if there is no such file."""
        try:
            return read_bytes(self.index_path).split(b"\n")[:-1]
        except FileMissing:
            return []

    def consumed(self) -> set[str]:
        return {group_id for entry in self.index() for group_id in entry["groups"]}

    def pending_groups(self) -> set[str]:
        """Return the IDs of the groups in a step whose data is written but which is not committed yet."""
        step = self.count()
        if not self.has_data(step):
            return set()
        return set(self.read_table(step).column("group_id").to_pylist())

    def repair(self) -> None:
        """Complete the index and remove half-written files after a kill. Only the trainer may call this.

        It also removes the stages of a step that was not committed: another number of ranks may make that step now.
        """
        for folder in (self.folder, *self.folder.glob("step-*/")):
            remove_strays(folder, "*")
        entries = self.index_lines()
        shutil.rmtree(self.stage_path(len(entries), 0).parent, ignore_errors=True)
        whole = b"".join(map(_line, entries))
        if not self.index_path.exists() or self.index_path.read_bytes() != whole:
            write_bytes(self.index_path, whole)

    def prune(self, before: int) -> None:
        """Remove data and stages of the steps before `before`. What they committed (JSON, index) stays."""
        for path in self.folder.glob("step-*.parquet"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) < before:  # a user may have put copies beside the files
                shutil.rmtree(self.stage_path(int(number), 0).parent, ignore_errors=True)
                path.unlink(missing_ok=True)  # last: after a kill, this file is how the step is found again


def _check_stages(path: Path, table: pa.Table, first: pa.Table) -> None:
    """Raise RecordError if a file of stages is not as `write_stages` writes it, or has other columns than the first."""
    there = dict(zip(table.column_names, table.schema.types, strict=False))
    wrong = [name for name, kind in there.items() if kind != OF_ROWS.get(name, pa.list_(pa.float32()))]
    wrong += sorted(OF_ROWS.keys() - {*there}) + sorted({*first.column_names} ^ {*there})
    if wrong:
        raise rows.altered(path, f"the column {wrong[0]!r} is {there.get(wrong[0], 'absent')}")
    empty = [name for name in there if _has_empty_places(table.column(name))]
    if empty:
        raise rows.altered(path, f"the column {empty[0]!r} has an empty place")
    ids = table.column("id").to_pylist()
    if len(set(ids)) < len(ids):
        raise rows.altered(path, "it holds the same sequence twice")


def _has_empty_places(column: pa.ChunkedArray) -> bool:
    within = (chunk.values.null_count for chunk in column.chunks if pa.types.is_list(column.type))
    return column.null_count > 0 or any(within)


def _entry(step: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of the index for a step."""
    return {"step": step, **{key: facts[key] for key in chain.INDEXED}}


def _parse_line(line: bytes, step: int) -> dict[str, Any] | None:
    """Return the entry of `step` in a line of index.jsonl; None if the line was altered or is of another step."""
    try:
        parsed = orjson.loads(line)
        entry = _entry(parsed["step"], parsed) | ({"json": parsed["json"]} if "json" in parsed else {})
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    # A schema takes ten times as long, and there may be ten thousand lines.
    groups, versions, digests = (entry[key] for key in chain.INDEXED)
    lists = isinstance(groups, list) and isinstance(versions, list) and isinstance(digests, dict)
    typed = lists and set(map(type, groups)) <= {str} and list(map(type, versions)) == [int, int]
    return entry if typed and entry["step"] == step else None


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"
