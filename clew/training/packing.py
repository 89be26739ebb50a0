"""Packing: rows of tokens are laid end to end in one row, so that padding costs nothing outside attention.

::

    rows      a a a a a      packed   a a a a a b b b b c c      slots    a a a a a    c c
              b b b b        [1, P]                              of its   b b b b .
              c c                                                buckets

Attention is computed in buckets: batches of rows of similar length, padded on the right, where causal attention does
not look. A slot is a place in a bucket, for a token or for padding. The cost is nearly the sum of the squares of the
lengths, and no row sees another.

On CUDA a kernel that knows where rows begin takes the packed row as it is: see `clew.training.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

WASTE = 2**12
"""Maximum padding of a bucket, in query-key pairs. One more bucket costs about as much time as this padding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Positions of rows in a packed row of P tokens, and the slots in which attention computes them."""

    starts_R: Tensor
    """Index of the first token of each row, int64."""
    limits_R1: Tensor
    """First token of each row, and the number of all tokens, int32: the cumulative lengths that CUDA's kernel takes."""
    positions_P: Tensor
    """Position of each token within its row, int64."""
    shapes: list[tuple[int, int]]
    """Shape of each bucket: (rows, slots per row). The products add up to the number of slots."""
    tokens_of_slots: Tensor
    """Index of the token in each slot, int64; 0 for padding."""
    slots_of_tokens_P: Tensor
    """Slot of each token, int64."""
    padding: Tensor
    """Indices of the slots that hold padding, int64."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packed:
        """Lay out rows of these lengths, one after another."""
        sizes = np.asarray(lengths, np.int64)
        starts = np.cumsum(sizes) - sizes
        buckets = bucket_by_length(lengths)
        shapes = [(len(rows), int(sizes[rows].max())) for rows in buckets]
        slotted = [(rows, np.arange(length)) for rows, (_, length) in zip(buckets, shapes, strict=True)]
        tokens = np.concatenate([(starts[rows, None] + columns).ravel() for rows, columns in slotted])
        real = np.concatenate([(columns < sizes[rows, None]).ravel() for rows, columns in slotted])
        slots = np.empty(sizes.sum(), np.int64)
        slots[tokens[real]] = np.flatnonzero(real)

        def put(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            starts_R=put(starts),
            limits_R1=put(np.append(starts, sizes.sum()).astype(np.int32)),
            positions_P=put(np.arange(sizes.sum()) - np.repeat(starts, sizes)),
            shapes=shapes,
            tokens_of_slots=put(np.where(real, tokens, 0)),  # padding copies token 0; no token attends to padding
            slots_of_tokens_P=put(slots),
            padding=put(np.flatnonzero(~real)),
        )

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(length for _, length in self.shapes)

    def spread(self, packed: Tensor) -> list[Tensor]:
        """Return an input of attention, [1, heads, P, dim], as [rows, heads, slots per row, dim] of each bucket."""
        _, heads, _, dim = packed.shape
        slots = _Selection.apply(
            packed.transpose(1, 2).flatten(2)[0], self.tokens_of_slots, self.slots_of_tokens_P, None
        ).split([rows * length for rows, length in self.shapes])
        return [part.view(*shape, heads, dim).transpose(1, 2) for part, shape in zip(slots, self.shapes, strict=True)]

    def gather(self, buckets: list[Tensor]) -> Tensor:
        """Return the results of attention, [rows, slots per row, heads, dim] of each bucket, as [1, P, heads, dim]."""
        heads, dim = buckets[0].shape[2:]
        slots = torch.cat([bucket.reshape(-1, heads * dim) for bucket in buckets])
        packed = _Selection.apply(slots, self.slots_of_tokens_P, self.tokens_of_slots, self.padding)
        return packed.view(1, -1, heads, dim)


def bucket_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return buckets of rows of similar length, the longest first."""
    buckets: list[list[int]] = []
    wasted = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if buckets:
            wasted += lengths[buckets[-1][0]] ** 2 - lengths[row] ** 2
        if not buckets or wasted > WASTE:
            buckets.append([])
            wasted = 0
        buckets[-1].append(row)
    return buckets


class _Selection(torch.autograd.Function):
    """Selection of values[sources], with a fast and deterministic gradient.

    Each value is selected once, apart from copies that fill padding and have no gradient. So the gradient is a plain
    selection as well, whereas autograd's own would be a slow sum in an unspecified order.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, sources: Tensor, back: Tensor, padding: Tensor | None) -> Tensor:
        """Return values[sources].

        Args:
            back: Place of each value in the result, for the gradient.
            padding: Indices of values that are not selected; their gradient is 0. None: all are selected.
        """
        ctx.back, ctx.padding = back, padding
        return values.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = gradient.index_select(0, ctx.back)
        return found if ctx.padding is None else found.index_fill_(0, ctx.padding, 0), None, None, None
