"""Attention that transformers' models compute while they are served, registered under the name `clew_rows`.

Transformers has no mask function for this name, so a model that is configured with it builds no mask: the cache knows
the window of each row. `attending_to` sets what a forward may attend to, because not every architecture passes its
keyword arguments on to its layers.
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

ALIGNED = 16
"""Number of elements that CUDA's attention kernels read at once. Each row of a mask must begin at a multiple of it.

torch copies a mask if the distance between its rows is not such a multiple. But it does not check where the first row
begins: if that is misaligned, the kernel fails with "misaligned address", and the process can no longer use the GPU.
"""


def aligned(columns: int) -> int:
    """Return the smallest multiple of ALIGNED that is at least `columns`."""
    return -(-columns // ALIGNED) * ALIGNED


@dataclass(eq=False)
class Rows:
    """Rows and columns that one forward may attend to."""

    mask: Tensor | None
    """Mask added to the scores when decoding, [rows, 1, 1, columns]; None: everything is visible."""
    starts: Tensor | None = None
    """Column of each row's first token, int64 [rows], in the prefill of prompts that end together."""
    _prefill_masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)
    _window_masks: dict[int, Tensor] = field(default_factory=dict)

    def seen(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the keys and values that a layer attends to when decoding, and their mask.

        Args:
            window: Size of the window of a sliding layer; None: no window.
        """
        if window is None or window >= key.shape[2]:
            return key, value, self.mask
        return key[:, :, -window:], value[:, :, -window:], None if self.mask is None else self._window_mask(window)

    def _window_mask(self, window: int) -> Tensor:
        """Return the mask's last columns, at an aligned address."""
        assert self.mask is not None
        if window not in self._window_masks:
            storage = self.mask.new_empty(*self.mask.shape[:-1], aligned(window))
            self._window_masks[window] = storage[..., :window].copy_(self.mask[..., -window:])
        return self._window_masks[window]

    def prefill_mask(self, query: Tensor, key: Tensor, window: int | None) -> Tensor | None:
        """Return the mask of a prefill, [rows, 1, queries, length]; None if plain causal attention is enough.

        The queries may be the last tokens alone: layers that share the keys of an earlier layer, as Gemma 4's do,
        compute only the tokens whose logits are kept.
        """
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


_rows: ContextVar[Rows] = ContextVar("rows")


@contextmanager
def attending_to(rows: Rows) -> Iterator[None]:
    """Make every forward within the block attend to `rows`."""
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
    """Return the attention over the rows' keys, [rows, length, heads, dim], and None in place of its weights.

    Args:
        query: [rows, heads, length, dim].
        attention_mask: Not used: transformers passes it, but `attending_to` says what is visible.
        s_aux: [heads], the attention sinks of GPT-OSS.
    """
    rows = _rows.get()
    n, heads, length, _ = query.shape
    repeat = heads // key.shape[1]
    decoding = rows.starts is None and length == 1
    if decoding:
        key, value, mask = rows.seen(key, value, sliding_window)
        if repeat > 1:  # heads that share a key become more queries of it: no key is repeated
            query = query.reshape(n, heads // repeat, repeat, -1)
    else:
        mask = rows.prefill_mask(query, key, sliding_window)
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    causal = not decoding and mask is None
    if softcap is not None or s_aux is not None:
        output = _attend_without_kernel(query, key, value, mask, scaling, softcap, s_aux, causal=causal)
    else:
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=causal)
    if decoding:
        return output.reshape(n, 1, heads, -1), None
    return output.transpose(1, 2), None


def _attend_without_kernel(
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
    """Return the attention, computed without torch's kernels: they lack Gemma 2's soft cap and GPT-OSS's sinks.

    Gemma 2's scores are softcap * tanh(scores / softcap). A sink takes part in the softmax of its head like one more
    key, and has no value.
    """
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
