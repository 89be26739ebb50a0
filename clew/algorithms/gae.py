"""Generalized advantage estimation, arXiv 1506.02438."""

from __future__ import annotations

import numpy as np

from clew.algorithms.reward_statistics import EPSILON


def gae(rewards_N: np.ndarray, values_N: np.ndarray, *, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages and the returns of one sequence's N actions: two arrays, [N] float64.

    The value after the last action counts as 0.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1}   (equation 16)

    The return is R_t = A_t + V_t. With lam = 1, R_t is the sum of the discounted rewards from t on; with lam = 0, R_t
    is r_t + gamma V_{t+1}.

    Args:
        rewards_N: Reward of each action.
        values_N: Value of the state before each action.
        gamma: Discount per action.
        lam: Decay of later deltas, from 0 to 1; the paper's lambda.
    """
    # The loop computes with Python floats: arithmetic on NumPy scalars takes several times as long.
    values, advantages = values_N.astype(np.float64).tolist(), np.zeros(len(values_N))
    after = after_value = 0.0
    for t in reversed(range(len(values))):
        after = float(rewards_N[t]) + gamma * after_value - values[t] + gamma * lam * after
        advantages[t], after_value = after, values[t]
    return advantages, advantages + values


def whitened(advantages_N: np.ndarray) -> np.ndarray:
    """Return (A - mean) / (standard deviation + EPSILON) over the tokens of a step; the deviation divides by N - 1.

    verl whitens advantages, too; the papers do not.
    """
    centred_N = advantages_N - advantages_N.mean() if len(advantages_N) else advantages_N
    return centred_N / (np.sqrt((centred_N**2).sum() / max(1, len(centred_N) - 1)) + EPSILON)
