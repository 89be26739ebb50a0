"""How a file comes into the run directory: written under another name, then renamed.

A reader sees a whole file or none, also after SIGKILL. (Nothing is flushed to the platter: the record promises to
survive the death of processes, not of the machine's power.)
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clew.errors import RecordError


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path` atomically. Raises RecordError when the disk is full, or not ours to write."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with explain_disk_errors(path):
        try:
            with beside.open("wb") as file:
                file.write(content)
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document atomically."""
    write_bytes(path, json.dumps(value).encode())


def read_json(path: Path) -> Any:
    """Read one JSON document. Raises RecordError when it is none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordError(
            f"{path} is not JSON ({error}); {path.stat().st_size} bytes. It was altered after it was "
            f"written: restore it from a copy of the run directory."
        ) from None


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into a RecordError that says what can be done."""
    try:
        yield
    except OSError as error:
        # copytree puts the errors of all its files into the words of one
        if any(f"[Errno {number}]" in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
            free = shutil.disk_usage(path.parent).free / 2**20
            remedy = (
                f"no space left ({free:.0f} MiB free). Nothing recorded is lost: free some space, or lower "
                f"record.keep_steps and checkpoint.keep, then start the same command again"
            )
        else:
            remedy = str(error.strerror or error)
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                remedy += ". Give this user the right to write there, or choose another root=FOLDER"
        raise RecordError(f"cannot write {path}: {remedy}.") from error


def remove_strays(folder: Path, *names: str) -> None:
    """Remove what a killed process left half-written in `folder`: files, and folders of weights.

    names: patterns of the files that are the caller's to write, such as "g*.arrows"; a half-written file of another
    process may still be in the making.
    """
    for name in names:
        for stray in folder.glob(f".{name}.*"):
            if stray.is_dir():
                shutil.rmtree(stray, ignore_errors=True)
            else:
                stray.unlink(missing_ok=True)
