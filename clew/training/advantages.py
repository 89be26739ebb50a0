"""Advantages of sequences: how much better an episode was than others. NumPy only: replay needs no torch for it.

Statistics are over episodes: one of several sequences counts once. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace

import numpy as np

from clew.algorithms import ADVANTAGES
from clew.config import Algorithm
from clew.errors import TrainingError
from clew.record.rows import Sequence
from clew.training.custom import CustomAdvantages
from clew.training.metrics import divergences

EPSILON = 1e-6
"""Added to a group's standard deviation; it keeps equal rewards from dividing by zero."""

Rewards = SequenceABC[SequenceABC[float]]
"""Of each episode, the rewards of its sequences."""

Compute = Callable[[SequenceABC[Sequence], SequenceABC[np.ndarray] | None], Iterable[np.ndarray]]
"""(sequences of a step, [T] reference logprobs of each or None) -> of each a number or [T], float32."""


def normalise(rewards_E: np.ndarray) -> np.ndarray:
    """[E] float64 → [E]: (reward - mean) / (standard deviation + EPSILON) over the episodes of one group.

    The standard deviation divides by E - 1. Equal rewards give zero but for rounding: about 1e-10. GRPO, arXiv
    2402.03300, equation 3.
    """
    return normalise_sequences([[reward] for reward in rewards_E.tolist()])


def normalise_sequences(rewards_ES: Rewards) -> np.ndarray:
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


def centre(rewards_ES: Rewards) -> np.ndarray:
    """[sequences]: reward - mean over the episodes. Dr. GRPO, arXiv 2503.20783."""
    mean = np.mean([np.mean(rewards_S) for rewards_S in rewards_ES])
    return np.concatenate(rewards_ES) - mean


def leave_one_out(rewards_ES: Rewards) -> np.ndarray:
    """[sequences]: reward - mean over the other episodes. RLOO, arXiv 2402.14740."""
    means_E = np.array([np.mean(rewards_S) for rewards_S in rewards_ES])
    others_E = (means_E.sum() - means_E) / (len(rewards_ES) - 1)
    return np.concatenate([np.array(rewards_S) - other for rewards_S, other in zip(rewards_ES, others_E, strict=True)])


METHODS: dict[str, Callable[[Rewards], np.ndarray]] = {
    "group": normalise_sequences,
    "batch": normalise_sequences,
    "mean": centre,
    "leave_one_out": leave_one_out,
    "none": lambda rewards_ES: np.concatenate(rewards_ES),
}
"""What algorithm.advantages names: from the rewards of one group (batch: of all groups together)."""


def group_advantages(sequences: SequenceABC[Sequence], method: str = "group") -> np.ndarray:
    """[sequences] float32: the advantage of each sequence within its group, or the batch.

    Statistics are over episodes: an episode with several sequences counts once. Raises TrainingError when there is
    nothing to compare an episode with.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for place, sequence in enumerate(sequences):
        group = "the batch" if method == "batch" else sequence.group_id
        groups.setdefault(group, {}).setdefault(sequence.episode_id, []).append(place)
    advantages = np.empty(len(sequences), np.float32)
    for group, episodes in groups.items():
        if len(episodes) < 2 and method != "none":
            raise TrainingError(
                f"{group} has one scored episode, {next(iter(episodes))}: algorithm.advantages={method} compares "
                f"episodes and needs two or more. Use a larger rollout.n_samples, or algorithm.advantages=none."
            )
        places = [place for episode in episodes.values() for place in episode]
        advantages[places] = METHODS[method](
            [[sequences[place].reward for place in episode] for episode in episodes.values()]
        )
    return advantages


def sequence_advantages_function(algorithm: Algorithm) -> Compute:
    """What algorithm.advantages names, but for gae, after what the options take off the reward.

    Raises ConfigError where a dotted path names no function that can be called so.
    """
    method = algorithm.advantages
    custom = None if method in ADVANTAGES else CustomAdvantages(method)

    def compute(sequences: SequenceABC[Sequence], reference: SequenceABC[np.ndarray] | None) -> Iterable[np.ndarray]:
        shaped = shaped_rewards(sequences, algorithm, reference)
        return group_advantages(shaped, method) if custom is None else custom(shaped)

    return compute


# What is taken off a reward ------------------------------------------------------------------------------------------


def shaped_rewards(
    sequences: SequenceABC[Sequence], algorithm: Algorithm, reference: SequenceABC[np.ndarray] | None
) -> SequenceABC[Sequence]:
    """The sequences with the rewards that are trained on: less a KL divergence, less what is overlong.

    reference: [T] logprobs of the model that the run began with, of each sequence.
    """
    sequences = without_overlong(sequences, algorithm)
    if algorithm.kl_in == "reward" and algorithm.kl_coef > 0:
        assert reference is not None, "a KL divergence needs the reference's logprobs"
        summed = [
            float(divergences(each.logprobs[each.loss_mask], logprobs_T[each.loss_mask], algorithm.kl_estimator).sum())
            for each, logprobs_T in zip(sequences, reference, strict=True)
        ]
        sequences = [
            replace(each, reward=each.reward - algorithm.kl_coef * kl)
            for each, kl in zip(sequences, summed, strict=True)
        ]
    return sequences


def without_overlong(sequences: SequenceABC[Sequence], algorithm: Algorithm) -> SequenceABC[Sequence]:
    """The sequences with their rewards less algorithm.overlong_penalty."""
    cache = algorithm.overlong_penalty
    if cache is None:
        return sequences
    return [replace(each, reward=each.reward - overlong(each, cache)) for each in sequences]


def overlong(sequence: Sequence, cache: int) -> float:
    """0 to 1, of the longest response: 0 up to `cache` tokens before its limit, then rising to 1 at the limit.

    DAPO, arXiv 2503.14476, equation 13 (there with a minus). A response is one interaction, its limit the
    max_new_tokens that it was sampled with. Raises TrainingError when the record does not say that.
    """
    found = []
    for interaction in sequence.interactions:
        length, limit = interaction.get("output_tokens"), interaction.get("sampling", {}).get("max_new_tokens")
        if length is None or limit is None:
            raise TrainingError(
                f"algorithm.overlong_penalty needs each response's length and limit, and the record of {sequence.id} "
                f"has no output_tokens or no max_new_tokens for an interaction: another trainer wrote it. Unset it."
            )
        found.append(min(1.0, max(0.0, (length - (limit - cache)) / cache)))
    if not found and sequence.loss_mask.any():
        raise TrainingError(
            f"algorithm.overlong_penalty needs each response's length and limit, and the record of {sequence.id} has "
            f"no interactions. Unset it."
        )
    return max(found, default=0.0)
