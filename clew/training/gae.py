"""Advantages of tokens: those of their sequences, or from a critic's values. NumPy only.

In generalized advantage estimation (arXiv 1506.02438) a state is the tokens so far, and an action is the next token.
Only trained tokens are actions: what the environment says between two turns belongs to the next state and takes no
time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np

from clew.config import Algorithm
from clew.record.rows import Sequence
from clew.training.advantages import EPSILON, sequence_advantages_function, without_overlong
from clew.training.metrics import divergences


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Advantages and returns of a step: one array per sequence, aligned with its tokens, and 0 for untrained tokens.

    Arrays are float32, or as wide as the critic.
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None
    """Targets to which the critic's values are fitted; None without a critic."""


Compute = Callable[
    [SequenceABC[Sequence], SequenceABC[np.ndarray] | None, SequenceABC[np.ndarray] | None], TokenAdvantages
]
"""Function (sequences of a step, reference logprobs [T] of each or None, values [T] of each or None) -> advantages."""


def advantages_function(algorithm: Algorithm) -> Compute:
    """Return the function that computes each token's advantage as algorithm.advantages says. It first applies the
    options that reduce the reward.

    Raises:
        ConfigError: A dotted path names no function that can be called this way.
    """
    of_sequences = None if algorithm.advantages == "gae" else sequence_advantages_function(algorithm)

    def compute(
        sequences: SequenceABC[Sequence],
        reference: SequenceABC[np.ndarray] | None,
        values: SequenceABC[np.ndarray] | None,
    ) -> TokenAdvantages:
        if of_sequences is None:
            assert values is not None, "generalized advantage estimation needs a critic's values"
            return token_advantages(sequences, values, reference, algorithm)
        found = zip(sequences, of_sequences(sequences, reference), strict=True)
        aligned = [np.where(row.loss_mask, of_row, np.float32(0)) for row, of_row in found]
        return TokenAdvantages(advantages=aligned, returns=None)

    return compute


def gae(rewards_N: np.ndarray, values_N: np.ndarray, *, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns of one sequence's N actions, [N] float64. The value after the last action is 0.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1}   (equation 16)

    R_t = A_t + V_t: with lam = 1 the discounted rewards from t on, with lam = 0 the estimate one step ahead.

    Args:
        values_N: Value of the state before each action.
    """
    values, advantages = values_N.astype(np.float64).tolist(), np.zeros(len(values_N))
    after = after_value = 0.0
    for t in reversed(range(len(values))):
        after = float(rewards_N[t]) + gamma * after_value - values[t] + gamma * lam * after
        advantages[t], after_value = after, values[t]
    return advantages, advantages + values


def token_rewards(sequence: Sequence, algorithm: Algorithm, reference_T: np.ndarray | None) -> np.ndarray:
    """Return the reward of each trained token, [N] float64.

    A reward that the agent gave to a turn goes to the turn's last token. The rest of the sequence's reward goes to its
    last trained token; if other sequences follow this one after its context was rewritten, the rest is what they came
    to. With a KL term in the reward, each token's share of it is subtracted (arXiv 2203.02155).
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


def whiten(advantages_N: np.ndarray) -> np.ndarray:
    """Return (A - mean) / (standard deviation + EPSILON) over the tokens of a step; the deviation divides by N - 1."""
    centred_N = advantages_N - advantages_N.mean() if len(advantages_N) else advantages_N
    return centred_N / (np.sqrt((centred_N**2).sum() / max(1, len(centred_N) - 1)) + EPSILON)


def token_advantages(
    sequences: SequenceABC[Sequence],
    values: SequenceABC[np.ndarray],
    reference: SequenceABC[np.ndarray] | None,
    algorithm: Algorithm,
) -> TokenAdvantages:
    """Return the returns of a step and its advantages, whitened over all trained tokens. The options that reduce
    rewards are applied first.

    Args:
        values: Values [T] of each sequence, by the critic at the beginning of the step.
        reference: Logprobs [T] of each sequence under the run's first model.
    """
    shaped = without_overlong(sequences, algorithm)
    found = [
        gae(
            token_rewards(sequence, algorithm, None if reference is None else reference[row]),
            values[row][sequence.loss_mask],
            gamma=algorithm.gamma,
            lam=algorithm.gae_lambda,
        )
        for row, sequence in enumerate(shaped)
    ]
    whitened = whiten(np.concatenate([advantages_N for advantages_N, _ in found]))
    ends = np.cumsum([len(advantages_N) for advantages_N, _ in found])[:-1]
    returns = [returns_N for _, returns_N in found]
    dtype = values[0].dtype
    return TokenAdvantages(
        advantages=[_aligned(*each, dtype) for each in zip(sequences, np.split(whitened, ends), strict=True)],
        returns=[_aligned(*each, dtype) for each in zip(sequences, returns, strict=True)],
    )


def _aligned(sequence: Sequence, numbers_N: np.ndarray, dtype: np.dtype) -> np.ndarray:
    aligned_T = np.zeros(len(sequence.loss_mask), dtype)
    aligned_T[sequence.loss_mask] = numbers_N
    return aligned_T
