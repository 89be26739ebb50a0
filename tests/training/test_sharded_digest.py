"""Digests of tensors are those of their arrays, wherever they are computed."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from clew.models.tensor_digest import AT_ONCE, as_array, begin_on_device, digest_scattered
from clew.record.array_digest import digest_array
from clew.training.sharded_digest import digest_tensors

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


@given(st.sampled_from(TYPES), st.integers(0, 200_000), st.integers(0, 300_000), st.integers(0, 2**32))
def test_on_a_device_as_in_numpy(dtype: torch.dtype, size: int, start: int, seed: int) -> None:
    """Computed here by the operations that a GPU would be given; blocks that begin and end anywhere."""
    numbers = np.random.default_rng(seed).integers(-(2**31), 2**31, size)
    tensor = torch.from_numpy(numbers).to(dtype)
    assert begin_on_device(tensor, name="w", start=start)() == digest_array(as_array(tensor), name="w", start=start)


def test_in_parts_on_a_device() -> None:
    tensor = torch.arange(AT_ONCE + 70_000).to(torch.uint8)
    assert begin_on_device(tensor, name="w", start=70_000)() == digest_array(tensor.numpy(), name="w", start=70_000)


def test_large_sets_are_digested_in_threads() -> None:
    named = [(f"w{index}", torch.randn(700, 1000)) for index in range(4)]
    assert digest_tensors(named) == {name: digest_array(tensor.numpy(), name=name) for name, tensor in named}


def test_a_slice_of_columns_counts_at_the_positions_that_it_has_in_the_whole() -> None:
    whole = torch.randn(300, 700, generator=torch.Generator().manual_seed(1))  # more than one block
    parts = [whole[:, :200], whole[:, 200:], whole[:0]]
    offsets = [0, 200, 0]
    found = sum(
        digest_scattered(part.contiguous(), offset, part.stride(), name="w")
        for part, offset in zip(parts, offsets, strict=True)
    )
    assert found % 2**64 == digest_array(whole.numpy(), name="w")
    half = whole.to(torch.bfloat16)
    assert digest_scattered(half.t(), 0, half.t().stride(), name="w") == digest_array(as_array(half), name="w")
