"""PPO, proximal policy optimization: arXiv 1707.06347, with the rewards of InstructGPT, arXiv 2203.02155.

Advantages are those of GAE, arXiv 1506.02438: a state is the tokens so far, an action the next token. Only trained
tokens are actions. Text of the environment between two turns is part of the next state, and is not a time step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.gae import gae, whitened
from clew.algorithms.losses import PolicyLoss, TrainedTokens, decoupled, ratios

if TYPE_CHECKING:
    from clew.config import Algorithm

OPTIONS = {
    "advantages": "gae",
    "gamma": 1.0,  # InstructGPT does not discount
    "gae_lambda": 0.95,
    "clip_low": 0.2,  # the best of three values in section 6.1
    "clip_high": 0.2,
    "value_clip": 0.2,  # PPO's code, arXiv 2005.12729
    "loss_mean": "token",
    "kl_in": "reward",  # on each token: InstructGPT, equation 2
    "kl_estimator": "k1",
    "kl_coef": 0.02,  # InstructGPT's
}


def loss(tokens: TrainedTokens, options: Algorithm) -> PolicyLoss:
    """Return the loss -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), equation 7, plus the terms of `decoupled`.

    w is the importance weight, a constant. With dual_clip, dual_clip x A bounds the minimum from below where A < 0.
    """
    ratio_N, advantages_N = ratios(tokens, options), tokens.advantages_N
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages_N
    objective_N, held_N = plain_N.minimum(clipped_N), clipped_N < plain_N
    if options.dual_clip is not None:  # where A < 0, at least dual_clip x A: arXiv 1912.09729
        least_N, negative_N = options.dual_clip * advantages_N, advantages_N < 0
        held_N = held_N | (negative_N & (objective_N < least_N))
        objective_N = objective_N.maximum(least_N).where(negative_N, objective_N)
    return decoupled(objective_N, held_N, tokens, options)


def advantages(
    rewards: SequenceABC[np.ndarray], values: SequenceABC[np.ndarray], options: Algorithm
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the advantages, whitened over the step, and the returns: [N] float64 for each sequence's trained tokens.

    The critic is fitted to the returns, see `clew.algorithms.value_loss.value_loss`.

    Args:
        rewards: Reward of each trained token, [N] for each sequence.
        values: The critic's value of the state before each of these tokens, [N] for each sequence, computed before the
            step's first update.
    """
    results = [gae(*pair, gamma=options.gamma, lam=options.gae_lambda) for pair in zip(rewards, values, strict=True)]
    ends = np.cumsum([len(advantages_N) for advantages_N, _ in results])[:-1]
    whitened_N = whitened(np.concatenate([advantages_N for advantages_N, _ in results]))
    return np.split(whitened_N, ends), [returns_N for _, returns_N in results]
