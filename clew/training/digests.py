"""Digests of tensors, as `clew.record.array_digest` defines them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from clew.models.tensor_digest import digest_tensor
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
    return digest_tensor(tensor, name=name, start=start)
