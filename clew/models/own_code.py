"""Refuses model folders that can only be loaded by running code that they name."""

from __future__ import annotations

import json
from pathlib import Path

from clew.errors import ModelError

_CONFIGURATIONS = ("config.json", "*_config.json", "preprocessor*.json", "processor*.json")
"""Patterns of the files in which a model folder may name code."""


def refuse_own_code(path: str, field: str = "model.path") -> None:
    """Raise ModelError if a model folder can only be loaded by running code that it names.

    Such code is an architecture of its own (`auto_map` with a `model_type` that transformers does not have) or a kernel
    from the hub. Many published models name code although transformers has their architecture; then
    `trust_remote_code=False` selects transformers' own. For the same reason, hub names are not checked here.
    """
    from transformers import CONFIG_MAPPING

    for pattern in _CONFIGURATIONS:
        for file in sorted(Path(path).glob(pattern)):
            try:
                content = json.loads(file.read_bytes())
            except (ValueError, OSError, RecursionError):
                continue  # loading the model will report it
            if not isinstance(content, dict):
                continue
            kernels = [content.get(f"{start}attn_implementation") for start in ("", "_")]
            kind = content.get("model_type")
            if content.get("auto_map") and file.name == "config.json" and kind not in CONFIG_MAPPING:
                what = f"names code of its own (auto_map), and transformers has no architecture {kind!r}"
                remedy = "Use another model."
            elif any("/" in str(kernel) for kernel in kernels):
                what, remedy = "names code on the hub (attn_implementation)", "Remove that line."
            else:
                continue
            raise ModelError(
                f"Cannot load {path} ({field}): {file.name} {what}. Clew runs no code that a model folder names. "
                f"{remedy}"
            )
