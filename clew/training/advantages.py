"""Advantages of sequences: how much better an episode was than others. NumPy only: replay needs no torch for it.

Statistics are over episodes: an episode of several sequences counts once. docs/algorithms.md has the formulas.
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
"""Constant added to a group's standard deviation, so that equal rewards do not cause a division by zero."""

Rewards = SequenceABC[SequenceABC[float]]
"""Rewards of the sequences of each episode: one inner list per episode."""

Compute = Callable[[SequenceABC[Sequence], SequenceABC[np.ndarray] | None], Iterable[np.ndarray]]
"""Function (sequences of a step, reference logprobs [T] of each or None) -> float32 advantage of each, a number or [T].
"""


def normalise(rewards_E: np.ndarray) -> np.ndarray:
    """Return (reward - mean) / (standard deviation + EPSILON) over the episodes of one group: [E] float64.

    The standard deviation divides by E - 1. Equal rewards give zero up to rounding, about 1e-10. GRPO, arXiv
    2402.03300, equation 3.
    """
    return normalise_sequences([[reward] for reward in rewards_E.tolist()])


def normalise_sequences(rewards_ES: Rewards) -> np.ndarray:
    """Return [sequences]: what `normalise` does, for episodes of several sequences with a reward each, in their order.

    Mean and variance are over episodes: an episode counts once, as the mean over its sequences.
    """
    assert len(rewards_ES) >= 2, "a group needs two or more scored episodes to compare them"
    mean = np.mean([np.mean(rewards_S) for rewards_S in rewards_ES])
    squares_E = np.array([np.mean((np.array(rewards_S) - mean) ** 2) for rewards_S in rewards_ES])
    deviation = np.sqrt(np.add.reduce(squares_E) / (len(rewards_ES) - 1))
    return (np.concatenate([np.array(rewards_S, np.float64) for rewards_S in rewards_ES]) - mean) / (
        deviation + EPSILON
    )


def centre(rewards_ES: Rewards) -> np.ndarray:
    """Return reward - mean over the episodes: [sequences]. Dr. GRPO, arXiv 2503.20783."""
    mean = np.mean([np.mean(rewards_S) for rewards_S in rewards_ES])
    return np.concatenate(rewards_ES) - mean


def leave_one_out(rewards_ES: Rewards) -> np.ndarray:
    """Return reward - mean over the other episodes: [sequences]. RLOO, arXiv 2402.14740."""
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
"""Function for each built-in value of algorithm.advantages except gae. It gets the rewards of one group, or for `batch`
those of all groups together."""


def group_advantages(sequences: SequenceABC[Sequence], method: str = "group") -> np.ndarray:
    """Return the advantage of each sequence within its group or the batch: [sequences] float32.

    Statistics are over episodes: an episode with several sequences counts once.

    Raises:
        TrainingError: An episode has no other episode to be compared with.
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
    """Return the function that algorithm.advantages names, except gae.

    Options that reduce the reward are applied first.

    Raises:
        ConfigError: A dotted path names no function that can be called this way.
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
    """Return the sequences with the rewards that are trained on: minus a KL divergence and minus the overlong penalty.

    Args:
        reference: Logprobs [T] of each sequence under the model that the run began with.
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
    """Return the sequences with algorithm.overlong_penalty subtracted from their rewards."""
    cache = algorithm.overlong_penalty
    if cache is None:
        return sequences
    return [replace(each, reward=each.reward - overlong(each, cache)) for each in sequences]


def overlong(sequence: Sequence, cache: int) -> float:
    """Return the penalty of the sequence's longest response, from 0 to 1.

    It is 0 up to `cache` tokens before the response's limit, then rises to 1 at the limit: DAPO, arXiv 2503.14476,
    equation 13, where the sign is negative. A response is one interaction, and its limit is the max_new_tokens that it
    was sampled with.

    Raises:
        TrainingError: The record does not have a response's length and limit.
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
