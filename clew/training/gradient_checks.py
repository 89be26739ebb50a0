"""Checks that keep bad numbers out of the weights: NaN, infinity, and gradients that spike."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from clew.algorithms import LOSSES
from clew.training.optimizer import Optimizer
from clew.training.ranks import Ranks
from clew.training.sharding import slice_of
from clew.training.tokens import Tokens

RECENT_NORMS = 32
"""Number of recent updates whose gradient norms define a spike."""
ENOUGH_NORMS = 8
"""Minimum number of updates before spike detection starts."""
NO_GRADIENT = 1e-7
"""Largest norm of a gradient that is only rounding."""
TOO_FAST = "Perhaps training.lr is too high."
NOT_YET = "No update was made yet, so the model or the loss itself overflows on these tokens."


def loss_problem(
    tokens: Tokens, where_N: np.ndarray, *, loss_S: np.ndarray, logprobs_S: np.ndarray, loss: str, hint: str
) -> str | None:
    """Return what is wrong with the losses of a micro-batch; None if they are finite.

    Args:
        where_N: Positions of the micro-batch's trained tokens in the arrays [S].
        loss: Value of algorithm.loss.
        hint: Advice when the model itself produced NaN or infinity, see `hint_of`.
    """
    bad_N = ~np.isfinite(loss_S[where_N])
    if not bad_N.any():
        return None
    bad = where_N[bad_N]
    by_model = bad[~np.isfinite(logprobs_S[bad])]  # it may have spread from there to the sequence's other tokens
    where = int((by_model if len(by_model) else bad)[0])
    row, logprob = int(tokens.row_of_S[where]), logprobs_S[where]
    if not math.isfinite(logprob):
        cause = hint
    elif loss not in LOSSES:
        cause = f"algorithm.loss={loss} returned this loss."
    else:
        cause = "So its advantage, its behaviour logprob or a coefficient of the loss is not finite."
    return (
        f"the loss of token {where - tokens.starts[row]} of {tokens.ids[row]} is {loss_S[where]} (its logprob "
        f"is {logprob:.6g}); {int(bad_N.sum())} of the {len(bad_N)} losses of its micro-batch are not finite. {cause}"
    )


def norm_problem(
    norm: float, optimizer: Optimizer, recent_norms: deque[float], spike_factor: float | None, ranks: Ranks
) -> str | None:
    """Return why an update with a gradient of this norm is not made; None if nothing is wrong.

    Args:
        norm: Norm before clipping.
        recent_norms: Norms of the last updates that were made.
        spike_factor: Multiple of their median above which the norm is a spike; None: none is.
    """
    if not math.isfinite(norm):
        names = not_finite(optimizer.gradients().items(), ranks)
        where = names[0] if names else "the sum"
        return (
            f"the norm of the gradient is {norm}, first in {where}, although every loss is finite. {hint_of(optimizer)}"
        )
    # Where all rewards were equal, the gradient was only rounding. Beside it, any real gradient would be a spike.
    recent = [each for each in recent_norms if each > NO_GRADIENT]
    if spike_factor is None or len(recent) < ENOUGH_NORMS:
        return None
    median = statistics.median(recent)
    if norm <= spike_factor * median:
        return None
    return (
        f"the norm of the gradient is {norm:.4g}, over training.spike_factor={spike_factor:g} times the median of the "
        f"last {len(recent)} updates, {median:.4g}. {TOO_FAST}"
    )


def hint_of(optimizer: Optimizer) -> str:
    """Return the hint shown when the model itself produced NaN or infinity."""
    return TOO_FAST if optimizer.updates else NOT_YET


def not_finite(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> list[str]:
    """Return the names of the tensors that have NaN or infinity on any rank."""
    slices = {name: slice_of(tensor.detach(), ranks) for name, tensor in named}
    good = [None if part is None else part[0].isfinite().all() for part in slices.values()]  # does not wait for a GPU
    counts = ranks.add_up(np.array([each is not None and not each.item() for each in good], np.int64))
    return [name for name, count in zip(slices, counts, strict=True) if count]
