"""Digests of tensors that are sharded over ranks, as `clew.record.array_digest` defines them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from clew.models.tensor_digest import begin_digest
from clew.training.ranks import ALONE, Ranks
from clew.training.sharding import slice_of

Digests = dict[str, int]
"""Digest of each tensor of a set, by its name."""

LARGE = 1 << 21
"""Number of elements above which a set is worth several threads."""


def digest_tensors(named: Iterable[tuple[str, Tensor]], ranks: Ranks = ALONE) -> Digests:
    """Return the digest of each named tensor; `clew.record.array_digest.total` combines them.

    Each rank adds the digest of its slice: the sum does not depend on how a tensor is sharded.
    """
    tensors = dict(named)
    pieces = ((name, slice_of(tensor.detach(), ranks)) for name, tensor in tensors.items())
    # Tensor parallelism gets no threads: some slices are copies then, and a pool would make all of them at once. A GPU
    # gets no threads either: they would fight for Python's lock.
    on_cpu = sum(tensor.numel() for tensor in tensors.values() if tensor.device.type == "cpu")
    in_threads = ranks.tp == 1 and on_cpu > LARGE
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        begun = list((pool.map if in_threads else map)(_begin, pieces))
    digests = [result() for result in begun]
    summed = ranks.add_up(np.array(digests, np.uint64))
    return dict(zip(tensors, summed.tolist(), strict=True))


def _begin(named: tuple[str, tuple[Tensor, int] | None]) -> Callable[[], int]:
    name, piece = named
    if piece is None:
        return lambda: 0
    tensor, start = piece
    return begin_digest(tensor, name=name, start=start)
