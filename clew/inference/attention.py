"""The attention that transformers' models compute while they are served, under the name `clew_rows`.

A model that finds this name in its configuration builds no mask of its own (transformers knows no mask for it): the
window of each row is known to the cache, and what a forward may look at is told by `attending_to`, since not every
architecture hands its layers what it was called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "clew_rows"


@dataclass(eq=False)
class Rows:
    """What one forward may look at."""

    mask: Tensor | None
    """Decoding: added to the scores, [rows, 1, 1, columns]; None: everything is visible."""
    starts: Tensor | None = None
    """Prefill of prompts that end together: int64 [rows], the column of each one's first token."""
    _prefill_masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)

    def seen(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Decoding: the keys and values that a layer looks at, and their mask. window: of a sliding layer."""
        if window is None or window >= key.shape[2]:
            return key, value, self.mask
        return key[:, :, -window:], value[:, :, -window:], None if self.mask is None else self.mask[..., -window:]

    def prefill_mask(self, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
        """[rows, 1, queries, length]; None where plain causal attention will do. The queries are the last ones: layers
        that share the keys of an earlier one, as Gemma 4's do, compute only the tokens whose logits are kept."""
        queries, length = query.shape[2], key.shape[2]
        if window is not None and window >= length:
            window = None
        if (kind := (queries, length, window)) not in self._prefill_masks:
            self._prefill_masks[kind] = self._prefill_mask(query, length, window)
        return self._prefill_masks[kind]

    def _prefill_mask(self, query: Tensor, length: int, window: int | None) -> Tensor | None:
        if self.starts is None and window is None and query.shape[2] == length:
            return None
        columns = torch.arange(length, device=query.device)
        visible = columns <= columns[:, None]
        if window is not None:
            visible &= columns > columns[:, None] - window
        visible = visible[None, None]
        if self.starts is not None:
            visible = visible & (columns >= self.starts.view(-1, 1, 1, 1))
            visible = visible | (columns == columns[:, None])  # padding sees itself: no softmax over nothing
        visible = visible[:, :, -query.shape[2] :]
        mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        return mask.masked_fill_(~visible, torch.finfo(query.dtype).min)


class FixedRows(Rows):
    """Decoding in shapes that do not change: all columns are computed, and masked that are not to be seen."""

    def __init__(self, starts_R1: Tensor, column_1: Tensor, width: int) -> None:
        """starts_R1: the column of each row's first token. column_1: that of the token which is fed."""
        super().__init__(None)
        columns_W = torch.arange(width, device=column_1.device)
        self._ages_W = column_1 - columns_W
        self._own_RW = (columns_W >= starts_R1) & (self._ages_W >= 0)
        self._masks: dict[int | None, Tensor] = {}

    def seen(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if window not in self._masks:
            seen_RW = self._own_RW if window is None else self._own_RW & (self._ages_W < window)
            mask_RW = torch.zeros(seen_RW.shape, dtype=key.dtype, device=key.device)
            self._masks[window] = mask_RW.masked_fill_(~seen_RW, torch.finfo(key.dtype).min)[:, None, None]
        return key, value, self._masks[window]


_rows: ContextVar[Rows] = ContextVar("rows")


@contextmanager
def attending_to(rows: Rows) -> Iterator[None]:
    """Within the block, a forward looks at these."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def attend(
    module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [rows, heads, length, dim] over the rows' keys. Returns [rows, length, heads, dim]. s_aux: [heads],
    the sinks of GPT-OSS."""
    rows = _rows.get()
    n, heads, length, _ = query.shape
    repeat = heads // key.shape[1]
    decoding = rows.starts is None and length == 1
    if decoding:
        key, value, mask = rows.seen(key, value, sliding_window)
        if repeat > 1:  # the heads that share a key are that key's queries: nothing is repeated
            query = query.reshape(n, heads // repeat, repeat, -1)
    else:
        mask = rows.prefill_mask(query, key, sliding_window)
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    causal = not decoding and mask is None
    if softcap is not None or s_aux is not None:
        output = _written_out(query, key, value, mask, scaling, softcap, s_aux, causal=causal)
    elif decoding and query.dtype == torch.float32 and query.device.type == "cpu":
        output = _plain(query, key, value, mask, scaling)
    else:
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=causal)
    if decoding:
        return output.reshape(n, 1, heads, -1), None
    return output.transpose(1, 2), None


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """For one token a row on the CPU: up to three times as fast there as torch's kernel, which is made for many."""
    scores = (query * (scaling if scaling is not None else query.shape[-1] ** -0.5)) @ key.transpose(2, 3)
    if mask is not None:
        scores += mask
    return torch.softmax(scores, -1) @ value


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
    *,
    causal: bool,
) -> Tensor:
    """What torch's kernels do not know: the scores of Gemma 2, softcap * tanh(scores / softcap), and the sinks of
    GPT-OSS, which take part in the softmax of their head as one more key would, and have no value."""
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores + mask
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(query.shape[1], -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


AttentionInterface.register(NAME, attend)
