"""Loads weights from safetensors into a model in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from clew.errors import EngineError
from clew.record.weights import DIGEST_KEY


def check_weights(model: Any, path: str, digest: str = "") -> list[Path]:
    """Return the folder's *.safetensors files after a check that they fit `model`. Changes nothing.

    They fit when they hold each of the model's tensors once, under the name that it has in memory, in its shape, and
    nothing else. Of tied tensors, one name is enough. A truncated file does not open.

    Args:
        digest: WeightRef.digest. It is compared with the digest in the files' metadata, if Clew's trainer wrote one.

    Raises:
        EngineError: The folder cannot be read, or holds other weights.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise EngineError(f"Cannot load weights from {path}: it holds no *.safetensors.")
    shapes: dict[str, list[int]] = {}
    with _reading(path):
        for file in files:
            with safe_open(file, framework="pt") as opened:
                written = (opened.metadata() or {}).get(DIGEST_KEY, digest)
                if digest and written != digest:
                    raise EngineError(
                        f"Cannot load weights from {path}: {file.name} was written with the digest {written}, and the "
                        f"update names {digest}. The folder holds the weights of another step or another run."
                    )
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    _check_names(model.state_dict(), shapes, path)
    return files


@torch.no_grad()
def copy_weights(model: Any, path: str, files: list[Path]) -> None:
    """Copy every tensor of the files into `model`, casting to its dtype. Raises EngineError when a file breaks."""
    own = model.state_dict()
    with _reading(path):
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    own[name].copy_(opened.get_tensor(name))


@torch.no_grad()
def backed_up(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the model's tensors in main memory, by name. Tied tensors are copied once."""
    distinct = {_identity(tensor): (name, tensor) for name, tensor in model.state_dict().items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in distinct.values()}


@torch.no_grad()
def restore(model: Any, backup: dict[str, torch.Tensor]) -> None:
    """Put back what `backed_up` copied, bit for bit."""
    own = model.state_dict()
    for name, tensor in backup.items():
        own[name].copy_(tensor)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise EngineError(f"Cannot load weights from {path}: {error}") from error


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
            f"Cannot load weights from {path}: they are not this model's: {'; '.join(problems)}. Weights must be "
            f"published by Clew, or written by save_pretrained, from the model that is served."
        )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what identifies a tensor's memory; it is the same for tied tensors."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
