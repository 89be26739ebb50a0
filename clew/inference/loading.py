"""Loads weights into a model in place, from safetensors or from a broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from clew.errors import EngineError, RecordError
from clew.models.tensor_digest import hex_digests
from clew.printing import few
from clew.record.weights import DIGEST_KEY, WeightRef, read_digests

Named = tuple[str, torch.Tensor]

Received = tuple[int, Mapping[str, torch.Tensor]]
"""Version of the weights that the trainer has broadcast, and their tensors by name."""


def weights_of(model: Any, ref: WeightRef, received: Received | None = None) -> Callable[[], Iterator[Named]]:
    """Check that the tensors of `ref` fit `model`, and return a function that yields them. `model` is not changed.

    They fit if they have the names and shapes of the model's tensors in memory. Of tied tensors, one name is enough.
    The check also finds truncated files, because they do not open.

    Args:
        ref: The weights, as *.safetensors or as the digests of what was broadcast. WeightRef.digest is compared with
            the digest in the files' metadata, if Clew's trainer wrote one.
        received: What came in the last broadcast.

    Raises:
        EngineError: The folder cannot be read, or holds other weights; or other tensors were broadcast, or none.
    """
    if ref.was_broadcast():
        tensors = _check_received(ref, received)
        _check_names(model.state_dict(), {name: list(tensor.shape) for name, tensor in tensors.items()}, ref.path)
        return lambda: iter(tensors.items())
    files = sorted(Path(ref.path).glob("*.safetensors"))
    if not files:
        raise EngineError(f"Cannot load weights from {ref.path}: it holds no *.safetensors.")
    shapes: dict[str, list[int]] = {}
    with _reading(ref.path):
        for file in files:
            with safe_open(file, framework="pt") as opened:
                written = (opened.metadata() or {}).get(DIGEST_KEY, ref.digest)
                if ref.digest and written != ref.digest:
                    raise EngineError(
                        f"Cannot load weights from {ref.path}: {file.name} was written with the digest {written}, and "
                        f"the update names {ref.digest}. The folder holds the weights of another step or another run."
                    )
                shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    _check_names(model.state_dict(), shapes, ref.path)
    return lambda: _read(files)


def _read(files: list[Path]) -> Iterator[Named]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def _check_received(ref: WeightRef, received: Received | None) -> Mapping[str, torch.Tensor]:
    """Return the tensors that were broadcast as `ref`. Raises EngineError if they are not those that were sent."""
    version, tensors = received or (None, {})
    if version != ref.version:
        raise EngineError(f"version {ref.version} was broadcast (weights.via), and this server did not get it.")
    with _reading(ref.path):
        expected, found = read_digests(ref), hex_digests(tensors)
    wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    if wrong:
        raise EngineError(
            f"Cannot load version {ref.version}: {len(wrong)} of the tensors that were received are not those that the "
            f"trainer sent, such as {min(wrong)}."
        )
    return tensors


@torch.no_grad()
def copy_weights(model: Any, path: str, weights: Iterator[Named]) -> None:
    """Copy weights into `model`, casting to its dtype. Raises EngineError if a file in `path` cannot be read."""
    own = model.state_dict()
    with _reading(path):
        for name, tensor in weights:
            own[name].copy_(tensor)


@torch.no_grad()
def backed_up(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the model's tensors in main memory, by name. Tied tensors are copied once."""
    distinct = {_identity(tensor): (name, tensor) for name, tensor in model.state_dict().items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in distinct.values()}


@torch.no_grad()
def restore(model: Any, backup: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    for name, tensor in backup.items():
        own[name].copy_(tensor)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, RecordError) as error:
        raise EngineError(f"Cannot load weights from {path}: {error}") from error


def _check_names(own: dict[str, torch.Tensor], found: dict[str, list[int]], path: str) -> None:
    covered = {_identity(own[name]) for name in found if name in own}  # a tied tensor may be missing under one name
    missing = [name for name, tensor in own.items() if name not in found and _identity(tensor) not in covered]
    extra = [name for name in found if name not in own]
    misshapen = [
        f"{name} {shape} (expected {list(own[name].shape)})"
        for name, shape in found.items()
        if name in own and shape != list(own[name].shape)
    ]
    problems = [
        f"{len(names)} {what} ({few(names, most=3)})"
        for what, names in (("missing", missing), ("unknown", extra), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise EngineError(
            f"Cannot load weights from {path}: its tensors do not match the served model's: {'; '.join(problems)}. "
            f"Weights must be published by Clew, or written by save_pretrained, from the model that is served."
        )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what identifies a tensor's memory; it is the same for tied tensors."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
