"""Values of a step: what is prepared before its first update, and its results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clew.algorithms.losses import PolicyLoss
from clew.record.rows import Sequence
from clew.training.batching import Plan
from clew.training.scoring import Scores
from clew.training.sharded_digest import Digests
from clew.training.tokens import MicroBatch, Tokens

OnStage = Callable[[str, dict[str, Any]], None]
"""Function that is called with the name of a step's next stage (advantages, loss, backward, update) and its values."""

TokenLoss = Callable[[MicroBatch, Scores], PolicyLoss]
"""Function (micro-batch, its scores) -> loss of its N trained tokens, weighted as algorithm.loss_mean asks."""


@dataclass(kw_only=True)
class Updates:
    """Results of the updates of one model in one step."""

    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over the trained tokens; divided by the number of these tokens, they are metrics."""
    gradients: list[Digests] = field(default_factory=list)
    """Digests of each update's gradients, before clipping."""
    norms: list[float] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step."""

    metrics: dict[str, float]
    stages: dict[str, list[np.ndarray]]
    """Arrays by name, one per sequence (of all ranks), aligned with its tokens, and 0 for untrained tokens:

    - advantages
    - proximal_logprobs
    - logprobs: current, as the loss saw them
    - reference_logprobs: with a KL term
    - values, returns: with a critic
    - bootstrap_values: with algorithm.bootstrap_truncated, at the last trained token of each truncated episode
    - entropies: with an entropy bonus
    - rejected: why a token was rejected, if the algorithm can reject any, see `clew.algorithms.rejection`
    - loss: the token's contribution to the mean over all tokens, weighted as algorithm.loss_mean asks
    """
    plan: Plan
    digests: dict[str, Any]
    """Digests of gradients, one for each update, before clipping, and of weights after the step. See
    `clew.record.array_digest`."""
    tensor_digests: dict[str, Any]
    """Digests of each parameter's gradients and weights, in the order of `TrainEngine.parameter_names`, as
    `clew.record.batch_digest.to_hex` writes them."""
    timings: dict[str, float]
    """Seconds spent in advantages, logprobs, reference, critic, forward_backward, optimizer and digest."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step before its first update. Arrays are aligned with its S tokens."""

    batch: SequenceABC[Sequence]
    tokens: Tokens
    plan: Plan
    advantages_S: np.ndarray
    weights_S: np.ndarray | None
    """Factors of the losses, see `clew.training.batching.loss_weights`."""
    behaviour_S: np.ndarray
    proximal_S: np.ndarray | None
    """Logprobs at the start of the step; None with a single update, where the loss computes them anyway."""
    reference_S: np.ndarray | None
    values_S: np.ndarray | None
    """Values of the critic; None, like returns_S, without a critic."""
    bootstrap_S: np.ndarray | None
    """Values after the last trained token of each truncated episode; None without algorithm.bootstrap_truncated."""
    returns_S: np.ndarray | None
