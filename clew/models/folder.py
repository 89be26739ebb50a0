"""Model folders: what they hold and lack, and what they name. A hub name stands for a folder, too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from clew.errors import ModelError


def config_of(path: str) -> Any:
    """Return the configuration of the model in a folder or on the hub; None if it cannot be read.

    The error is left to the code that loads the model.
    """
    from transformers import AutoConfig

    if not path:  # transformers would look here
        return None
    try:
        return AutoConfig.from_pretrained(os.path.expanduser(path), trust_remote_code=False)  # noqa: PTH111 - as above
    except Exception:  # as above
        return None


def is_named(path: str, token: str | None) -> bool:
    """Return whether a folder names this token somewhere; true for a hub name.

    For some architectures, transformers adds special tokens that the folder does not name and that have no embedding.
    """
    if token is None or not Path(path).is_dir():
        return True
    written = [json.dumps(token, ensure_ascii=ascii_only) for ascii_only in (True, False)]
    return any(
        any(each in file.read_text(encoding="utf-8") for each in written) for file in Path(path).glob("*token*.json")
    )


def check_folder(path: str, needed: str, what: str, remedy: str, field: str = "model.path") -> None:
    """Raise ModelError if a folder lacks a needed file. A hub name passes: transformers looks it up."""
    in_a_folder = "/" in path and Path(path).parent.is_dir()
    if not (path.startswith((".", "/", "~")) or path.count("/") > 1 or in_a_folder or Path(path).exists()):
        return
    if not Path(path).is_dir():
        raise ModelError(
            f"there is no folder {path}. {field} takes a folder written by save_pretrained, "
            f"or a hub name such as Qwen/Qwen3-0.6B."
        )
    if not (Path(path) / needed).exists():
        raise ModelError(
            f"{path} ({field}) holds no {needed}, so no {what} can be loaded from it; found {listing(path)}. {remedy}"
        )
    refuse_own_code(path, field)


_CONFIGURATIONS = ("config.json", "*_config.json", "preprocessor*.json", "processor*.json")
"""Patterns of the files in which a model folder may name code."""


def refuse_own_code(path: str, field: str = "model.path") -> None:
    """Raise ModelError if a model folder can only be loaded by running code that it names.

    This is an architecture of its own (`auto_map` with a `model_type` that transformers does not have) or a kernel from
    the hub. Many published models name code although transformers has their architecture; `trust_remote_code=False`
    then selects transformers' own. A hub name passes here, for the same reason.
    """
    from transformers import CONFIG_MAPPING

    for pattern in _CONFIGURATIONS:
        for file in sorted(Path(path).glob(pattern)):
            try:
                said = json.loads(file.read_bytes())
            except (ValueError, OSError, RecursionError):
                continue  # whoever reads it for its content says what is wrong
            said = said if isinstance(said, dict) else {}
            kernels = [said.get(f"{start}attn_implementation") for start in ("", "_")]
            if said.get("auto_map") and file.name == "config.json" and said.get("model_type") not in CONFIG_MAPPING:
                what = (
                    f"names code of its own (auto_map), and transformers has no architecture {said.get('model_type')!r}"
                )
                remedy = "Use another model."
            elif any("/" in str(each) for each in kernels):
                what, remedy = "names code on the hub (attn_implementation)", "Remove that line."
            else:
                continue
            raise ModelError(
                f"Cannot load {path} ({field}): {file.name} {what}. Clew runs no code that a model folder names. "
                f"{remedy}"
            )


def listing(path: str) -> str:
    names = sorted(entry.name for entry in Path(path).iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
