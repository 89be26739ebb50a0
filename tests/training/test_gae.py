"""Generalized advantage estimation on numbers worked out by hand, and against the sum that defines it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.algorithms.gae import gae, whitened
from clew.errors import ConfigError, TrainingError
from clew.launch.preflight import check_named
from clew.record.rows import Sequence
from clew.training.advantages import advantages_function, token_rewards, truncated
from clew.training.custom import needs_critic
from tests.models import tiny_model
from tests.training.sequences import make_config, make_sequence


def of(**options: Any) -> Any:
    return make_config("unused", algorithm={"advantages": "gae"} | options).algorithm


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


# Episodes that were cut off ------------------------------------------------------------------------------------------


def test_an_episode_that_was_cut_off_ends_with_the_value_of_its_last_state_by_hand():
    # deltas: 0.5 * 4 - 2 = 0, 0.5 * 6 - 4 = -1, 10 + 0.5 * 4 - 6 = 6; without the last value 4 the last delta is 4
    # advantages, from the end: 6, -1 + 0.25 * 6 = 0.5, 0 + 0.25 * 0.5 = 0.125
    row = make_sequence("g0.e0.s0", prompt=1, response=3, reward=10.0)
    values, bootstrap = [np.array([0, 2, 4, 6.0], np.float32)], [np.array([0, 0, 0, 4.0], np.float32)]
    compute = advantages_function(of_own("unwhitened", gamma=0.5, gae_lambda=0.5, bootstrap_truncated=True))
    found = compute([row], None, values, bootstrap)
    assert found.returns is not None
    assert found.advantages[0].tolist() == [0, 0.125, 0.5, 6] and found.returns[0].tolist() == [0, 2.125, 4.5, 12]
    stopped = compute([row], None, values, [np.zeros(4, np.float32)])
    assert stopped.advantages[0].tolist() == [0, 0, 0, 4]
    whitening = advantages_function(of(gamma=0.5, gae_lambda=0.5, bootstrap_truncated=True))(
        [row], None, values, bootstrap
    )
    assert whitening.advantages[0][1:] == pytest.approx(whitened(np.array([0.125, 0.5, 6])))
    assert whitening.returns is not None and whitening.returns[0].tolist() == [0, 2.125, 4.5, 12]


def areal(rewards: np.ndarray, values: np.ndarray, cut: bool, mask: np.ndarray, gamma: float, lam: float) -> Any:
    """AReaL's PPOActor._compute_advantages, areal/trainer/ppo/actor.py, for one sequence.

    Its place t has the reward and the mask of token t + 1 and the value of the state before that token.
    """
    after, following, advantages = 0.0, values[-1] * cut, np.zeros(len(values))
    for t in reversed(range(len(values) - 1)):
        delta = rewards[t] + gamma * following - values[t]
        new = delta + gamma * lam * after
        following = following * (1 - mask[t]) + values[t] * mask[t]
        after = after * (1 - mask[t]) + new * mask[t]
        advantages[t] = after
    return advantages, advantages + values


@given(
    st.lists(st.tuples(numbers, st.booleans()), min_size=2, max_size=9),
    st.booleans(),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
def test_it_equals_areal_s(tokens: list[tuple[float, bool]], cut: bool, gamma: float, lam: float):
    values = np.array([value for value, _ in tokens], np.float32).astype(np.float64)  # of the states before and after
    trained = np.array([*(each for _, each in tokens[:-2]), True])  # the last token is the policy's
    row = make_sequence("g0.e0.s0", prompt=1, response=len(trained), reward=2.0)
    row = dataclasses.replace(row, loss_mask=np.array([False, *trained]))
    expected, returns = areal(
        np.array([*np.zeros(len(trained) - 1), 2.0, 0.0]), values, cut, trained.astype(float), gamma, lam
    )
    before = np.where(row.loss_mask, np.array([0, *values[:-1]], np.float32), np.float32(0))
    last = np.array([*np.zeros(len(trained)), values[-1] * cut], np.float32)
    algorithm = of_own("unwhitened", gamma=gamma, gae_lambda=lam, bootstrap_truncated=True)
    found = advantages_function(algorithm)([row], None, [before], [last])
    assert found.returns is not None
    assert found.advantages[0][1:][trained] == pytest.approx(expected[:-1][trained], abs=1e-4)
    assert found.returns[0][1:][trained] == pytest.approx(returns[:-1][trained], abs=1e-4)


def test_an_episode_was_cut_off_where_its_last_turn_was():
    rows = [
        make_sequence("g0.e0.s0"),
        dataclasses.replace(make_sequence("g0.e1.s0"), finish_reason="length"),
        dataclasses.replace(two_turns("g0.e2.s0"), finish_reason="length"),
        dataclasses.replace(make_sequence("g0.e2.s1"), finish_reason="length"),  # beside turn 0 of two
        dataclasses.replace(make_sequence("g0.e3.s0"), finish_reason="length"),  # went on, and stopped
        two_turns("g0.e3.s1"),
    ]
    assert truncated(rows).tolist() == [False, True, True, False, False, False]


# A user's own ---------------------------------------------------------------------------------------------------------


def one_step(rewards: Any, values: Any, options: Any) -> Any:
    returns = [each + options.gamma * np.append(own[1:], 0) for each, own in zip(rewards, values, strict=True)]
    return [each - own for each, own in zip(returns, values, strict=True)], returns


def unwhitened(rewards: Any, values: Any, options: Any) -> Any:
    found = [gae(*each, gamma=options.gamma, lam=options.gae_lambda) for each in zip(rewards, values, strict=True)]
    return [advantages_N for advantages_N, _ in found], [returns_N for _, returns_N in found]


def only_advantages(rewards: Any, values: Any, options: Any) -> Any:
    return rewards[0]


def too_few(rewards: Any, values: Any, options: Any) -> Any:
    return rewards, rewards[1:]


def one_number_each(rewards: Any, values: Any, options: Any) -> Any:
    return [each.sum() for each in rewards], rewards


def infinite(rewards: Any, values: Any, options: Any) -> Any:
    return rewards, [each / 0 for each in values]


def in_place(rewards: Any, values: Any, options: Any) -> Any:
    rewards[0] += 1
    return rewards, values


def of_own(name: str, **options: Any) -> Any:
    return of(advantages=f"tests.training.test_gae.{name}", **options)


def test_a_user_s_function_gets_the_rewards_and_values_of_trained_tokens():
    rows = [two_turns(), make_sequence("g1.e0.s0", prompt=1, response=2, reward=-1.0)]
    values = [np.where(row.loss_mask, np.float32(0.5), np.float32(0)) for row in rows]
    algorithm = of_own("one_step", gamma=0.5)
    assert needs_critic(algorithm)
    found = advantages_function(algorithm)(rows, None, values)
    assert found.returns is not None and found.returns[0].dtype == found.advantages[0].dtype == np.float32
    # rewards 0, 0.25 | 0, 0, 0.75 and 0.5 times the next value, which is 0.5, or 0 after the last
    assert found.returns[0].tolist() == [0, 0, 0.25, 0.5, 0, 0, 0, 0.25, 0.25, 0.75]
    assert found.advantages[0].tolist() == [0, 0, -0.25, 0, 0, 0, 0, -0.25, -0.25, 0.25]
    assert found.returns[1].tolist() == [0, 0.25, -1] and found.advantages[1].tolist() == [0, -0.25, -1.5]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("only_advantages", TrainingError, "returned ndarray; expected two lists, advantages and returns, each of 2 a"),
        ("too_few", TrainingError, "returned 1 returns; expected two lists"),
        (
            "one_number_each",
            TrainingError,
            r"returned advantages of shape \[\] for rewards\[0\]; expected one .*: \[4\]",
        ),
        ("infinite", TrainingError, r"returned returns of inf for rewards\[0\]\[0\]; expected finite numbers"),
        ("in_place", TrainingError, r"raised ValueError in [^ ]*test_gae.py:\d+: .*read-only"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_what_cannot_be_advantages_and_returns_is_told(name: str, error: type[Exception], said: str):
    rows = [make_sequence("g0.e0.s0", reward=1.0), make_sequence("g0.e1.s0", reward=0.5)]
    values = [np.where(row.loss_mask, np.float32(0.5), np.float32(0)) for row in rows]
    with pytest.raises(error, match=said):
        advantages_function(of_own(name))(rows, None, values)
    assert [each[3:].tolist() for each in values] == [[0.5] * 4] * 2


def test_the_critic_s_fields_are_for_functions_that_take_values(tmp_path: Path):
    """They are checked before a process starts, by the source of the function."""
    tiny_model(tmp_path)

    def check(function: str, reward: Any = None, **options: Any) -> None:
        algorithm = {"advantages": function, **options}
        debug = {"replay_rollout_data": True, "path": "batches"}
        check_named(make_config(tmp_path, algorithm=algorithm, reward=reward or {}, debug=debug))

    with_values, without = f"{__name__}.one_step", "tests.training.test_advantages.ranks"
    for field, value in (("critic", "models/rm"), ("critic_lr", 1e-4), ("bootstrap_truncated", True)):
        check(with_values, **{field: value})
        with pytest.raises(ConfigError, match=f"algorithm.{field} is for the critic, and .*ranks has no critic"):
            check(without, **{field: value})
    check(without, reward={"turn_discount": 0.5})
    with pytest.raises(ConfigError, match=r"reward.turn_discount \(0.5\) discounts whole turns, and .*one_step gets"):
        check(with_values, reward={"turn_discount": 0.5})


def test_an_overlong_response_loses_its_penalty_at_the_end():
    row = dataclasses.replace(
        make_sequence("g0.e0.s0", response=3, reward=1.0),
        interactions=[{"turn": 0, "output_tokens": 3, "sampling": {"max_new_tokens": 3}}],
    )
    values = [np.zeros(6, np.float32)]
    found = advantages_function(of(gae_lambda=1.0, overlong_penalty=2))([row], None, values)
    assert found.returns is not None and found.returns[0].tolist() == [0, 0, 0, 0, 0, 0]  # 1 - 1
