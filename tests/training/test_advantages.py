"""Advantages and what is taken off rewards, worked out by hand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from clew.algorithms import built_in_advantages
from clew.algorithms.grpo import normalised
from clew.algorithms.reward_statistics import centred
from clew.algorithms.rloo import leave_one_out
from clew.config import Algorithm
from clew.errors import ConfigError, TrainingError
from clew.record.rows import Sequence
from clew.training.advantages import advantages_function, largest_penalty
from clew.training.batch_metrics import correlation_metrics
from tests.training.sequences import make_config, make_sequence


def group_advantages(sequences: list[Sequence], method: str = "group") -> np.ndarray:
    return built_in_advantages(method)(sequences)


def normalise(rewards: list[float]) -> np.ndarray:
    """Return the advantages of episodes of one sequence each."""
    return normalised([[reward] for reward in rewards])


def test_two_rewards_are_as_far_from_the_mean_as_from_each_other():
    # mean 1/2, standard deviation (divided by 2 - 1) sqrt(1/2): ±(1/2) / sqrt(1/2)
    assert normalise([0.0, 1.0]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


def test_four_rewards_by_hand():
    # mean 1/4, squared distances 3/16 + 9/16, divided by 3: 1/4, so the standard deviation is 1/2
    assert normalise([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_equal_rewards_teach_nothing():
    assert np.mean([1234.56] * 7) != 1234.56  # as numbers of floating point
    assert not normalise([1234.56] * 7).any()


def test_statistics_are_over_episodes_and_within_a_group():
    rows = [
        make_sequence("g0.e0.s0", reward=1.0),
        make_sequence("g0.e0.s1", reward=1.0),  # a second sequence of the same episode counts once
        make_sequence("g1.e0.s0", reward=7.0),
        make_sequence("g0.e1.s0", reward=0.0),
        make_sequence("g1.e1.s0", reward=9.0),
    ]
    half = math.sqrt(0.5)
    advantages = group_advantages(rows)
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx([half, half, -half, -half, half], rel=1e-5)


def test_leave_one_out_of_several_sequences_is_more_than_a_multiple_of_mean():
    """(R_i - mean of its episode) + G / (G - 1) (mean of its episode - m); G / (G - 1) times `mean` of one sequence."""
    rewards = [[4.0, 2.0], [3.0], [9.0]]
    m, of_first = 5.0, 3.0
    found = leave_one_out(rewards)
    assert found.tolist() == pytest.approx(
        [(4 - of_first) + 1.5 * (of_first - m), (2 - of_first) + 1.5 * (of_first - m), 1.5 * (3 - m), 1.5 * (9 - m)]
    )
    assert found[2:].tolist() == pytest.approx((1.5 * centred(rewards))[2:].tolist())
    assert found[0] != pytest.approx(1.5 * centred(rewards)[0])


def test_leave_one_out_divided_by_the_deviation_is_a_multiple_of_group_and_equals_ms_swift_s():
    """ms-swift, advantage_estimator="rloo" with scale_rewards="group", restated from its formula.

    K / (K - 1) r - K / (K - 1) mean, over torch's standard deviation of the K rewards plus 1e-4.
    """
    rewards = [1.0, 0.0, 0.0, 4.0]
    rows = [make_sequence(f"g0.e{place}.s0", reward=reward) for place, reward in enumerate(rewards)]
    found = group_advantages(rows, "leave_one_out_std")
    assert found == pytest.approx(4 / 3 * group_advantages(rows), rel=1e-6)
    of_swift = torch.tensor(rewards)
    of_swift = (4 / 3 * of_swift - 4 / 3 * of_swift.mean()) / (of_swift.std() + 1e-4)
    assert found == pytest.approx(of_swift.numpy(), rel=1e-4)


def test_areal_s_leave_one_out_with_a_deviation_is_group():
    """Normalization in AReaL's areal/utils/data.py passes the leave-one-out means to its deviation."""
    rewards = [1.0, 0.0, 0.0, 4.0]
    apart = np.array([reward - (sum(rewards) - reward) / 3 for reward in rewards])
    areal = apart / (math.sqrt((apart**2).sum() / 3) + 1e-5)
    assert areal == pytest.approx(normalise(rewards), rel=1e-4)


@pytest.mark.parametrize("advantages", ["group", "mean", "leave_one_out", "leave_one_out_std"])
def test_equal_rewards_of_a_group_teach_nothing(advantages):
    rows = [make_sequence(f"g0.e{place}.s0", reward=1234.56) for place in range(7)]
    assert not group_advantages(rows, advantages).any()


def test_the_batch_s_deviation_equals_trl_s_scale_rewards():
    """GRPOTrainer, scale_rewards="batch": (rewards - mean_grouped_rewards) / (nanstd(rewards) + 1e-4)."""
    from trl.trainer.utils import nanstd

    rewards = np.random.default_rng(3).normal(2, 5, (4, 3))
    batch = [
        make_sequence(f"g{group}.e{sample}.s0", reward=float(reward))
        for (group, sample), reward in np.ndenumerate(rewards)
    ]
    of_trl = torch.from_numpy(rewards)
    expected = (of_trl - of_trl.mean(dim=1, keepdim=True)) / nanstd(of_trl.flatten())
    assert group_advantages(batch, "group_mean_batch_std") == pytest.approx(expected.flatten().numpy(), rel=1e-5)
    shuffled = [batch[place] for place in np.random.default_rng(4).permutation(len(batch))]
    found = {
        row.id: each for row, each in zip(shuffled, group_advantages(shuffled, "group_mean_batch_std"), strict=True)
    }
    assert [found[row.id] for row in batch] == pytest.approx(expected.flatten().tolist(), rel=1e-5)


def test_the_batch_s_deviation_is_about_the_batch_s_mean():
    # mean of the batch 3, squares 9, 1, 1, 9: 20 / 3; distances from the means of the groups, 1 and 5, are 1
    rows = [make_sequence(f"g{place // 2}.e{place % 2}.s0", reward=2.0 * place) for place in range(4)]
    one = 1 / math.sqrt(20 / 3)
    assert group_advantages(rows, "group_mean_batch_std") == pytest.approx([-one, one, -one, one], rel=1e-6)


def test_a_batch_of_one_group_has_the_group_s_deviation_and_equal_rewards_teach_nothing():
    one = [make_sequence(f"g0.e{place}.s0", reward=reward) for place, reward in enumerate((1.0, 0.0, 5.0))]
    assert group_advantages(one, "group_mean_batch_std") == pytest.approx(group_advantages(one), rel=1e-6)
    equal = [make_sequence(f"g{place // 2}.e{place % 2}.s0", reward=float(place // 2)) for place in range(4)]
    assert group_advantages(equal, "group_mean_batch_std").tolist() == [0, 0, 0, 0]
    same = [make_sequence(f"g0.e{place}.s0", reward=0.7) for place in range(6)]
    assert np.abs(group_advantages(same, "group_mean_batch_std")).max() < 1e-8


@pytest.mark.parametrize(
    "method", ["group", "group_mean_batch_std", "mean", "leave_one_out", "leave_one_out_std", "batch"]
)
def test_a_group_of_one_has_nothing_to_be_compared_with(method: str):
    one = "the batch" if method == "batch" else "g0"
    with pytest.raises(TrainingError, match=rf"{one} has one scored episode, g0.e0: algorithm.advantages compares"):
        group_advantages([make_sequence("g0.e0.s0")], method)
    assert group_advantages([make_sequence("g0.e0.s0", reward=3.0)], "none") == [3.0]


ROWS = [
    make_sequence("g0.e0.s0", reward=4.0),
    make_sequence("g0.e0.s1", reward=2.0),  # an episode of two sequences: 3
    make_sequence("g0.e1.s0", reward=0.0),
    make_sequence("g0.e2.s0", reward=6.0),
    make_sequence("g1.e0.s0", reward=1.0),
    make_sequence("g1.e1.s0", reward=5.0),
]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean", [4 - 3, 2 - 3, 0 - 3, 6 - 3, 1 - 3, 5 - 3]),
        ("leave_one_out", [4 - 3, 2 - 3, 0 - 4.5, 6 - 1.5, 1 - 5, 5 - 1]),
        # over the deviations of the groups: 1, 9, 9: 19 / 2 | 4, 4: 8
        (
            "leave_one_out_std",
            [x / math.sqrt(19 / 2) for x in (1, -1, -4.5, 4.5)] + [-4 / math.sqrt(8), 4 / math.sqrt(8)],
        ),
        ("none", [4, 2, 0, 6, 1, 5]),
        # five episodes, mean 3; squares (1 + 1) / 2, 9, 9, 4, 4: 27 / 4
        ("batch", [x / math.sqrt(27 / 4) for x in (1, -1, -3, 3, -2, 2)]),
        # those distances from the means of the groups, 3 and 3, over the deviation of the batch
        ("group_mean_batch_std", [x / math.sqrt(27 / 4) for x in (1, -1, -3, 3, -2, 2)]),
        # 1, 9, 9: 19 / 2 | mean 3; 4, 4: 8
        ("group", [x / math.sqrt(19 / 2) for x in (1, -1, -3, 3)] + [-2 / math.sqrt(8), 2 / math.sqrt(8)]),
    ],
)
def test_each_kind_by_hand(method: str, expected: list[float]):
    found = group_advantages(ROWS, method)
    assert found.dtype == np.float32 and found == pytest.approx(expected, rel=1e-5)


def of(**options: Any) -> Any:
    compute = advantages_function(make_config("unused", algorithm=options).algorithm)

    def of_rows(rows: list[Sequence], reference: Any) -> list[float]:
        found = compute(rows, reference, None).advantages
        return [of_row[row.loss_mask][0] for row, of_row in zip(rows, found, strict=True)]

    return of_rows


def response(name: str, *turns: tuple[int, int], **columns: Any) -> Sequence:
    """turns: tokens of the response, and the limit it was sampled with."""
    interactions = [{"output_tokens": length, "sampling": {"max_new_tokens": limit}} for length, limit in turns]
    return dataclasses.replace(make_sequence(name, **columns), interactions=interactions)


def test_the_overlong_penalty_by_hand():
    """DAPO, equation 13, with a limit of 100 and a buffer of 20 (L_cache)."""
    lengths = {10: 0, 80: 0, 81: 0.05, 90: 0.5, 99: 0.95, 100: 1}
    assert [largest_penalty(response("g0.e0.s0", (length, 100)), 20) for length in lengths] == pytest.approx(
        list(lengths.values())
    )
    each_its_own = response("g0.e0.s0", (95, 100), (10, 15), (3, 100))
    assert largest_penalty(each_its_own, 20) == pytest.approx(0.75)
    rows = [response("g0.e0.s0", (100, 100), reward=1.0), response("g0.e1.s0", (9, 100), reward=1.0)]
    assert of(advantages="none", overlong_penalty=20)(rows, None) == [0, 1]
    assert of(advantages="mean", overlong_penalty=20)(rows, None) == [-0.5, 0.5]
    with pytest.raises(TrainingError, match=r"the record of g0\.e0\.s0 has no interactions"):
        of(overlong_penalty=20)([make_sequence("g0.e0.s0")], None)


@pytest.mark.parametrize(("estimator", "token"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1)])
def test_a_divergence_in_the_reward_by_hand(estimator: str, token: float):
    """Behaviour logprobs of -3 against the reference's -3.5, over 4 tokens."""
    rows = [make_sequence("g0.e0.s0", reward=1.0), make_sequence("g0.e1.s0", reward=1.0)]
    reference = [np.where(row.loss_mask, np.float32(-3 - i / 2), np.float32(0)) for i, row in enumerate(rows, 1)]
    compute = of(advantages="none", kl_in="reward", kl_coef=0.1, kl_estimator=estimator)
    assert compute(rows, reference)[0] == pytest.approx(1 - 0.1 * 4 * token, rel=1e-6)
    in_the_loss = of(advantages="none", kl_coef=0.1, kl_estimator=estimator)
    assert in_the_loss(rows, reference) == [1, 1]


# The user's own ------------------------------------------------------------------------------------------------------


def ranks(sequences: list[Sequence]) -> list[int]:
    return [sorted(each.reward for each in sequences).index(each.reward) for each in sequences]


def too_few(sequences: list[Sequence]) -> list[float]:
    return [1.0]


def words(sequences: list[Sequence]) -> str:
    return "better"


def not_a_number(sequences: list[Sequence]) -> list[float]:
    return [math.nan for _ in sequences]


def meddling(sequences: list[Sequence]) -> list[float]:
    sequences[1].logprobs[-1] = 0
    return [0.0, 1.0]


def sorting(sequences: list[Sequence]) -> list[float]:
    sequences.sort(key=lambda each: each.reward)
    return [each.reward for each in sequences]


def by_place(sequences: list[Sequence]) -> list[np.ndarray]:
    places = [each.reward * np.arange(len(each.input_ids)) for each in sequences]
    return [np.where(each.loss_mask, of_each, np.nan) for each, of_each in zip(sequences, places, strict=True)]


def too_short(sequences: list[Sequence]) -> list[np.ndarray]:
    return [np.zeros(each.loss_mask.sum()) for each in sequences]


def last_is_none(sequences: list[Sequence]) -> list[np.ndarray]:
    return [np.where(np.arange(len(each.input_ids)) < len(each.input_ids) - 1, 1, np.inf) for each in sequences]


def of_words(sequences: list[Sequence]) -> list[str]:
    return ["good" for _ in sequences]


def with_a_gradient(sequences: list[Sequence]) -> torch.Tensor:
    return torch.ones(len(sequences), requires_grad=True)


def raising(sequences: list[Sequence]) -> list[float]:
    return [sequences[9].reward]


def calling(sequences: list[Sequence]) -> list[float]:
    return raising(sequences)


def assigning(sequences: list[Sequence]) -> list[float]:
    sequences[0].reward = 1.0  # type: ignore[misc]
    return []


def two(sequences: list[Sequence], more: int) -> list[float]:
    return []


def only_named(*, step=0, **options):
    return [step]


def none_at_all() -> list[float]:
    return []


def with_more(sequences: list[Sequence], *more: int) -> list[float]:
    return [row.reward for row in sequences]


def of_any(*arguments: list[Sequence]) -> list[float]:
    return with_more(arguments[0])


def test_advantages_of_the_users_own_get_the_reward_that_is_trained_on():
    rows = [response("g0.e0.s0", (100, 100), reward=1.0), response("g0.e1.s0", (9, 100), reward=0.5)]
    name = "tests.training.test_advantages.ranks"
    assert of(advantages=name)(rows, None) == [1, 0]
    assert of(advantages=name, overlong_penalty=20)(rows, None) == [0, 1]


@pytest.mark.parametrize("name", ["with_more", "of_any"])
def test_advantages_of_the_users_own_may_take_more_arguments_than_they_are_given(name: str):
    rows = [make_sequence("g0.e0.s0", reward=1.0), make_sequence("g0.e1.s0", reward=0.5)]
    assert of(advantages=f"tests.training.test_advantages.{name}")(rows, None) == [1.0, 0.5]


def test_advantages_of_the_users_own_may_differ_from_token_to_token():
    rows = [make_sequence("g0.e0.s0", reward=1.0), make_sequence("g0.e1.s0", reward=0.5)]
    compute = advantages_function(Algorithm(advantages="tests.training.test_advantages.by_place"))
    for row, found in zip(rows, compute(rows, None, None).advantages, strict=True):
        expected = [row.reward * place if trained else 0 for place, trained in enumerate(row.loss_mask)]
        assert found.dtype == np.float32 and found.tolist() == pytest.approx(expected, rel=1e-6)
        assert len(set(found[row.loss_mask])) == row.loss_mask.sum() > 1


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("too_few", TrainingError, "returned 1 entries; expected 2 entries, one per sequence: a number, or an array"),
        ("words", TrainingError, "returned str; expected 2 entries"),
        ("of_words", TrainingError, "returned list of str; expected 2 entries"),
        ("with_a_gradient", TrainingError, "returned Tensor; expected 2 entries"),
        ("too_short", TrainingError, r"an array of shape \[4\] for g0\.e0\.s0; expected a number, or one for each of"),
        ("last_is_none", TrainingError, r"returned inf for token \d+ of g0\.e0\.s0 \(its reward is 1\), and for 1"),
        ("not_a_number", TrainingError, r"returned nan for g0\.e0\.s0 \(its reward is 1\), and for 1 more; expected"),
        ("meddling", TrainingError, "changed its input"),
        ("sorting", TrainingError, "changed its input: .* or their order"),
        ("raising", TrainingError, r"raised IndexError in [^ ]*test_advantages.py:\d+: list index out of range"),
        (
            "calling",
            TrainingError,
            r"in [^ ]*test_advantages.py:\d+, called in [^ ]*test_advantages.py:\d+: list index",
        ),
        ("assigning", TrainingError, r"FrozenInstanceError in [^ ]*test_advantages.py:\d+: cannot assign"),
        ("two", ConfigError, r"takes \(sequences, more\); expected one parameter, .* or three, for"),
        ("none_at_all", ConfigError, r"takes \(\); expected one parameter"),
        ("only_named", ConfigError, r"takes \(step, options\); expected one parameter"),
        ("nobody", ConfigError, "has no 'nobody'"),
    ],
)
def test_what_cannot_be_advantages_is_told(name: str, error: type[Exception], said: str):
    rows = [make_sequence("g0.e0.s0", reward=1.0), make_sequence("g0.e1.s0", reward=0.5)]
    with pytest.raises(error, match=said):
        of(advantages=f"tests.training.test_advantages.{name}")(rows, None)


def test_how_advantages_follow_rewards_by_hand():
    rewards = [0.0, 1.0, 10.0, 12.0]
    batch = [make_sequence(f"g{place // 2}.e{place % 2}.s0", reward=reward) for place, reward in enumerate(rewards)]

    def correlation(*advantages: float, method: str = "mine.own") -> dict[str, float]:
        of_tokens = [np.where(row.loss_mask, value, 99.0) for row, value in zip(batch, advantages, strict=True)]
        return correlation_metrics(batch, of_tokens, method)

    assert correlation(-0.5, 0.5, -1.0, 1.0)["advantage_reward_correlation"] == pytest.approx(1)
    assert correlation(0.5, -0.5, 1.0, -1.0)["advantage_reward_correlation"] == pytest.approx(-1)
    # Within groups rewards are -.5, .5, -1, 1 and advantages -.5, .5, .5, -.5: -.5 / (sqrt(2.5) * 1).
    misordered = correlation(0.0, 1.0, 8.0, 7.0)["advantage_reward_correlation"]
    assert misordered == pytest.approx(-0.5 / math.sqrt(2.5))
    assert correlation(1.0, 1.0, 3.0, 3.0) == {}
    assert correlation(-0.5, 0.5, -1.0, 1.0, method="group") == {}
