"""Advantages: how much better an episode was than the others of its group. NumPy only: replay needs no torch for it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import numpy as np

from clew.record.rows import Sequence

EPSILON = 1e-6
"""Added to a group's standard deviation; it keeps equal rewards from dividing by zero."""


def normalise(rewards_E: np.ndarray) -> np.ndarray:
    """[E] float64 → [E]: (reward - mean) / (standard deviation + EPSILON) over the episodes of one group.

    The standard deviation divides by E - 1. Equal rewards give zeros. GRPO, arXiv 2402.03300, equation 3.
    """
    assert len(rewards_E) >= 2, "a group needs two or more scored episodes to compare them"
    return (rewards_E - rewards_E.mean()) / (rewards_E.std(ddof=1) + EPSILON)


def group_advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """[sequences] float32: the advantage of each sequence's episode within its group.

    Statistics are over episodes: one with several sequences counts once and gives each of them its advantage.
    """
    rewards: dict[str, dict[str, float]] = {}
    for sequence in sequences:
        rewards.setdefault(sequence.group_id, {})[sequence.episode_id] = sequence.reward
    advantages: dict[str, float] = {}
    for of_episode in rewards.values():
        values = normalise(np.array(list(of_episode.values()), np.float64))
        advantages.update(zip(of_episode, values.tolist(), strict=True))
    return np.array([advantages[sequence.episode_id] for sequence in sequences], np.float32)
