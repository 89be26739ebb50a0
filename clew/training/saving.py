"""Folders of weights: written under a temporary name that begins with a dot, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from clew.errors import ModelError
from clew.record.files import explain_disk_errors


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; when the block ends, it becomes `folder` and replaces an existing one.

    A reader sees a whole folder or none, even after SIGKILL. If the block raises, `folder` stays as it was.

    Raises:
        RecordError: The disk is full, or cannot be written to.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    with explain_disk_errors(folder):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            remove_folder(folder)
            aside.rename(folder)
        except SafetensorError as error:
            raise _as_os_error(error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists. It is renamed first, so that no reader sees a part of it."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
        shutil.rmtree(doomed, ignore_errors=True)  # left by an earlier process with this ID
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def save_model(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the weights of `model` (safetensors) and config.json.

    Names are those of transformers, and a tied head is stored once.
    Raises ModelError if transformers cannot save them.
    """
    try:
        model.save_pretrained(folder, state_dict=dict(weights))
    except ValueError as error:  # transformers refuses, for example, a generation configuration that contradicts itself
        raise ModelError(f"transformers cannot save this {type(model).__name__}: {error}") from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises nothing more specific for a full disk
        if "os error" not in str(error):
            raise
        raise _as_os_error(error) from error


def _as_os_error(error: Exception) -> OSError:
    """Return the OSError that a library reported only in words: "... (os error 28)" for a full disk."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error))
