"""Digests of tensors, as `clew.record.array_digest` defines them. Trainer and inference engines compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clew.record.array_digest import BLOCK, WITHIN_BLOCK, digest_array, of_blocks, salted

AT_ONCE = 1 << 24
"""Number of elements that are multiplied at once on a device: 128 MiB of products."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_tensor(tensor: Tensor, *, name: str, start: int = 0) -> int:
    """Return the digest of a tensor (bfloat16 as uint16), or of a piece that begins at flat position `start`."""
    return begin_digest(tensor, name=name, start=start)()


def hex_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each whole tensor, as 16 hexadecimal digits."""
    begun = {name: begin_digest(tensor, name=name) for name, tensor in tensors.items()}
    return {name: f"{result():016x}" for name, result in begun.items()}


def begin_digest(tensor: Tensor, *, name: str, start: int = 0) -> Callable[[], int]:
    """Begin what `digest_tensor` does; the function that is returned waits for the result.

    Begin the digests of all tensors before waiting for the first: a GPU then computes hundreds without a pause.
    """
    if tensor.device.type == "cpu":
        found = digest_array(as_array(tensor), name=name, start=start)
        return lambda: found
    return begin_on_device(tensor, name=name, start=start)


def begin_on_device(tensor: Tensor, *, name: str, start: int = 0) -> Callable[[], int]:
    """Do what `begin_digest` does on the tensor's device, which reads its memory faster than it could be copied."""
    flat = tensor.contiguous().view(-1)
    bits, mask = flat.view(_BITS[flat.element_size()]), (1 << 8 * flat.element_size()) - 1
    within = _within_block(flat.device)
    before = start % BLOCK
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(-before, bits.numel(), AT_ONCE):
        part = bits[max(first, 0) : first + AT_ONCE].to(torch.int64)
        if flat.element_size() < 8:
            part &= mask  # undo the sign extension
        part = part + 1  # never in place: with 8-byte elements, `part` is the tensor's own memory
        head, tail = max(-first, 0), -(max(-first, 0) + part.numel()) % BLOCK
        blocks = torch.nn.functional.pad(part, (head, tail)).view(-1, BLOCK)
        factors = _of_blocks((start + first) // BLOCK, len(blocks), flat.device)
        found += ((blocks * within).sum(1) * factors).sum()  # int64 wraps around as uint64 does
    return lambda: salted(int(found), name, _dtype_name(flat.dtype))


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's bits as a NumPy array (without a copy on the CPU); bfloat16, which NumPy lacks, as uint16."""
    tensor = tensor.detach().cpu()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class Layout(NamedTuple):
    """Positions of a view's elements in the tensor that it is a view of."""

    offset: int
    """Flat position of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Steps from one element to the next, by dimension."""

    def places(self) -> Tensor:
        """Return the flat position of each element, in the view's shape."""
        places = torch.full((), self.offset, dtype=torch.int64)
        for size, stride in zip(self.shape, self.strides, strict=True):
            places = places.unsqueeze(-1) + torch.arange(size) * stride
        return places


def digest_scattered(
    tensor: Tensor, offset: int, strides: tuple[int, ...], *, name: str, rearranged: Sequence[Layout] = ()
) -> int:
    """Return the digest of a piece whose elements may lie apart in the whole, as a slice of columns does.

    Args:
        offset: Flat position of the piece's first element in the whole.
        strides: Steps in the whole from one element to the next, by dimension of the piece.
        rearranged: Views that were copied into contiguous tensors, one after another. The first is a view of the whole,
            and the piece belongs to the copy of the last.
    """
    if not rearranged and strides == torch.empty(tensor.shape, device="meta").stride():
        return digest_tensor(tensor, name=name, start=offset)
    places_ = Layout(offset, tuple(tensor.shape), strides).places()
    for layout in reversed(rearranged):
        places_ = layout.places().view(-1)[places_]
    size, mask = tensor.element_size(), (1 << 8 * tensor.element_size()) - 1
    flat, places = tensor.contiguous().view(-1).view(_BITS[size]), places_.view(-1).to(tensor.device)
    within = _within_block(tensor.device)
    of_block = _of_blocks(0, int(places_.max()) // BLOCK + 1 if places_.numel() else 1, tensor.device)
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for bits, place in zip(flat.split(AT_ONCE), places.split(AT_ONCE), strict=True):
        part = bits.to(torch.int64)
        if size < 8:
            part &= mask
        found += ((part + 1) * within[place % BLOCK] * of_block[place // BLOCK]).sum()  # wraps around as uint64 does
    return salted(int(found), name, _dtype_name(tensor.dtype))


# The factors stay on the device: a copy for each tensor would make the host wait each time.


@cache
def _within_block(device: torch.device) -> Tensor:
    return torch.from_numpy(WITHIN_BLOCK.view(np.int64)).to(device)


@lru_cache(4096)
def _of_blocks(first: int, count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(of_blocks(first, count).view(np.int64)).to(device)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return as_array(torch.empty(0, dtype=dtype)).dtype.str
