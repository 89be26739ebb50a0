"""Causal attention for rows of few tokens on the CPU, under the name `clew_short`; longer rows take torch's kernel.

Written out as two products and a softmax it is up to a fifth faster there, forward and backward together, than torch's
kernel, which is made for many tokens. Models so small and rows so short are what a laptop trains.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "clew_short"

SHORT = 128
"""Tokens up to which it is faster."""


def use_short_attention(model: Any, device: torch.device) -> None:
    """Have `model` compute its attention here, where that is faster: in float32 on the CPU."""
    plain = model.config._attn_implementation == "sdpa"
    if plain and model.dtype == torch.float32 and device.type == "cpu":
        model.set_attn_implementation(NAME)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [rows, heads, T, dim] over [rows, kv_heads, T, dim]. Returns [rows, T, heads, dim]."""
    n, heads, length, dim = query.shape
    plain = attention_mask is None and not dropout and kwargs.get("position_bias") is None  # a mask: a sliding window
    if not plain or length > SHORT or key.shape[2] != length or not getattr(module, "is_causal", True):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    kv_heads = key.shape[1]  # the heads that share a key are that key's queries: nothing is repeated
    query = (query * (scaling if scaling is not None else dim**-0.5)).reshape(n, kv_heads, -1, dim)
    scores = (query @ key.transpose(2, 3)).view(n, kv_heads, -1, length, length) + _future(length)
    weights = torch.softmax(scores, -1).view(n, kv_heads, -1, length)
    return (weights @ value).view(n, heads, length, -1).transpose(1, 2).contiguous(), None


@cache
def _future(length: int) -> Tensor:
    """[T, T]: added to the scores, hides what comes later."""
    return torch.full((length, length), float("-inf")).triu(1)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
