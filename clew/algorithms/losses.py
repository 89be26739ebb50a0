"""Functions of tokens that the algorithms' losses share: ratios, weights, and the terms that any loss may have.

Tensors have one entry per trained token, [N], and hold natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clew.algorithms.kl import ESTIMATORS, LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

    from clew.config import Algorithm


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """The N trained tokens of a micro-batch, as a loss sees them."""

    logprobs_N: Tensor
    """Current logprobs. Only these and, with an entropy bonus, entropies_N carry a gradient."""
    proximal_N: Tensor
    """Logprobs at the start of the step."""
    behaviour_N: Tensor
    """Logprobs under the weights that sampled the token."""
    advantages_N: Tensor
    reference_N: Tensor | None = None
    """Logprobs under the model that the run began with; None without a KL term."""
    entropies_N: Tensor | None = None
    """Exact entropy of the distribution that the token was drawn from; None without an entropy bonus."""
    rows_N: Tensor | None = None
    """Sequence that each token belongs to, counted from 0, int64. Options of whole sequences need it."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Loss of each token, and sums for metrics."""

    per_token_N: Tensor
    """Loss of each token, float32, which carries the gradient.

    The loss of a mini-batch is its mean over all tokens, each weighted as algorithm.loss_mean asks.
    """
    sums: dict[str, Tensor]
    """Sums over the N tokens; divided by the number of tokens, they are metrics."""
    rejected_N: Tensor | None = None
    """Reason for which each token was rejected, see `clew.algorithms.rejection.rejections`; None without rejection."""


def ratios(tokens: TrainedTokens, options: Algorithm) -> Tensor:
    """Return current / proximal probability, which the clip bounds: how far this step has moved the policy.

    `ratio=token`: each token's own (PPO). `ratio=sequence`: the geometric mean over its sequence (GSPO, arXiv
    2507.18071, equation 7).
    """
    log_ratio_N = tokens.logprobs_N - tokens.proximal_N
    return exp_limited(log_ratio_N if options.ratio == "token" else sequence_means(log_ratio_N, tokens.rows_N))


def importance_weights(tokens: TrainedTokens, options: Algorithm) -> Tensor:
    """Return proximal over behaviour probability of each token, or of its whole sequence (the product over its tokens).

    It tells how much likelier the token was when the step began than when it was sampled. It is truncated to
    importance_cap (TIS), or set to 0 outside [1/cap, cap] (IcePop, arXiv 2510.18855; MIS). Without lag, only
    the mismatch between trainer and engine keeps it from being 1.
    """
    level, _, kind = options.importance.partition("_")
    log_weight_N, cap = tokens.proximal_N - tokens.behaviour_N, options.importance_cap
    weight_N = exp_limited(log_weight_N if level == "token" else sequence_sums(log_weight_N, tokens.rows_N))
    if kind == "truncate":
        return weight_N.clamp(max=cap)
    return weight_N.masked_fill((weight_N < 1 / cap) | (weight_N > cap), 0.0)


def decoupled(objective_N: Tensor, held_N: Tensor, tokens: TrainedTokens, options: Algorithm) -> PolicyLoss:
    """Return the loss: -weight x objective + kl_coef x KL(current, reference) - entropy_coef x entropy.

    The weight is a constant. It makes this the decoupled objective of AReaL (arXiv 2505.24298, equation 5). With
    kl_times_ratio the KL is multiplied by the ratio, whose gradient counts (DeepSeek-V3.2, arXiv 2512.02556, section
    3.1). The entropy bonus is that of arXiv 1707.06347, equation 9.

    Args:
        objective_N: Objective that the algorithm maximizes, without these terms.
        held_N: True for tokens that a clip bounds. Their share is the metric clip_share.
    """
    weight_N = importance_weights(tokens, options)
    masked = options.importance.endswith("mask")
    sums = {
        "clip_share": held_N.sum(),
        "importance_weight": weight_N.detach().sum(),
        "importance_capped_share": (weight_N == 0 if masked else weight_N >= options.importance_cap).sum(),
    }
    loss_N = -weight_N * objective_N
    if tokens.reference_N is not None:
        kl_N = ESTIMATORS[options.kl_estimator](tokens.logprobs_N, tokens.reference_N)
        if coefficient := loss_kl_coef(options):
            loss_N = loss_N + coefficient * (kl_N * ratios(tokens, options) if options.kl_times_ratio else kl_N)
        sums["kl"] = kl_N.detach().sum()
    if tokens.entropies_N is not None and options.entropy_coef:
        loss_N = loss_N - options.entropy_coef * tokens.entropies_N
    return PolicyLoss(per_token_N=loss_N, sums=sums)


def loss_kl_coef(options: Algorithm) -> float:
    """Return the coefficient of the KL term in the loss: 0 when the divergence is in the reward."""
    return options.kl_coef if options.kl_in == "loss" else 0.0


def exp_limited(log_ratio_N: Tensor) -> Tensor:
    """Return exp of the logarithm of a ratio, limited to LOG_RATIO_LIMIT; a limited ratio has no gradient.

    float32 overflows above 88.7, and infinity times an advantage of 0 is NaN. A smaller logarithm is unchanged, bit for
    bit.
    """
    return log_ratio_N.clamp(max=LOG_RATIO_LIMIT).exp()


def sequence_sums(values_N: Tensor, rows_N: Tensor | None) -> Tensor:
    """Return for each token the sum over the tokens of its sequence: [N].

    Args:
        rows_N: Sequence of each token, counted from 0, int64.
    """
    assert rows_N is not None, "an option of whole sequences needs rows_N"
    count = int(rows_N.max()) + 1 if len(rows_N) else 0
    return values_N.new_zeros(count).index_add(0, rows_N, values_N).index_select(0, rows_N)


def sequence_means(values_N: Tensor, rows_N: Tensor | None) -> Tensor:
    """Return for each token the mean over the tokens of its sequence: [N]."""
    return sequence_sums(values_N, rows_N) / sequence_sums(values_N.new_ones(values_N.shape), rows_N)


def sequence_maxima(values_N: Tensor, rows_N: Tensor | None) -> Tensor:
    """Return for each token the largest value of its sequence: [N]."""
    assert rows_N is not None, "an option of whole sequences needs rows_N"
    count = int(rows_N.max()) + 1 if len(rows_N) else 0
    lowest = values_N.new_full((count,), -float("inf"))
    return lowest.scatter_reduce(0, rows_N, values_N, "amax").index_select(0, rows_N)
