"""Metrics of a step, on numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from clew.training.batch_metrics import gap_metrics, lag_metrics, rejection_metrics, rollout_metrics
from tests.training.sequences import make_sequence


def test_mismatch_and_staleness_are_apart():
    behaviour, proximal = np.log([0.5, 0.4, 0.2, 0.3]), np.log([0.2, 0.6, 0.6, 0.3])
    lag = np.array([0, 1, 2, 0])
    # k3 = w - log w - 1 of the ratios 0.4, 1.5, 3 and 1
    k3 = np.array([0.316291, 0.094535, 0.901388, 0.0])
    found = gap_metrics(behaviour, proximal, lag)
    assert found["behaviour_k3"] == pytest.approx(k3.mean(), rel=1e-5)
    assert found["mismatch_k3"] == pytest.approx((k3[0] + k3[3]) / 2, rel=1e-5)
    assert found["stale_k3"] == pytest.approx((k3[1] + k3[2]) / 2, rel=1e-5)
    assert found["behaviour_gap_max"] == pytest.approx(np.log(3))
    assert lag_metrics(lag) == {"lag_mean": 0.75, "lag_max": 2.0}


def test_a_mean_over_no_tokens_is_left_out():
    logprobs = np.log([0.5, 0.4])
    assert "stale_k3" not in gap_metrics(logprobs, logprobs, np.array([0, 0]))
    assert "mismatch_k3" not in gap_metrics(logprobs, logprobs, np.array([1, 2]))
    nothing = np.zeros(0)
    assert gap_metrics(nothing, nothing, nothing) == lag_metrics(nothing) == rejection_metrics(nothing, nothing) == {}


def test_what_was_rejected_is_counted_by_token_and_by_sequence():
    why, rows = np.array([0, 1, 2, 2, 0, 0, 4, 3]), np.array([0, 0, 2, 2, 4, 4, 5, 6])
    assert rejection_metrics(why, rows) == {
        "rejected_share": 5 / 8,
        "rejected_sequences_share": 4 / 5,
        "veto_share": 2 / 5,
    }


def test_the_reward_of_an_episode_is_what_its_first_sequence_returned():
    first, last = make_sequence("g0.e0.s0", reward=1.0), make_sequence("g0.e0.s1", reward=0.0)
    found = rollout_metrics([first, replace(last, finish_reason="length")])
    assert (found["reward"], found["reward/match"], found["truncated_share"]) == (1.0, 1.0, 1.0)
