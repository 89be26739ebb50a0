"""Digests of tensors, by the definition of `clew.record.digest`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from clew.record.digest import digest_array
from clew.training.ranks import ALONE, Ranks
from clew.training.sharding import slice_of

Digests = dict[str, int]
"""The digest of each tensor of a set, by its name."""


def digest_tensors(named: Iterable[tuple[str, Tensor]], ranks: Ranks = ALONE) -> Digests:
    """The digest of each of a set of named tensors; bfloat16 counts as uint16. `clew.record.digest.total` has that of
    the set. Each rank adds the digest of its slice: the sum does not depend on how a tensor is spread."""
    digests: Digests = {}
    for name, tensor in named:
        piece = slice_of(tensor, ranks)
        digests[name] = 0 if piece is None else digest_array(as_array(piece[0]), name=name, start=piece[1])
    summed = ranks.add_up(np.array(list(digests.values()), np.uint64))
    return dict(zip(digests, summed.tolist(), strict=True))


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor's bits as a NumPy array (without a copy on the CPU); bfloat16, which NumPy lacks, as uint16."""
    tensor = tensor.detach().cpu()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
