"""Packed attention for CUDA, tested without CUDA: what torch's kernel gets, its signature, and what it returns.

The kernel itself does not run here. A plain implementation of what its documentation says takes its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from clew.training import attention
from clew.training.isolation import keeps_rows_apart, prepare_for_packing
from clew.training.packing import Packed
from tests.models import tiny_model
from tests.training.test_packing import logprobs_and_gradient, random_rows

CPU = torch.device("cpu")


class Kernel:
    """torch's `varlen_attn` as its documentation describes it, row by row."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        self.calls += 1
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k == int(cu_seq_q.diff().max()) and int(cu_seq_q[-1]) == len(query)
        assert enable_gqa == (query.shape[1] != key.shape[1] and bool(attention.SHARED_KEYS)) and query.stride(-1) == 1
        return torch.cat(
            [
                row(query[begin:end], key[begin:end], value[begin:end], scale, window_size)
                for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)
            ]
        )


def row(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """Return the attention of one row, [T, heads, dim]."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None]
    behind, before = window  # -1: no limit
    too_far_behind, too_far_ahead = (-ahead > behind) & (behind >= 0), (ahead > before) & (before >= 0)
    scores = scores.masked_fill(too_far_behind | too_far_ahead, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(attention, "varlen_attn", found)
    monkeypatch.setattr(attention, "_kernel_takes", lambda *_, **__: True)
    return found


@pytest.mark.parametrize(
    ("family", "kernel_calls"),
    [("qwen2", True), ("gpt2", True), ("mistral", False), ("gemma2", False)],
)
def test_the_kernels_rows_equal_padded_rows(tmp_path: Any, kernel: Kernel, family: str, kernel_calls: bool) -> None:
    """Logprobs and gradients agree, also with shared keys, and with windows or soft caps, which use padded slots."""
    model = tiny_model(tmp_path, family, scale=0.2)
    rows = random_rows([11, 2, 24, 3, 10])
    apart = logprobs_and_gradient(model, rows, packed=False)
    prepare_for_packing(model)
    assert keeps_rows_apart(model)
    kernel.calls = 0
    for found, right in zip(logprobs_and_gradient(model, rows, packed=True), apart, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert bool(kernel.calls) == kernel_calls


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torchs_kernel_takes_these_arguments_and_has_gradients(kv_heads: int) -> None:
    """Check the signature and the shapes of the installed torch; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = Packed.of([5, 9, 2], CPU)
        shapes = [(1, heads, 16, 8) for heads in (4, kv_heads, kv_heads)]
        parts = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        query, key, value = parts
        found = attention._attend_packed(query, key, value, packed, 0.3)
        gradients = torch.autograd.grad(found.sum(), parts)
    assert found.shape == (1, 16, 4, 8) and found.dtype == torch.bfloat16
    assert [tuple(gradient.shape) for gradient in gradients] == shapes


def test_limits_are_the_cumulative_lengths() -> None:
    packed = Packed.of([5, 9, 2], CPU)
    assert packed.limits_R1.tolist() == [0, 5, 14, 16] and packed.limits_R1.dtype == torch.int32


def test_what_the_kernel_takes() -> None:
    """Half precision on CUDA only: float32, other devices and unsupported head sizes use padded slots."""

    def taken(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", dim: int = 64, **kwargs: Any) -> bool:
        module = torch.nn.Module()
        module.is_causal = kwargs.pop("is_causal", True)
        with FakeTensorMode():
            query = torch.empty(1, 2, 6, dim, dtype=dtype, device=device)
        return attention._kernel_takes(module, query, query, scaling=0.1, **kwargs)

    assert taken() and taken(torch.float16) and taken(dim=256)
    assert not taken(torch.float32) and not taken(device="cpu")
    assert not taken(dim=12) and not taken(dim=264)
    assert not taken(dropout=0.1) and not taken(is_causal=False)
