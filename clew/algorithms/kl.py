"""Estimates of KL(p || q) at a token, from a sample of p: Schulman, http://joschu.net/blog/kl-approx.html"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest logarithm of a ratio of probabilities that is exponentiated (a ratio of 4.9e8). verl has the same limit."""


def k1(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Return log(p/q) of each token.

    Its gradient is 0 on average over samples of p, so in a loss it would only add noise. It belongs in the reward.

    Args:
        logprobs_N: log p.
        other_N: log q.
    """
    return logprobs_N - other_N


def k2(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Return log(p/q)^2 / 2 of each token. It is biased, but its gradient on samples of p is unbiased."""
    return 0.5 * (logprobs_N - other_N) ** 2


def k3(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Return q/p - log(q/p) - 1 of each token: unbiased, never negative, zero where p = q.

    expm1 keeps what exp(x) - 1 would round away. Without it, in float32, the result would be noise of either sign if
    log p and log q differ by less than 1e-4. log(q/p) is limited to LOG_RATIO_LIMIT.
    """
    log_ratio_N = (other_N - logprobs_N).clamp(max=LOG_RATIO_LIMIT)
    return log_ratio_N.expm1() - log_ratio_N


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def divergences(logprobs_N: np.ndarray, other_N: np.ndarray, estimator: str) -> np.ndarray:
    """Return the k1, k2 or k3 estimates of NumPy arrays: [N] float64. Used where no gradient is needed."""
    log_ratio_N = logprobs_N.astype(np.float64) - other_N
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N**2 / 2
    inverse_N = np.minimum(-log_ratio_N, LOG_RATIO_LIMIT)
    return np.expm1(inverse_N) - inverse_N
