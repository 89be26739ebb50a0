"""The attention of transformers' models while they are trained, for rows that are padded or packed into one.

It calls transformers' own attention (`sdpa`, or `eager` for architectures that have no other, such as Gemma 2) as if
the rows were not packed.

On CUDA, torch's kernel for rows of any length (`varlen_attn`, which is FlashAttention) takes packed rows without
padding. It supports only bfloat16 and float16 with plain causal attention. Other packed rows, such as those in float32
or longer than a sliding window, are spread over padded rows (see `Packed.spread`), as on the CPU.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from clew.training.packing import Packed

NAMES = {"sdpa": "clew_sdpa", "eager": "clew_eager"}
"""Names that this module registers with transformers, by the attention that each one wraps."""

SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Argument that tells `varlen_attn` that heads share keys. Versions of torch without this argument detect it."""

_packed: ContextVar[Packed | None] = ContextVar("packed", default=None)


@contextmanager
def packed_attention(packed: Packed | None) -> Iterator[None]:
    """Tell forward passes inside the block how rows are packed; None: rows are padded, one below the other.

    Packed forward passes need an attention_mask of ones: without one, transformers would make a mask of [P, P].
    """
    token = _packed.set(packed)
    try:
        yield
    finally:
        _packed.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the two contexts for torch's activation checkpointing, so that the recomputation in the backward pass uses
    the same packing as now."""
    return nullcontext(), packed_attention(_packed.get())


def use_attention(model: Any) -> bool:
    """Make `model` use this module's attention. Return False, with no change, if its architecture does not allow it."""
    name = NAMES.get(model.config._attn_implementation)
    if name is None or not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(name)
    return True


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inner: Callable[..., tuple[Tensor, Any]],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention of [rows, heads, T, dim] over [rows, kv_heads, T, dim], as [rows, T, heads, dim]. `inner`
    computes it for separate rows."""
    packed = _packed.get()
    if packed is None:
        made_for_packed = attention_mask is not None and attention_mask.numel() == 0  # see `_mask`
        assert not made_for_packed, "packed rows are recomputed as padded ones: pass context_fn=checkpoint_contexts"
        return inner(module, query, key, value, attention_mask, **kwargs)[0], None
    assert attention_mask is not None, f"{type(module).__name__} attends without a mask"
    if inner is sdpa_attention_forward and not attention_mask.numel() and _kernel_takes(module, query, value, **kwargs):
        return _attend_packed(query, key, value, packed, kwargs.get("scaling")), None
    masks = [attention_mask[..., :length, :length] if attention_mask.numel() else None for _, length in packed.shapes]
    parts = (packed.spread(each) for each in (query, key, value))
    return packed.gather([inner(module, *bucket, **kwargs)[0] for bucket in zip(*parts, masks, strict=True)]), None


def _kernel_takes(
    module: torch.nn.Module, query: Tensor, value: Tensor, *, dropout: float = 0.0, position_bias: Any = None, **_: Any
) -> bool:
    """Return whether torch's kernel supports this attention, which has no mask besides causality."""
    half = query.device.type == "cuda" and query.dtype in (torch.bfloat16, torch.float16)
    dim = query.shape[-1]
    plain = not dropout and position_bias is None and getattr(module, "is_causal", True)
    return half and plain and dim == value.shape[-1] and dim % 8 == 0 and dim <= 256


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None) -> Tensor:
    """Return causal attention of [1, heads, P, dim] over [1, kv_heads, P, dim] within each row, [1, P, heads, dim]."""
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    shared = SHARED_KEYS if query.shape[1] != key.shape[1] else {}
    rows = (packed.limits_R1, packed.limits_R1, packed.longest, packed.longest)
    output = varlen_attn(query, key, value, *rows, scale=scaling, window_size=(-1, 0), **shared)  # (-1, 0): causal
    assert isinstance(output, Tensor)  # the log-sum-exps were not requested
    return output[None]


def _mask(plain: Callable[..., Tensor | None], *, attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask.

    For packed rows it is only the mask of the longest row, [1, 1, T, T]; shorter rows use its top left corner. It is
    empty when plain causal attention is enough.
    """
    packed = _packed.get()
    if packed is None:
        return plain(attention_mask=attention_mask, **kwargs)
    kwargs |= {"q_length": packed.longest, "kv_length": packed.longest}
    mask = plain(attention_mask=None, **kwargs)
    return torch.empty(1, 1, 0, 0, device=kwargs["device"]) if mask is None else mask


def _eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Return the attention that the architecture's own file defines, with its soft-capping, sinks and the like."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


for _name, _inner, _plain in (("sdpa", sdpa_attention_forward, sdpa_mask), ("eager", _eager, eager_mask)):
    AttentionInterface.register(NAMES[_name], partial(attend, inner=_inner))
    AttentionMaskInterface.register(NAMES[_name], partial(_mask, _plain))
