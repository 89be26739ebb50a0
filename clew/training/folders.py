"""Folders of weights: written aside under a name that begins with a dot, then renamed."""

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
    """Yield an empty folder to write into; it becomes `folder` when the block ends, in the place of one that is there.

    A reader sees a whole folder or none, also after SIGKILL. Raises RecordError when the disk is full or not ours.
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
    """Remove a folder so that nobody ever sees a part of it. Without effect where there is none."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.removed")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def save_model(model: Any, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write weights (safetensors, in transformers' naming, a tied head once) and config.json. Raises ModelError.

    weights: of `model`, from `clew.training.sharding.state_of`.
    """
    try:
        model.save_pretrained(folder, state_dict=dict(weights))
    except ValueError as error:  # transformers refuses, for example, a generation configuration that contradicts itself
        raise ModelError(f"transformers cannot save this {type(model).__name__}: {error}") from error


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer as transformers reads it."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises nothing more specific for a full disk
        if "os error" not in str(error):
            raise
        raise _as_os_error(error) from error


def _as_os_error(error: Exception) -> OSError:
    """safetensors reports a full disk in words: "... (os error 28)"."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number) if found else str(error))
