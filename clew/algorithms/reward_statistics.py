"""Statistics of rewards that several algorithms' advantages use. NumPy only.

Statistics are over episodes: an episode of several sequences counts once, as the mean over its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from clew.errors import TrainingError

if TYPE_CHECKING:
    from clew.record.rows import Sequence

EPSILON = 1e-6
"""Constant added to a standard deviation, so that equal rewards do not cause a division by zero."""

SAME = 1e-8
"""Largest difference of rewards or advantages that is only rounding. NumPy's deviation of equal rewards such as 0.1 is
about 1e-17, and advantages that a user's function divides by a small constant may be about 1e-10."""

CONTRADICTS = 0.1
"""Mean correlation of advantages and rewards within groups, at or below which they contradict each other."""

Rewards = SequenceABC[SequenceABC[float]]
"""Rewards of the sequences of each episode: one inner list per episode."""


def advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return the reward of each sequence as it is: `algorithm.advantages=none`."""
    return np.array([sequence.reward for sequence in sequences], np.float32)


def within_groups(
    sequences: SequenceABC[Sequence], compute: Callable[[Rewards], np.ndarray], *, batch: bool = False
) -> np.ndarray:
    """Return the results of `compute` for the rewards of each group, in the order of `sequences`: [sequences] float32.

    Args:
        compute: Function that returns one number for each sequence, episode by episode.
        batch: True if the whole batch is one group.

    Raises:
        TrainingError: A group has only one episode, so there is none to compare it with.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for place, sequence in enumerate(sequences):
        group = "the batch" if batch else sequence.group_id
        groups.setdefault(group, {}).setdefault(sequence.episode_id, []).append(place)
    results = np.empty(len(sequences), np.float32)
    for group, episodes in groups.items():
        if len(episodes) < 2:
            raise TrainingError(
                f"{group} has one scored episode, {next(iter(episodes))}: algorithm.advantages compares episodes and "
                f"needs two or more. Use a larger rollout.n_samples, or algorithm.advantages=none."
            )
        places = [place for episode in episodes.values() for place in episode]
        results[places] = compute([[sequences[place].reward for place in episode] for episode in episodes.values()])
    return results


def mean(rewards_ES: Rewards) -> float:
    """Return the mean over episodes."""
    return float(np.mean([np.mean(rewards_S) for rewards_S in rewards_ES]))


def deviation(rewards_ES: Rewards) -> float:
    """Return the standard deviation over the E episodes, sqrt(sum_E mean_S (reward - mean)^2 / (E - 1))."""
    centre = mean(rewards_ES)
    squares_E = np.array([np.mean((np.array(rewards_S) - centre) ** 2) for rewards_S in rewards_ES])
    return float(np.sqrt(np.add.reduce(squares_E) / (len(rewards_ES) - 1)))


def centred(rewards_ES: Rewards) -> np.ndarray:
    """Return reward - mean for each sequence, [sequences] float64: exactly 0 if all rewards are equal."""
    rewards = np.concatenate([np.array(rewards_S, np.float64) for rewards_S in rewards_ES])
    # The mean of equal rewards may be rounded, and AdamW makes a whole step out of the smallest difference.
    return rewards - (rewards[0] if (rewards == rewards[0]).all() else mean(rewards_ES))
