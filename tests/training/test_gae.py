"""Generalized advantage estimation on numbers worked out by hand, and against the sum that defines it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.algorithms.gae import gae, whitened
from clew.record.rows import Sequence
from clew.training.advantages import advantages_function, token_rewards
from tests.training.sequences import make_config, make_sequence


def of(**options: Any) -> Any:
    return make_config("unused", algorithm={"advantages": "gae", **options}).algorithm


def test_three_tokens_by_hand():
    # deltas: 0.5 * 4 - 2 = 0, 0.5 * 6 - 4 = -1, 10 - 6 = 4
    # advantages, from the end: 4, -1 + 0.25 * 4 = 0, 0 + 0.25 * 0 = 0
    advantages, returns = gae(np.array([0, 0, 10.0]), np.array([2, 4, 6.0]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [0, 0, 4] and returns.tolist() == [2, 4, 10]
    advantages, returns = gae(np.array([1, 0, 2.0]), np.array([1, 3, 2.0]), gamma=1.0, lam=1.0)
    assert returns.tolist() == [3, 2, 2] and advantages.tolist() == [2, -1, 0]  # lambda 1: the rewards from there on
    advantages, returns = gae(np.array([1, 0, 2.0]), np.array([1, 3, 2.0]), gamma=1.0, lam=0.0)
    assert returns.tolist() == [1 + 3, 2, 2] and advantages.tolist() == [3, -1, 0]  # lambda 0: one step ahead
    assert gae(np.zeros(0), np.zeros(0), gamma=1.0, lam=0.95)[0].shape == (0,)


numbers = st.floats(-5, 5, allow_nan=False, width=32)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.floats(0.1, 1), st.floats(0, 1))
def test_it_is_the_sum_of_the_paper(pairs: list[tuple[float, float]], gamma: float, lam: float):
    """Equation 16: A_t = sum over l of (gamma lambda)^l delta_{t + l}."""
    rewards, values = np.array(pairs).T
    deltas = rewards + gamma * np.append(values[1:], 0) - values
    expected = [sum((gamma * lam) ** (n - t) * deltas[n] for n in range(t, len(deltas))) for t in range(len(deltas))]
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    assert advantages == pytest.approx(expected, abs=1e-9) and returns == pytest.approx(expected + values, abs=1e-9)


def two_turns(name: str = "g0.e0.s0", **columns: Any) -> Sequence:
    """Prompt of 2 tokens, a turn of 2, an answer of the environment of 3, a turn of 3; rewards 0.25 and the rest."""
    row = make_sequence(name, prompt=2, response=8, reward=1.0)
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], bool)
    return dataclasses.replace(
        row,
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        turn_ids=np.array([-1, -1, 0, 0, -1, -1, -1, 1, 1, 1], np.int32),
        interactions=[{"turn": 0, "reward": 0.25}, {"turn": 1}],
        **columns,
    )


def test_rewards_lie_on_the_last_token_of_their_turn():
    assert token_rewards(two_turns(), of(), None).tolist() == [0, 0.25, 0, 0, 0.75]
    plain = make_sequence("g0.e0.s0", response=3, reward=2.0)
    assert token_rewards(plain, of(), None).tolist() == [0, 0, 2]
    assert token_rewards(make_sequence("g0.e0.s0", response=0), of(), None).tolist() == []


@pytest.mark.parametrize(("estimator", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)])
def test_a_divergence_lies_on_each_token(estimator: str, kl: float):
    row = two_turns()
    reference = np.where(row.loss_mask, np.float32(-1.5), np.float32(0))
    penalised = token_rewards(row, of(kl_in="reward", kl_coef=0.1, kl_estimator=estimator), reference)
    assert penalised == pytest.approx(np.array([0, 0.25, 0, 0, 0.75]) - 0.1 * kl)
    assert token_rewards(row, of(kl_coef=0.1), reference).tolist() == [0, 0.25, 0, 0, 0.75]  # it is in the loss


def test_turns_are_next_to_each_other_and_advantages_are_whitened_over_the_batch():
    rows = [two_turns(), make_sequence("g1.e0.s0", prompt=1, response=2, reward=-1.0)]
    values = [np.where(row.loss_mask, np.float32(0.5), np.float32(0)) for row in rows]
    found = advantages_function(of(gamma=1.0, gae_lambda=1.0))(rows, None, values)
    assert found.returns is not None
    assert found.returns[0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0.75, 0.75, 0.75]
    assert found.returns[1].tolist() == [0, -1, -1]
    raw = np.array([0.5, 0.5, 0.25, 0.25, 0.25, -1.5, -1.5])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    trained = np.concatenate([each[row.loss_mask] for each, row in zip(found.advantages, rows, strict=True)])
    assert trained == pytest.approx(expected, rel=1e-4) and found.advantages[0].dtype == np.float32
    assert not found.advantages[0][~rows[0].loss_mask].any()
    assert whitened(np.array([3.0])).tolist() == [0] and whitened(np.zeros(0)).tolist() == []


def test_an_overlong_response_loses_its_penalty_at_the_end():
    row = dataclasses.replace(
        make_sequence("g0.e0.s0", response=3, reward=1.0),
        interactions=[{"turn": 0, "output_tokens": 3, "sampling": {"max_new_tokens": 3}}],
    )
    values = [np.zeros(6, np.float32)]
    found = advantages_function(of(gae_lambda=1.0, overlong_penalty=2))([row], None, values)
    assert found.returns is not None and found.returns[0].tolist() == [0, 0, 0, 0, 0, 0]  # 1 - 1
