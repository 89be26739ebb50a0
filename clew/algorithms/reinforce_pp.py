"""REINFORCE++: arXiv 2501.03262, the variant without a baseline.

PPO's clipped objective without a critic. The divergence from the model that the run began with is subtracted from the
reward of a response, and the result is normalised over the whole batch instead of the group. The paper subtracts the
divergence at each token. Clew subtracts it once for the whole response, because all its tokens share one advantage. The
variant with a baseline is examples/my_algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.grpo import normalised
from clew.algorithms.ppo import loss
from clew.algorithms.reward_statistics import within_groups

if TYPE_CHECKING:
    from clew.record.rows import Sequence

__all__ = ["OPTIONS", "advantages", "loss"]

OPTIONS = {
    "advantages": "batch",
    "loss_mean": "token",
    "kl_in": "reward",
    "kl_estimator": "k1",
    "kl_coef": 0.01,  # only a starting point
}


def advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return (R_i - mean(R)) / (std(R) + EPSILON) over the step's episodes, for each sequence: [sequences] float32."""
    return within_groups(sequences, normalised, batch=True)
