"""Group-normalised advantages, worked out by hand."""

import math

import numpy as np
import pytest

from clew.training.advantages import group_advantages, normalise
from tests.training.sequences import make_sequence


def test_two_rewards_are_as_far_from_the_mean_as_from_each_other():
    # mean 1/2, standard deviation (divided by 2 - 1) sqrt(1/2): ±(1/2) / sqrt(1/2)
    assert normalise(np.array([0.0, 1.0])) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


def test_four_rewards_by_hand():
    # mean 1/4, squared distances 3/16 + 9/16, divided by 3: 1/4, so the standard deviation is 1/2
    assert normalise(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_equal_rewards_teach_nothing():
    assert np.abs(normalise(np.array([0.3, 0.3, 0.3]))).max() < 1e-9


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


def test_a_group_of_one_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="two or more"):
        group_advantages([make_sequence("g0.e0.s0")])
