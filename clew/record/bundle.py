"""Bundles: a zip archive with the part of a run directory that is needed to replay a step elsewhere."""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import with_config
from typing_extensions import TypedDict

from clew.dotted import only_trusted
from clew.errors import ClewError, RecordError
from clew.reading import STRICT, Count, read_json
from clew.record import rows, summary
from clew.record.files import explain_disk_errors, write_json
from clew.record.origin import NAME, why_foreign
from clew.record.run import RunDirectory, no_run, open_run

MEMBERS = 100_000
"""Maximum number of files in a bundle."""

ALWAYS_BYTES = 2**28
"""Unpacked size, in bytes, that is allowed for any bundle: 256 MiB."""

LARGER = 50
"""Maximum ratio of unpacked to packed size, for bundles that unpack to more than `ALWAYS_BYTES`. Weights hardly
shrink, but an optimizer's moments may be all zeros."""


@with_config(STRICT)
class Bundle(TypedDict):
    """Content of bundle.json."""

    clew_format: int
    step: Count
    first: Count
    stages_only: bool
    run: str


def write_bundle(run: RunDirectory, step: int, *, stages_only: bool, to: Path | None = None) -> Path:
    """Write the bundle of a committed step and return the bundle's path.

    Args:
        stages_only: Bundle only the step's own files, without weights. Otherwise the bundle also holds the nearest
            checkpoint before the step, the first checkpoint (the reference of the KL term) and the steps in between.
        to: Path of the bundle, whose folder is created if necessary; or an existing folder, in which the bundle is
            named after the run and the step. None: the current folder.

    Raises:
        RecordError: There is no such step, no checkpoint at or before it, a file is missing, or the disk is full.
    """
    run.steps.read(step)  # raises an error if it is not committed
    versions = [] if stages_only else _versions(run, step)
    first = versions[-1] if versions else step
    files = _files(run, range(first, step + 1), versions)
    _check_files(run, step, files)
    for number in range(first, step + 1):  # what cannot be read cannot be replayed
        run.steps.read_data(number)
        run.steps.read_stages(number)
    contents = {
        "clew_format": rows.FORMAT,
        "step": step,
        "first": first,
        "stages_only": stages_only,
        "run": str(run.path),
    }
    kind = ".stages.clew.zip" if stages_only else ".clew.zip"
    experiment_and_trial = "-".join(run.path.resolve().parts[1:][-2:])
    named = f"{experiment_and_trial}-step-{step:06d}{kind}"
    path = Path(named) if to is None else to / named if to.is_dir() else to
    beside = path.with_name(f".{path.name}")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                archive.writestr(NAME, json.dumps(contents))
                index = [json.dumps(entry) + "\n" for entry in run.steps.index_lines()[: step + 1]]
                archive.writestr("steps/index.jsonl", "".join(index))
                for file in files:
                    _add(archive, file, str(file.relative_to(run.path)))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return path


def _add(archive: zipfile.ZipFile, file: Path, name: str) -> None:
    try:
        archive.write(file, name)
    except FileNotFoundError:
        raise RecordError(
            f"{file} was removed meanwhile, by the run that goes on (checkpoint.keep, record.keep_steps). Bundle a "
            f"later step, or let the run keep more."
        ) from None


def _versions(run: RunDirectory, step: int) -> list[int]:
    """Return the first checkpoint's version and that of the last one at or before a step. Raises RecordError."""
    before = [version for version in run.checkpointed() if version <= step]
    if not before:
        raise RecordError(
            f"Cannot bundle step {step}: {run.path} has no checkpoint at or before it. Use --stages-only, or "
            f"bundle a later step."
        )
    return sorted({before[0], before[-1]})


def _files(run: RunDirectory, steps: range, versions: list[int]) -> list[Path]:
    """Return the files of these steps, with their images, and of these checkpoints.

    Raises:
        RecordError: An image's content does not match its name.
    """
    files = [run.run_json]
    if run.config_path.exists() or "trainer" not in run.facts():  # another trainer may have none
        files.append(run.config_path)
    for number in steps:
        files += [run.steps.data_path(number), run.steps.json_path(number), *run.steps.stage_paths(number)]
    for version in versions:
        files += [file for file in sorted(run.checkpoint(version).rglob("*")) if file.is_file()]
    tables = (rows.read_table(run.steps.data_path(number)) for number in steps if run.steps.has_data(number))
    for name in sorted({name for table in tables for names in rows.images_of(table) for name in names}):
        run.media.read(name)  # raises RecordError if the content was altered
        files.append(run.media.path(name))
    return files


def _check_files(run: RunDirectory, step: int, files: list[Path]) -> None:
    """Raise RecordError if one of a bundle's files is missing, or is a link out of the run directory."""
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise RecordError(
            f"Cannot bundle step {step}: {missing} is missing. record.keep_steps may have removed it. Bundle a later "
            f"step."
        )
    for file in files:
        if not file.resolve().is_relative_to(run.path.resolve()):
            raise RecordError(
                f"Cannot bundle step {step}: {file} is a link to {file.resolve()}, which is not in the run directory. "
                f"Put a copy of the file there."
            )


@contextmanager
def opened(path: Path, trust: Iterable[str] = ()) -> Iterator[tuple[RunDirectory, dict[str, Any] | None]]:
    """Open a run directory, or unpack a bundle for as long as the block runs.

    Errors raised by the block name the bundle, not the folder it is unpacked to.

    Args:
        trust: Modules whose code the block may load although someone else's record names it.

    Yields:
        The run directory, and the content of bundle.json (None for a run directory).

    Raises:
        RecordError: `path` is neither a run directory nor a bundle.
    """
    if path.is_dir():
        run = open_run(path)
        with only_trusted(why_foreign(run), trust):
            yield run, None
        return
    with tempfile.TemporaryDirectory(prefix="clew-bundle-") as name:
        folder = Path(name) / path.name
        _unpack(path, folder)
        try:
            contents = _contents(path, folder)
            with only_trusted(f"{path} is a bundle", trust):
                yield RunDirectory(folder), contents
        except ClewError as error:
            error.args = tuple(text.replace(str(folder), str(path)) for text in error.args)
            raise


def _why_not_ours(path: Path, archive: zipfile.ZipFile) -> str:
    """Return why this archive must not be unpacked: it is not `write_bundle`'s, or too large; empty if it may be."""
    members, packed = archive.infolist(), path.stat().st_size
    limit = max(ALWAYS_BYTES, LARGER * packed)
    unpacked = sum(member.file_size for member in members)
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if len(members) > MEMBERS:
        return f"it holds {len(members)} files, and a bundle has at most {MEMBERS}"
    if unpacked > limit:
        return f"its {packed} bytes unpack to {unpacked}, and a bundle of this size has at most {limit}"
    if unpacked > free:
        return f"it unpacks to {unpacked} bytes, and {folder} has {free} left. Set TMPDIR to another folder"
    names: set[str] = set()
    for member in members:
        name = member.orig_filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        plain = name.removesuffix("/") == str(PurePosixPath(name)) and not {"..", "."} & {*name.split("/")}
        if not plain or name.startswith("/") or "\\" in name or "\0" in name:
            return f"its member {name!r:.80} is not a plain path within it"
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            return f"its member {name!r:.80} is a link or a device"
        if name in names:
            return f"it holds {name!r:.80} twice"
        names.add(name)
    return ""


def _unpack(path: Path, folder: Path) -> None:
    """Unpack a bundle into `folder`. Raises RecordError."""
    try:
        with zipfile.ZipFile(path) as archive, explain_disk_errors(folder):
            if NAME not in archive.namelist():
                raise RecordError(f"Cannot open {path}: it is not a bundle of Clew, because it holds no {NAME}.")
            if wrong := _why_not_ours(path, archive):
                raise RecordError(f"Cannot unpack {path}: {wrong}.")
            archive.extractall(folder)  # zipfile reads no more bytes of a member than its declared size
    except FileNotFoundError:
        raise no_run(path) from None
    except OSError as error:
        raise RecordError(f"Cannot read {path}: {error.strerror}. Check its path and its permissions.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise RecordError(
            f"Cannot open {path}: it is neither a run directory nor a bundle ({error}). It may be truncated."
        ) from None


def _contents(path: Path, folder: Path) -> dict[str, Any]:
    """Return the content of bundle.json, and write placeholders for steps of which the bundle has only index lines."""
    contents = read_json(folder / NAME, Bundle)
    rows.check_format(path, contents["clew_format"])
    steps = RunDirectory(folder).steps
    for entry in steps.index_lines()[: contents["first"]]:
        if not steps.json_path(entry["step"]).exists():
            write_json(steps.json_path(entry["step"]), {"clew_format": rows.FORMAT, **summary.EMPTY_SUMMARY, **entry})
    return contents
