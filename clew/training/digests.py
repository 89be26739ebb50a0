"""Digests of tensors, by the definition of `clew.record.digest`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from clew.record.digest import digest_array

Digests = dict[str, int]
"""The digest of each tensor of a set, by its name."""


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> Digests:
    """The digest of each of a set of named tensors; bfloat16 counts as uint16. `clew.record.digest.total` has that of
    the set."""
    return {name: digest_array(as_array(tensor), name=name) for name, tensor in named}


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor's bits as a NumPy array (without a copy on the CPU); bfloat16, which NumPy lacks, as uint16."""
    tensor = tensor.detach().cpu()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
