"""Advantages of tokens, by the method that algorithm.advantages names: one of clew/algorithms, or a user's function.

NumPy only: replay needs no torch to compute advantages. docs/algorithms.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from clew.algorithms import ADVANTAGES, WITH_CRITIC, built_in_advantages
from clew.algorithms.dapo import overlong
from clew.algorithms.kl import divergences
from clew.config import Algorithm
from clew.errors import TrainingError
from clew.record.rows import Sequence
from clew.training.custom import CustomAdvantages


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Advantages and returns of a step: one array per sequence, aligned with its tokens, and 0 for untrained tokens.

    Arrays are float32; with a critic, they have the dtype of its values.
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None
    """Targets to which the critic's values are fitted; None without a critic."""


Arrays = SequenceABC[np.ndarray] | None
"""Logprobs of the reference model or values of the critic, [T] for each sequence; None where there is no such model."""

Compute = Callable[..., TokenAdvantages]
"""Function (sequences of a step, reference logprobs, values, bootstrap values) -> advantages. The last is None without
algorithm.bootstrap_truncated, and may be left out."""


def advantages_function(algorithm: Algorithm) -> Compute:
    """Return the function that computes each token's advantage as algorithm.advantages says.

    That function first subtracts the overlong penalty and the KL term from the reward, if they are set.

    Raises:
        ConfigError: A dotted path names no function that can be called this way.
    """
    name = algorithm.advantages
    compute: Any  # (sequences) -> advantages; or with a critic: (rewards, values, algorithm) -> advantages and returns
    if name in ADVANTAGES:
        takes_values, compute = name in WITH_CRITIC, built_in_advantages(name)
    else:
        own = CustomAdvantages(name)
        takes_values, compute = own.takes_values, own.of_values if own.takes_values else own

    return partial(_with_critic if takes_values else _without_critic, compute, algorithm)


def _without_critic(
    compute: Callable[..., Any], algorithm: Algorithm, sequences: SequenceABC[Sequence], reference: Arrays, *_: Arrays
) -> TokenAdvantages:
    of_rows = compute(shaped_rewards(sequences, algorithm, reference))
    aligned = [np.where(row.loss_mask, of_row, np.float32(0)) for row, of_row in zip(sequences, of_rows, strict=True)]
    return TokenAdvantages(advantages=aligned, returns=None)


def _with_critic(
    compute: Callable[..., Any],
    algorithm: Algorithm,
    sequences: SequenceABC[Sequence],
    reference: Arrays,
    values: Arrays,
    bootstrap: Arrays = None,
) -> TokenAdvantages:
    assert values is not None, f"algorithm.advantages={algorithm.advantages} needs a critic's values"
    rewards = [
        token_rewards(row, algorithm, None if reference is None else reference[place])
        for place, row in enumerate(subtract_overlong_penalty(sequences, algorithm))
    ]
    if algorithm.bootstrap_truncated:
        assert bootstrap is not None, "algorithm.bootstrap_truncated needs the values of last states"
        # delta_t = r_t + gamma V_{t+1} - V_t: for the last token, gamma V of the state after it joins the reward.
        rewards = [
            rewards_N + algorithm.gamma * bootstrap_T[row.loss_mask].astype(np.float64)
            for row, rewards_N, bootstrap_T in zip(sequences, rewards, bootstrap, strict=True)
        ]
    own = [values_T[row.loss_mask] for row, values_T in zip(sequences, values, strict=True)]
    dtype = values[0].dtype
    advantages, returns = (
        [_aligned(*each, dtype) for each in zip(sequences, numbers, strict=True)]
        for numbers in compute(rewards, own, algorithm)
    )
    return TokenAdvantages(advantages=advantages, returns=returns)


def _aligned(sequence: Sequence, numbers_N: np.ndarray, dtype: np.dtype) -> np.ndarray:
    aligned_T = np.zeros(len(sequence.loss_mask), dtype)
    aligned_T[sequence.loss_mask] = numbers_N
    return aligned_T


# What is taken off a reward ------------------------------------------------------------------------------------------


def shaped_rewards(sequences: SequenceABC[Sequence], algorithm: Algorithm, reference: Arrays) -> SequenceABC[Sequence]:
    """Return the sequences with the overlong penalty and the KL term subtracted from their rewards, if they are set.

    With algorithm.kl_in=reward, the KL term is kl_coef times the sequence's KL divergence from the reference model.
    """
    sequences = subtract_overlong_penalty(sequences, algorithm)
    if algorithm.kl_in != "reward" or algorithm.kl_coef <= 0:
        return sequences
    assert reference is not None, "a KL divergence needs the reference's logprobs"
    shaped = []
    for row, logprobs_T in zip(sequences, reference, strict=True):
        kl_N = divergences(row.logprobs[row.loss_mask], logprobs_T[row.loss_mask], algorithm.kl_estimator)
        shaped.append(replace(row, reward=row.reward - algorithm.kl_coef * float(kl_N.sum())))
    return shaped


def subtract_overlong_penalty(sequences: SequenceABC[Sequence], algorithm: Algorithm) -> SequenceABC[Sequence]:
    """Return the sequences with algorithm.overlong_penalty subtracted from their rewards."""
    buffer = algorithm.overlong_penalty
    if buffer is None:
        return sequences
    return [replace(each, reward=each.reward - largest_penalty(each, buffer)) for each in sequences]


def largest_penalty(sequence: Sequence, buffer: int) -> float:
    """Return the largest overlong penalty of the sequence's responses, from 0 to 1: see `clew.algorithms.dapo`.

    A response is one interaction, its limit the max_new_tokens that it was sampled with, and `buffer` DAPO's L_cache.

    Raises:
        TrainingError: The record does not have a response's length and limit.
    """
    found, missing = [], ""
    for interaction in sequence.interactions:
        length, limit = interaction.get("output_tokens"), interaction.get("sampling", {}).get("max_new_tokens")
        if length is None or limit is None:
            missing = "no output_tokens or no max_new_tokens for an interaction: another trainer wrote it"
        else:
            found.append(overlong(length, limit, buffer))
    if not sequence.interactions and sequence.loss_mask.any():
        missing = "no interactions"
    if missing:
        raise TrainingError(
            f"algorithm.overlong_penalty needs each response's length and limit, and the record of {sequence.id} has "
            f"{missing}. Unset algorithm.overlong_penalty."
        )
    return max(found, default=0.0)


def truncated(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return which sequences end where their episode was cut off at a limit: [sequences] bool.

    A cut-off sequence that ends before the last turn of its episode does not count: its reward is the outcome of the
    sequences after it.
    """
    turns = [int(row.turn_ids.max(initial=-1)) for row in sequences]
    last: dict[str, int] = {}
    for row, turn in zip(sequences, turns, strict=True):
        last[row.episode_id] = max(turn, last.get(row.episode_id, -1))
    ends = [turn == last[row.episode_id] for row, turn in zip(sequences, turns, strict=True)]
    return np.array([row.finish_reason == "length" and end for row, end in zip(sequences, ends, strict=True)])


def token_rewards(sequence: Sequence, algorithm: Algorithm, reference_T: np.ndarray | None) -> np.ndarray:
    """Return the reward of each trained token, [N] float64.

    A reward that the agent gave to a turn goes to the turn's last token. The rest of the sequence's reward goes to its
    last trained token. If the context was rewritten and other sequences follow, this rest is the outcome of those
    sequences. With a KL term in the reward, each token's share of it is subtracted (arXiv 2203.02155).
    """
    mask_T = sequence.loss_mask
    rewards_N, turns_N = np.zeros(int(mask_T.sum())), sequence.turn_ids[mask_T]
    if not len(rewards_N):
        return rewards_N
    rest = sequence.reward
    for interaction in sequence.interactions:
        own, at = interaction.get("reward"), np.flatnonzero(turns_N == interaction.get("turn"))
        if own is not None and len(at):
            rewards_N[at[-1]] += own
            rest -= own
    rewards_N[-1] += rest
    if algorithm.kl_in == "reward" and algorithm.kl_coef > 0:
        assert reference_T is not None, "a KL divergence needs the reference's logprobs"
        rewards_N -= algorithm.kl_coef * divergences(
            sequence.logprobs[mask_T], reference_T[mask_T], algorithm.kl_estimator
        )
    return rewards_N
