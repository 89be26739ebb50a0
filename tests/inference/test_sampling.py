"""The mathematics of choosing a token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from clew.inference.protocol import SamplingParams
from clew.inference.sampling import RowParams, choose, cumulative, rising, truncate, uniform

CPU = torch.device("cpu")


def params(*rows: SamplingParams, vocab: int = 4) -> RowParams:
    return RowParams.stack(rows, vocab, CPU)


def test_uniform_numbers_are_uniform_and_depend_on_seed_and_position_alone() -> None:
    seeds, positions = torch.arange(200)[:, None], torch.arange(500)[None]
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.005)
    counts = torch.histc(numbers, 20, 0, 1) / numbers.numel()
    assert (counts - 0.05).abs().max() < 0.003
    assert uniform(torch.tensor(7), torch.tensor(9)) == numbers[7, 9]
    neighbours = torch.corrcoef(torch.stack((numbers[:, :-1].flatten(), numbers[:, 1:].flatten())))[0, 1]
    assert abs(neighbours.item()) < 0.02
    huge = RowParams.stack([SamplingParams(seed=2**64 - 1), SamplingParams(seed=2**63)], 4, CPU).seeds
    assert huge.tolist() == [-1, -(2**63)]
    numpys: Any = np.int64(-5)
    assert RowParams.stack([SamplingParams(seed=numpys)], 4, CPU).seeds.tolist() == [-5]


def test_draws_by_inverting_the_cumulative_distribution() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]])).repeat(5, 1)
    numbers = torch.tensor([0.0, 0.0999, 0.2, 0.5999, 0.99])
    ids, logprobs, _ = choose(logits, params(*[SamplingParams()] * 5), numbers)
    assert ids.tolist() == [0, 0, 1, 2, 3]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in (0.1, 0.1, 0.2, 0.3, 0.4)])


def test_logprob_is_after_temperature_and_before_truncation() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    row = SamplingParams(temperature=2.0, top_k=1)
    ids, logprobs, _ = choose(logits, params(row), torch.tensor([0.0]))
    assert ids.tolist() == [3]
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits / 2, -1)[0, 3].item())
    ids, logprobs, _ = choose(logits, params(SamplingParams(temperature=0), row), torch.tensor([0.0, 0.0]))
    assert ids.tolist() == [3, 3] and logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 3].item())


def test_a_greedy_row_chooses_the_same_token_beside_others() -> None:
    greedy, other = SamplingParams(temperature=0), SamplingParams()
    numbers = torch.linspace(0, 1, 2000)[:, None]
    second = torch.nextafter(numbers, torch.tensor(9.0))  # in many rows its probability rounds to that of the first
    logits_RV = torch.cat((numbers, second, numbers - 2, numbers - 2), 1)
    alone, _, _ = choose(logits_RV, params(*[greedy] * 2000), torch.zeros(2000))
    beside, _, _ = choose(logits_RV, params(*[greedy] * 1999, other), torch.zeros(2000))
    assert torch.equal(alone[:-1], beside[:-1])


def kept(probs: list[float], top_k: int = 4, top_p: float = 1.0, min_p: float = 0.0) -> list[bool]:
    cut = truncate(
        torch.tensor([probs]),
        torch.tensor([[top_k]]),
        torch.tensor([[top_p]]),
        torch.tensor([[min_p]]),
        top_k < 4 or top_p < 1,
    )
    return (cut[0] > 0).tolist()


def test_truncation() -> None:
    probs = [0.1, 0.4, 0.3, 0.2]
    assert kept(probs) == [True] * 4
    assert kept(probs, top_k=2) == [False, True, True, False]
    assert kept(probs, top_p=0.4) == [False, True, False, False]
    assert kept(probs, top_p=0.41) == [False, True, True, False]
    assert kept(probs, top_p=0.91) == [True] * 4
    assert kept(probs, min_p=0.5) == [False, True, True, True]
    assert kept(probs, top_k=2, top_p=0.5) == [False, True, False, False]  # 0.4 of 0.7 already passes a half
    assert kept([0.25] * 4, top_k=3) == [True, True, True, False]  # ties: the lower id first


def test_banned_tokens_are_not_drawn_and_do_not_change_the_logprob() -> None:
    logits = torch.tensor([[3.0, 0.0, 0.0, 0.0]] * 2)
    banned = torch.tensor([[True, False, False, False]] * 2)
    ids, logprobs, _ = choose(logits, params(SamplingParams(), SamplingParams(temperature=0)), torch.zeros(2), banned)
    assert ids.tolist() == [1, 1]
    assert logprobs.tolist() == pytest.approx([torch.log_softmax(logits, -1)[0, 1].item()] * 2)
    ids, *_ = choose(logits, params(*[SamplingParams(temperature=0)] * 2), torch.zeros(2), banned)
    assert ids.tolist() == [1, 1]


def test_beside_a_banned_token_of_probability_1_the_likeliest_other_is_drawn() -> None:
    logits = torch.full((1, 50), -3.0)
    logits[0, 7], logits[0, 3] = 5.0, 2.0
    banned = torch.zeros(1, 50, dtype=torch.bool)
    banned[0, 7] = True
    rows = RowParams.stack([SamplingParams(temperature=0.02, min_new_tokens=1)], 50, torch.device("cpu"))
    ids, logprobs, _ = choose(logits, rows, torch.tensor([0.5]), banned)
    assert ids.tolist() == [3] and logprobs.tolist() == pytest.approx([-150.0])
    params_of_mask = SamplingParams(temperature=0.02, min_new_tokens=1, top_p=0.9)
    rows = RowParams.stack([params_of_mask], 50, torch.device("cpu"))
    drawn = choose(logits, rows, torch.tensor([0.5]), banned)
    assert [mask.tolist() for mask in drawn.masks([0])] == [[3]]
    assert drawn.logprobs_R.tolist() == [0.0]  # the only token that could be drawn


def test_sums_that_fall_or_rise_by_rounding_draw_nothing_that_is_excluded() -> None:
    probs = torch.tensor([[0.25, 0.0, 0.25, 0.0, 0.5, 0.0]])
    rounded = torch.tensor([[0.25, 0.26, 0.49, 0.48, 0.98, 1.01]])  # as CUDA might add them, much exaggerated
    cdf = rising(rounded, probs)
    assert cdf[0].tolist() == pytest.approx([0.25, 0.25, 0.49, 0.49, 0.98, 0.98])
    numbers = torch.linspace(0, 1 - 2.0**-23, 999)
    drawn = torch.searchsorted(cdf[0], numbers * cdf[0, -1], right=True)
    assert set(drawn.tolist()) == {0, 2, 4}


def test_a_token_of_probability_0_is_never_drawn() -> None:
    logits = torch.full((4096, 50), -torch.inf)
    logits[:, :3] = torch.randn(4096, 3, generator=torch.Generator().manual_seed(0))
    numbers = torch.full((4096,), 1 - 2.0**-23)
    ids, logprobs, _ = choose(logits, params(*[SamplingParams()] * 4096, vocab=50), numbers)
    assert ids.max() <= 2 and logprobs.isfinite().all()


def test_draws_where_torch_has_no_deterministic_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, torch's `cumsum` raises while only deterministic kernels are allowed."""
    plain = torch.Tensor.cumsum

    def cumsum(self: torch.Tensor, dim: int) -> torch.Tensor:
        assert not torch.are_deterministic_algorithms_enabled()
        return plain(self, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    torch.use_deterministic_algorithms(True)
    try:
        assert cumulative(torch.tensor([[0.25, 0.5, 0.25]])).tolist() == [[0.25, 0.75, 1.0]]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
