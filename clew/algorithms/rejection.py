"""Rejection: exclude tokens and sequences from the loss whose probability has moved too far since sampling.

It depends on logprobs and advantages alone, so it works beside any importance weight and any loss.
Tensors have one entry per trained token, [N]. docs/algorithms.md lists the names that other systems use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.kl import k3
from clew.algorithms.losses import TrainedTokens, exp_limited, sequence_maxima, sequence_means, sequence_sums

if TYPE_CHECKING:
    from torch import Tensor

    from clew.config import Algorithm
    from clew.config_fields import Reject

BY_REJECT, BY_VETO, BY_DELTA = 1, 2, 4
"""Reasons why a token is rejected: its value is outside the bounds of `reject`, a ratio in its sequence is below
`veto`, or its sequence is beyond `off_policy_delta`. Several reasons are added up."""

REASONS = {BY_REJECT: "reject", BY_VETO: "veto", BY_DELTA: "delta"}
"""Words for the reasons."""


def rejects(options: Algorithm) -> bool:
    """Return whether these options can reject anything."""
    return any(option is not None for option in (options.reject, options.veto, options.off_policy_delta))


def rejections(tokens: TrainedTokens, options: Algorithm) -> Tensor:
    """Return why each token is rejected: 0 if it is kept, else the sum of its reasons; float32 [N].

    `off_policy_delta` is the limit of DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556, section 3.1): tokens
    with a negative advantage are rejected in sequences whose mean of log(behaviour / current) is above this limit. NaN
    lies within all bounds, so that it reaches the loss, where it is reported.
    """
    log_ratio_N = (tokens.proximal_N - tokens.behaviour_N).detach()
    why_N = log_ratio_N.new_zeros(len(log_ratio_N)).float()
    if options.reject is not None:
        values_N, low, high = bounded_values(tokens, options.reject), options.reject.low, options.reject.high
        if low is not None:
            why_N = why_N.masked_fill(values_N < low, BY_REJECT)
        if high is not None:
            why_N = why_N.masked_fill(values_N > high, BY_REJECT)
    if options.veto is not None:
        least_N = exp_limited(-sequence_maxima(-log_ratio_N, tokens.rows_N))  # the smallest ratio of its sequence
        why_N = why_N + BY_VETO * (least_N < options.veto)
    if options.off_policy_delta is not None:
        away_N = sequence_means(tokens.behaviour_N - tokens.logprobs_N.detach(), tokens.rows_N)
        why_N = why_N + BY_DELTA * ((tokens.advantages_N < 0) & (away_N > options.off_policy_delta))
    return why_N


def reasons_of(why_N: np.ndarray) -> list[str]:
    """Return the words for every reason for which at least one of these tokens was rejected."""
    known = np.nan_to_num(why_N).astype(np.int64)  # another trainer may have recorded anything
    return [word for bit, word in REASONS.items() if (known & bit).any()]


def bounded_values(tokens: TrainedTokens, reject: Reject) -> Tensor:
    """Return the value that is compared with the bounds, for each token: [N].

    All tokens of a sequence have the same value, unless over=token. With by=ratio, sequence_mean is the geometric mean
    of the ratios w, exp(mean of log w), because it does not shrink or grow with the length.
    """
    by_ratio = reject.by == "ratio"
    values_N = tokens.proximal_N - tokens.behaviour_N if by_ratio else k3(tokens.behaviour_N, tokens.proximal_N)
    if reject.over == "sequence_mean":
        values_N = sequence_means(values_N, tokens.rows_N)
    elif reject.over == "sequence_product":
        values_N = sequence_sums(values_N, tokens.rows_N)
    elif reject.over == "sequence_max":
        values_N = sequence_maxima(values_N, tokens.rows_N)
    return exp_limited(values_N) if by_ratio else values_N
