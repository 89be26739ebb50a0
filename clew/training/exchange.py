"""Steps out of a run, one file each, to be taken elsewhere (`clew export`); and back (`clew import`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clew.errors import ConfigError, RecordError
from clew.record import rows
from clew.record.files import explain_disk_errors, write_bytes
from clew.record.foreign import IMPORTED
from clew.record.run import RunDirectory
from clew.record.steps import parse_steps
from clew.record.writer import Writer
from clew.training.folders import written_aside
from clew.training.metrics import rollout_metrics
from clew.training.padded import load_padded, load_stages, save_padded

Stages = dict[str, list[np.ndarray]]
"""By name, one float32 array a sequence, aligned with its tokens."""


def export_steps(run: RunDirectory, form: str, steps: str, folder: Path) -> list[Path]:
    """Write a file for each of these steps: batch and stages. Returns the files.

    form: a key of `FORMS`.   steps: as `choose_steps` takes them.
    Raises ConfigError and RecordError.
    """
    if form not in FORMS:
        raise ConfigError(f"there is no form {form!r} to export; there are {', '.join(FORMS)}.")
    chosen = choose_steps(run, steps)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve().is_relative_to(run.steps.folder.resolve()):
        raise RecordError(f"{folder} is where the record itself lies. Choose another folder.")
    files = []
    for step in chosen:
        batch = run.steps.read_data(step)
        arrays = run.steps.read_stages(step, batch).arrays
        stages = {name: [values[row.id] for row in batch] for name, values in arrays.items()}
        files.append(folder / f"step-{step:06d}.{form}")
        FORMS[form](files[-1], batch, stages)
    return files


def choose_steps(run: RunDirectory, steps: str) -> list[int]:
    """The committed steps that are meant, see `parse_steps`; "" means all whose data is there. Raises RecordError when
    there is none, or its data is gone."""
    meant = parse_steps(steps or ":", run.steps.count())
    there = [step for step in meant if run.steps.has_data(step)]
    if not there or (steps and there != list(meant)):
        raise RecordError(run.steps.gone(min(set(meant) - set(there))))
    return there


def import_steps(files: Sequence[Path], folder: Path, group_size: int | None) -> None:
    """Make a run directory of .pt files, a step each, in this order. All of it appears, or nothing.

    group_size: of files that name no groups, see `load_padded`. Raises RecordError.
    """
    if folder.exists():
        raise RecordError(f"{folder} exists already; expected the name of a new run directory. Choose another --to.")
    with written_aside(folder) as aside, Writer(aside, trainer=IMPORTED) as writer:
        for file in files:
            batch = load_padded(file, group_size=group_size, first_group=writer.next_group)
            try:
                writer.step(batch, stages=load_stages(file), metrics=rollout_metrics(batch) if batch else None)
            except RecordError as error:
                raise RecordError(f"{file}: {error}") from None


def _write_parquet(path: Path, batch: list[rows.Sequence], stages: Stages) -> None:
    """The table of the record; each stage is one more column, which readers of the record leave alone."""
    table = rows.to_table(batch)
    for name, values in stages.items():
        table = table.append_column(f"stage_{name}", pa.array(values, pa.list_(pa.float32())))
    rows.write_table(path, table)


def _write_jsonl(path: Path, batch: list[rows.Sequence], stages: Stages) -> None:
    """A line a sequence. JSON has no NaN and no infinity: null."""
    lines = []
    for place, row in enumerate(batch):
        values = {name: getattr(row, name) for name in rows.SCHEMA.names}
        values["stages"] = {name: arrays[place] for name, arrays in stages.items()}
        lines.append(json.dumps(_plain(values), default=str) + "\n")
    write_bytes(path, "".join(lines).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist() if np.isfinite(value).all() else _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FORMS = {"parquet": _write_parquet, "jsonl": _write_jsonl, "pt": save_padded}
"""By the end of the file's name."""
