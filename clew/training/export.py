"""Export of a run's steps, one file each, for use elsewhere (`clew export`), and import (`clew import`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clew.console import tracked
from clew.errors import ConfigError, RecordError
from clew.record import rows
from clew.record.files import explain_disk_errors, write_bytes
from clew.record.origin import IMPORTED
from clew.record.run import RunDirectory
from clew.record.steps import parse_steps
from clew.record.writer import Writer
from clew.training.batch_metrics import rollout_metrics
from clew.training.padded import load_padded, load_stages, save_padded
from clew.training.saving import written_aside

Stages = dict[str, list[np.ndarray]]
"""Stages by name: one float32 array per sequence, aligned with its tokens."""


def export_steps(run: RunDirectory, form: str, steps: str, folder: Path) -> list[Path]:
    """Write the batch and stages of each chosen step to a file, and return the files.

    Args:
        form: Format of the files, a key of `FORMS`.
        steps: The steps, as `choose_steps` takes them.
        folder: Folder for the files, which is made if it does not exist.

    Raises:
        ConfigError: The format is unknown.
        RecordError: A step or its data is missing, the folder lies inside the record, or it cannot be written to.
    """
    if form not in FORMS:
        raise ConfigError(f"Cannot export as {form!r}: expected {', '.join(FORMS)}.")
    chosen = choose_steps(run, steps)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve().is_relative_to(run.steps.folder.resolve()):
        raise RecordError(f"Cannot export to {folder}: it lies inside the record. Choose another folder.")
    files = []
    for step in tracked(chosen, "exporting", total=len(chosen), unit="steps"):
        batch = run.steps.read_data(step)
        arrays = run.steps.read_stages(step, batch).arrays
        stages = {name: [values[row.id] for row in batch] for name, values in arrays.items()}
        files.append(folder / f"step-{step:06d}.{form}")
        FORMS[form](files[-1], batch, stages)
    return files


def choose_steps(run: RunDirectory, steps: str) -> list[int]:
    """Return the committed steps that `steps` names (see `parse_steps`); "" means all whose data is there.

    Raises:
        RecordError: `steps` names no committed step, or the data of a step that it names is missing.
    """
    meant = parse_steps(steps or ":", run.steps.count())
    there = [step for step in meant if run.steps.has_data(step)]
    if not there or (steps and there != list(meant)):
        raise RecordError(run.steps.gone(min(set(meant) - set(there))))
    return there


def import_steps(files: Sequence[Path], folder: Path, group_size: int | None) -> None:
    """Make a run directory from .pt files, one step each, in this order. The directory appears complete or not at all.

    Args:
        folder: The new run directory.
        group_size: Number of consecutive rows per group, for files that name no groups; see `load_padded`.

    Raises:
        RecordError: The folder exists, or a file cannot be read or holds no valid batch.
    """
    if folder.exists():
        raise RecordError(f"{folder} exists already; expected the name of a new run directory. Choose another --to.")
    with written_aside(folder) as aside, Writer(aside, trainer=IMPORTED) as writer:
        for file in tracked(files, "importing", total=len(files), unit="files"):
            batch = load_padded(file, group_size=group_size, first_group=writer.next_group)
            try:
                writer.step(batch, stages=load_stages(file), metrics=rollout_metrics(batch) if batch else None)
            except RecordError as error:
                raise RecordError(f"{file}: {error}") from None


def _write_parquet(path: Path, batch: list[rows.Sequence], stages: Stages) -> None:
    """Write the record's table, with one more column per stage, which readers of the record ignore."""
    table = rows.to_table(batch)
    for name, values in stages.items():
        table = table.append_column(f"stage_{name}", pa.array(values, pa.list_(pa.float32())))
    rows.write_table(path, table)


def _write_jsonl(path: Path, batch: list[rows.Sequence], stages: Stages) -> None:
    """Write one line per sequence. NaN and infinity become null, as JSON has neither."""
    lines = []
    for place, row in enumerate(batch):
        values = {name: getattr(row, name) for name in rows.COLUMNS}
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
"""Writer of each form, by the suffix of the file's name."""
