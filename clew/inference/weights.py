"""Weights from safetensors into a model that stays where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from clew.errors import EngineError


def copy_weights(model: Any, path: str) -> None:
    """Copy every tensor of the folder's *.safetensors into `model`, casting to its dtype.

    Strict: each of the model's tensors once, under the name that it has in memory (of tied tensors one name
    suffices), in its shape, and nothing else. Raises EngineError, before anything is changed unless the file breaks.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise EngineError(f"cannot load weights from {path}: it holds no *.safetensors.")
    own = model.state_dict()
    shapes: dict[str, list[int]] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        _check_names(own, shapes, path)
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        own[name].copy_(opened.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise EngineError(f"cannot load weights from {path}: {error}") from error


def _check_names(own: dict[str, torch.Tensor], found: dict[str, list[int]], path: str) -> None:
    covered = {_identity(own[name]) for name in found if name in own}
    missing = [name for name, tensor in own.items() if name not in found and _identity(tensor) not in covered]
    extra = [name for name in found if name not in own]
    misshapen = [
        f"{name} {shape} (expected {list(own[name].shape)})"
        for name, shape in found.items()
        if name in own and shape != list(own[name].shape)
    ]
    problems = [
        f"{what} {len(names)}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown", extra), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise EngineError(
            f"the weights in {path} are not this model's: {'; '.join(problems)}. They must be published by "
            f"Clew, or written by save_pretrained, from the model that is served."
        )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Tied tensors are the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
