"""Rejection: tokens and sequences that lie too far from the policy that sampled them add nothing to the loss.

It depends on the proximal and the behaviour logprobs alone, so it works beside any importance weight and any loss.
Tensors have one entry per trained token, [N]. docs/algorithms.md has the names that other systems have for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.algorithms.kl import k3
from clew.algorithms.losses import TrainedTokens, exp_limited, sequence_maxima, sequence_means

if TYPE_CHECKING:
    from torch import Tensor

    from clew.config import Algorithm
    from clew.sections import Reject

BY_REJECT, BY_VETO = 1, 2
"""Reasons why a token is rejected: its value lies outside the bounds of `reject`; its sequence is below `veto`. A token
with both reasons has their sum."""


def rejects(options: Algorithm) -> bool:
    """Return whether these options can reject anything."""
    return options.reject is not None or options.veto is not None


def rejections(tokens: TrainedTokens, options: Algorithm) -> Tensor:
    """Return why each token is rejected: 0 if it is kept, else BY_REJECT, BY_VETO or their sum; float32 [N].

    NaN lies within all bounds, so that it reaches the loss, where it is reported.
    """
    log_ratio_N = (tokens.proximal_N - tokens.behaviour_N).detach()
    why_N = log_ratio_N.new_zeros(len(log_ratio_N)).float()
    if options.reject is not None:
        values_N, low, high = measured(tokens, options.reject), options.reject.low, options.reject.high
        if low is not None:
            why_N = why_N.masked_fill(values_N < low, BY_REJECT)
        if high is not None:
            why_N = why_N.masked_fill(values_N > high, BY_REJECT)
    if options.veto is not None:
        least_N = exp_limited(-sequence_maxima(-log_ratio_N, tokens.rows_N))
        why_N = why_N + BY_VETO * (least_N < options.veto)
    return why_N


def measured(tokens: TrainedTokens, reject: Reject) -> Tensor:
    """Return the value of each token that the bounds apply to; tokens of a sequence share one, unless over=token.

    The mean of ratios is the geometric one, exp(mean of log w), as it does not shrink or grow with the length.
    """
    by_ratio = reject.by == "ratio"
    values_N = tokens.proximal_N - tokens.behaviour_N if by_ratio else k3(tokens.behaviour_N, tokens.proximal_N)
    if reject.over == "sequence_mean":
        values_N = sequence_means(values_N, tokens.rows_N)
    elif reject.over == "sequence_max":
        values_N = sequence_maxima(values_N, tokens.rows_N)
    return exp_limited(values_N) if by_ratio else values_N
