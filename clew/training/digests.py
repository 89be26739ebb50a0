"""Digests of tensors, as `clew.record.digest` defines them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from clew.record.digest import BLOCK, WITHIN_BLOCK, digest_array, of_blocks, salted
from clew.training.ranks import ALONE, Ranks
from clew.training.sharding import slice_of

Digests = dict[str, int]
"""Digest of each tensor of a set, by its name."""

LARGE = 1 << 21
"""Number of elements above which a set is worth several threads."""

AT_ONCE = 1 << 24
"""Number of elements that are multiplied at once on a device: 128 MiB of products."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_tensors(named: Iterable[tuple[str, Tensor]], ranks: Ranks = ALONE) -> Digests:
    """Return the digest of each named tensor; bfloat16 counts as uint16. `clew.record.digest.total` combines them.

    Each rank adds the digest of its slice: the sum does not depend on how a tensor is sharded.
    """
    tensors = dict(named)
    pieces = ((name, slice_of(tensor.detach(), ranks)) for name, tensor in tensors.items())
    # A pool takes all pieces at once; with tensor parallelism some are copies.
    in_threads = ranks.tp == 1 and sum(tensor.numel() for tensor in tensors.values()) > LARGE
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        digests = list((pool.map if in_threads else map)(_digest, pieces))
    summed = ranks.add_up(np.array(digests, np.uint64))
    return dict(zip(tensors, summed.tolist(), strict=True))


def _digest(named: tuple[str, tuple[Tensor, int] | None]) -> int:
    name, piece = named
    if piece is None:
        return 0
    tensor, start = piece
    if tensor.device.type == "cpu":
        return digest_array(as_array(tensor), name=name, start=start)
    return digest_on_device(tensor, name=name, start=start)


def digest_on_device(tensor: Tensor, *, name: str, start: int = 0) -> int:
    """Return the same digest as `digest_array`, computed on the tensor's device.

    A GPU reads its memory many times as fast as it can be copied to the host.
    """
    flat = tensor.contiguous().view(-1)
    bits, mask = flat.view(_BITS[flat.element_size()]), (1 << 8 * flat.element_size()) - 1
    places = torch.from_numpy(WITHIN_BLOCK.view(np.int64)).to(flat.device)
    before = start % BLOCK
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(-before, bits.numel(), AT_ONCE):
        part = bits[max(first, 0) : first + AT_ONCE].to(torch.int64)
        if flat.element_size() < 8:
            part &= mask  # the sign was carried on
        part = part + 1  # never in place: 8 bytes are the tensor's own
        head, tail = max(-first, 0), -(max(-first, 0) + part.numel()) % BLOCK
        blocks = torch.nn.functional.pad(part, (head, tail)).view(-1, BLOCK)
        weights = torch.from_numpy(of_blocks((start + first) // BLOCK, len(blocks)).view(np.int64)).to(flat.device)
        found += ((blocks * places).sum(1) * weights).sum()  # int64 wraps around as uint64 does
    return salted(int(found), name, "<u2" if flat.dtype == torch.bfloat16 else as_array(flat[:0]).dtype.str)


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's bits as a NumPy array (without a copy on the CPU); bfloat16, which NumPy lacks, as uint16."""
    tensor = tensor.detach().cpu()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
