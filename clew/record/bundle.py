"""One file with what a step needs to be replayed elsewhere: a part of a run directory, as a zip archive."""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clew.errors import ClewError, RecordError
from clew.record import rows
from clew.record.files import explain_disk_errors, read_json, write_json
from clew.record.run import RunDirectory, open_run

NAME = "bundle.json"

UNKNOWN = {
    "tensors": {},
    "metrics": {},
    "evaluation": None,
    "plan": [],
    "environment": {},
    "config": {},
    "code": {},
    "committed_at": None,
    "timings": {},
}
"""What is said of a step before those that a bundle holds, of which it has the line of the index alone."""


def write_bundle(run: RunDirectory, step: int, *, stages_only: bool, to: Path | None = None) -> Path:
    """Write the bundle of a committed step; returns its path.

    stages_only: the step's own files, without weights; otherwise also the nearest checkpoint before it, the first one
    (the KL term's reference) and the steps between. to: its folder is made; by default here, with the run's names.
    Raises RecordError: no such step, no checkpoint, a full disk.
    """
    run.steps.read(step)  # it must be committed
    first = step
    folders: list[Path] = []
    if not stages_only:
        before = [version for version in run.checkpointed() if version <= step]
        if not before:
            raise RecordError(
                f"{run.path} has no checkpoint at or before step {step}: bundle it with --stages-only, or another step."
            )
        first = before[-1]
        folders = [run.checkpoints / f"step-{version:06d}" for version in sorted({before[0], first})]
    said = {"clew_format": rows.FORMAT, "step": step, "first": first, "stages_only": stages_only, "run": str(run.path)}
    kind = ".stages.clew.zip" if stages_only else ".clew.zip"
    path = to or Path(f"{run.path.parent.name}-{run.path.name}-step-{step:06d}{kind}")
    files = [run.run_json]
    if run.config_path.exists() or "trainer" not in run.facts():  # another trainer may have none
        files.append(run.config_path)
    for each in range(first, step + 1):
        files += [run.steps.data_path(each), run.steps.json_path(each), *run.steps.stage_paths(each)]
    files += [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    files += sorted({run.media.path(name) for each in range(first, step + 1) for name in _shown(run, each)})
    missing = [file for file in files if not file.exists()]
    if missing:
        raise RecordError(
            f"{missing[0]} is missing, which the bundle of step {step} needs. record.keep_steps may have removed it."
        )
    for each in range(first, step + 1):  # what cannot be read cannot be replayed
        run.steps.read_data(each)
        run.steps.read_stages(each)
    beside = path.with_name(f".{path.name}")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(NAME, json.dumps(said))
                archive.writestr("steps/index.jsonl", "".join(_index(run, step)))
                for file in files:
                    archive.write(file, str(file.relative_to(run.path)))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return path


def _shown(run: RunDirectory, step: int) -> list[str]:
    """The names of the images of a step whose data is there."""
    tables = [rows.read_table(run.steps.data_path(step))] if run.steps.has_data(step) else []
    return [name for table in tables for names in rows.images_of(table) for name in names]


def _index(run: RunDirectory, step: int) -> list[str]:
    return [json.dumps(entry) + "\n" for entry in run.steps.index()[: step + 1]]


def is_bundle(path: Path) -> bool:
    """Whether a file is one, or should be by its name."""
    return path.suffix == ".zip" or zipfile.is_zipfile(path)


@contextmanager
def opened(path: Path) -> Iterator[tuple[RunDirectory, dict[str, Any] | None]]:
    """A run directory, or what a bundle unpacks to, for as long as the block runs; and what the bundle says of itself.

    Raises RecordError when `path` is neither. What the block raises names the bundle, not the folder it is unpacked to.
    """
    if path.is_dir():
        yield open_run(path), None
        return
    with tempfile.TemporaryDirectory(prefix="clew-bundle-") as name:
        folder = Path(name) / path.name
        said = _unpack(path, folder)
        try:
            yield RunDirectory(folder), said
        except ClewError as error:
            error.args = tuple(each.replace(str(folder), str(path)) for each in error.args)
            raise


def _unpack(path: Path, folder: Path) -> dict[str, Any]:
    """What the bundle says of itself."""
    try:
        with zipfile.ZipFile(path) as archive, explain_disk_errors(folder):
            if NAME not in archive.namelist():
                raise RecordError(f"{path} is no bundle of Clew: it holds no {NAME}.")
            archive.extractall(folder)  # members that point outside lose what does
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: expected a run directory or a bundle.") from None
    except zipfile.BadZipFile as error:
        raise RecordError(f"{path} is neither a run directory nor a bundle ({error}); it may be truncated.") from None
    said = read_json(folder / NAME)
    rows.check_format(path, said["clew_format"])
    steps = RunDirectory(folder).steps
    for entry in steps.index()[: said["first"]]:
        if not steps.json_path(entry["step"]).exists():
            write_json(steps.json_path(entry["step"]), {"clew_format": rows.FORMAT, **UNKNOWN, **entry})
    return said
