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
    return normalise_sequences([[reward] for reward in rewards_E.tolist()])


def normalise_sequences(rewards_ES: SequenceABC[SequenceABC[float]]) -> np.ndarray:
    """The same for episodes of several sequences, each with a reward of its own: [sequences], episode by episode.

    Mean and variance are over episodes: one of several sequences counts once, as the mean over its sequences.
    """
    assert len(rewards_ES) >= 2, "a group needs two or more scored episodes to compare them"
    mean = np.mean([np.mean(rewards_S) for rewards_S in rewards_ES])
    squares_E = np.array([np.mean((np.array(rewards_S) - mean) ** 2) for rewards_S in rewards_ES])
    deviation = np.sqrt(np.add.reduce(squares_E) / (len(rewards_ES) - 1))
    return (np.concatenate([np.array(rewards_S, np.float64) for rewards_S in rewards_ES]) - mean) / (
        deviation + EPSILON
    )


def group_advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """[sequences] float32: the advantage of each sequence within its group.

    Statistics are over episodes: an episode with several sequences counts once.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for place, sequence in enumerate(sequences):
        groups.setdefault(sequence.group_id, {}).setdefault(sequence.episode_id, []).append(place)
    advantages = np.empty(len(sequences), np.float32)
    for episodes in groups.values():
        places = [place for episode in episodes.values() for place in episode]
        advantages[places] = normalise_sequences(
            [[sequences[place].reward for place in episode] for episode in episodes.values()]
        )
    return advantages
