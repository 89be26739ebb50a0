"""Atomic writing into the run directory: a file is written under another name, then renamed.

A reader sees the whole file or none, even after SIGKILL. (Nothing is flushed to the disk itself: the record survives
the death of processes, not a power failure of the machine.)
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clew.errors import RecordError

log = logging.getLogger("clew.record")


def write_bytes(path: Path, content: bytes | memoryview, *, private: bool = False) -> None:
    """Write `content` to `path` atomically. Raises RecordError if the disk is full, or this user may not write there.

    Only this user can read a `private` file (mode 0600), even before it has any content. A link, a pipe or a device,
    such as /dev/stdout, is not replaced, but written to.
    """
    opener = (lambda name, flags: os.open(name, flags, 0o600)) if private else None
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with explain_disk_errors(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(content)
            return
        try:
            beside.unlink(missing_ok=True)
            with open(beside, "xb", opener=opener) as file:
                file.write(content)
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write one JSON document atomically; see `write_bytes`."""
    write_bytes(path, json.dumps(value).encode(), private=private)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's write errors into a RecordError that says what can be done."""
    try:
        yield
    except OSError as error:
        # A FileMissing is both, and explains itself. A pipe without a reader ends the command in silence.
        if isinstance(error, RecordError | BrokenPipeError):
            raise
        raise disk_error(path, error) from error


OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of the operating system for a full disk, or one where this user may not write."""


def disk_error(path: Path, error: OSError) -> RecordError:
    """Return the RecordError for a failed write to `path`, with what can be done."""
    # shutil.copytree raises one error whose text holds the errors of all files, so the text is searched
    if any(f"[Errno {number}]" in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
        remedy = (
            f"no space left ({_left(path)}). Nothing recorded is lost: free some space, or lower record.keep_steps and "
            f"checkpoint.keep, then start the same command again"
        )
    else:
        remedy = str(error.strerror or error)
        if error.errno in OF_THE_DISK:
            remedy += ". Give this user the right to write there, or choose another root=FOLDER"
    return RecordError(f"Cannot write {path}: {remedy}.")


def _left(path: Path) -> str:
    """Return how much space is left at `path`, or that the file system has no inodes left, for an error."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    system = os.statvfs(nearest)
    if system.f_files and not system.f_favail:
        return "no inodes: it holds as many files as it can"
    return f"{system.f_bavail * system.f_frsize / 2**20:.0f} MiB free"


def remove_strays(folder: Path, *names: str) -> None:
    """Remove files, and folders of weights, that a killed process left half-written in `folder`.

    `names` are patterns of the files that the caller writes, such as "g*.arrows". Others are left alone:
    another process may still be writing them.
    """
    for name in names:
        for stray in folder.glob(f".{name}.*"):
            if stray.is_dir() and not stray.is_symlink():
                shutil.rmtree(stray, ignore_errors=True)
            else:
                stray.unlink(missing_ok=True)


@contextmanager
def only_shown(what: str) -> Iterator[None]:
    """Turn errors into a warning: a report must not stop a run. A record that cannot be written does."""
    try:
        yield
    except (OSError, RecordError) as error:
        log.warning("Cannot write %s: %s. Nothing is lost: the record has what it shows.", what, error)
