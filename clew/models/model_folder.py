"""Checks of model folders before a model is loaded. The hub's name of a model can stand in place of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clew.errors import ModelError, first_line
from clew.models.own_code import refuse_own_code


def expanded(path: str) -> str:
    """Return a path with "~" replaced. A hub name stays as it is, so pathlib is of no use here."""
    return os.path.expanduser(path)  # noqa: PTH111


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers log nothing but errors inside the block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def config_of(path: str) -> Any:
    """Return the configuration of the model in a folder or on the hub; None if it cannot be read."""
    from transformers import AutoConfig

    if not path:  # transformers would look in the current folder
        return None
    try:
        return AutoConfig.from_pretrained(expanded(path), trust_remote_code=False)
    except Exception:  # a broken config.json raises errors of many types; loading the model will report it
        return None


def is_named(path: str, token: str | None) -> bool:
    """Return whether a tokenizer's file in a folder names this token; true for a hub name."""
    path = expanded(path)
    # For some architectures, transformers adds special tokens that no folder names and that have no embedding.
    if token is None or not Path(path).is_dir():
        return True
    spellings = [json.dumps(token, ensure_ascii=ascii_only) for ascii_only in (True, False)]
    contents = (file.read_text(encoding="utf-8") for file in Path(path).glob("*token*.json"))
    return any(spelling in content for content in contents for spelling in spellings)


def check_folder(path: str, needed: str, what: str, remedy: str, field: str = "model.path") -> None:
    """Raise ModelError if a folder lacks a needed file, or if the hub has no model of this name."""
    path = expanded(path)
    # "name" and "owner/name" are hub names, unless they exist here, or "owner" does: then a folder was meant.
    in_a_folder = "/" in path and Path(path).parent.is_dir()
    if not (path.startswith((".", "/")) or path.count("/") > 1 or in_a_folder or Path(path).exists()):
        _check_on_hub(path, field)
        return
    if not Path(path).is_dir():
        steps = sorted(each.name for each in Path(path).parent.glob("step-*")) if field == "MODEL" else []
        if steps:
            raise ModelError(
                f"Cannot load a model: there is no checkpoint {path}; there are {', '.join(steps)}. Older ones are "
                f"removed (checkpoint.keep), except for the first and the best."
            )
        raise ModelError(
            f"Cannot load a model: there is no folder {path}. {field} takes a folder written by save_pretrained, or a "
            f"hub name such as Qwen/Qwen3-0.6B."
        )
    if not (Path(path) / needed).exists():
        latest = Path(path) / "checkpoints" / "latest"
        if latest.is_dir():
            remedy = f"This is a run: name one of its checkpoints, such as {latest}."
        raise ModelError(
            f"Cannot load a {what} from {path} ({field}): it holds no {needed}; found {listing(path)}. {remedy}"
        )
    refuse_own_code(path, field)


HUB_S = 5.0
"""Seconds within which the hub must say whether it has a model. transformers itself would try for a minute."""


def _check_on_hub(name: str, field: str) -> None:
    """Raise ModelError if a model is neither in the hub's cache on this machine nor on the hub."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    needed = "config.json"
    try:
        if isinstance(try_to_load_from_cache(name, needed), str):
            return
        get_hf_file_metadata(hf_hub_url(name, needed), timeout=HUB_S)
    except Exception as error:  # a wrong name, the hub and the HTTP library raise errors of many types
        import torch  # noqa: F401  # no model can be used without it: if it is missing, that is the error to show

        status = getattr(getattr(error, "response", None), "status_code", None) or 404
        refused = isinstance(error, (HfHubHTTPError, ValueError)) and status < 429  # from 429: overloaded or down
        why = "the hub has no such model that you may read" if refused else "the hub cannot be reached"
        raise ModelError(
            f"Cannot load a model: there is no folder {name} ({field}) here, it is not in the hub's cache on this "
            f"machine, and {why} ({first_line(error)[:-1]}). Check the name, or name a folder."
        ) from None


def listing(path: str) -> str:
    names = sorted(entry.name for entry in Path(path).iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
