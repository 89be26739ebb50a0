"""GRPO, group relative policy optimization: DeepSeekMath, arXiv 2402.03300.

The loss is the negative of equation 3, with the divergence of equation 4 (k3):

    J = 1/G sum_i 1/|o_i| sum_t ( min(r_t A_i, clip(r_t, 1 - eps, 1 + eps) A_i) - beta D_KL )
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.ppo import loss  # the minimum in equation 3 is PPO's; `losses.decoupled` adds D_KL
from clew.algorithms.reward_statistics import EPSILON, Rewards, centred, deviation, within_groups

if TYPE_CHECKING:
    from clew.record.rows import Sequence

__all__ = ["OPTIONS", "advantages", "advantages_batch_std", "loss"]

OPTIONS = {
    "advantages": "group",
    "loss_mean": "sequence",  # 1/G sum_i 1/|o_i| sum_t
    # eps is clip_low and clip_high, whose defaults are in clew/config_fields.py
    "kl_coef": 0.04,  # beta in section 4.2. By default the divergence is a term of the loss, estimated by k3
}


def advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return each sequence's advantage relative to its group (section 4.1.2): [sequences] float32."""
    return within_groups(sequences, normalised)


def advantages_batch_std(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return (r_i - mean of the group) / (std of the batch + EPSILON) for each sequence of a step: [sequences] float32.

    The standard deviation is over the rewards of all E episodes of the step, with the divisor E - 1. Lite PPO (arXiv
    2508.08221) and TRL's scale_rewards="batch" do the same. A group whose answers are nearly all right or all wrong has
    a small deviation, so dividing by it makes its advantages large. The batch's deviation scales all groups alike.
    """

    def repeated(rewards_ES: Rewards) -> np.ndarray:
        return np.full(len(sequences), deviation(rewards_ES))

    return within_groups(sequences, centred) / (within_groups(sequences, repeated, batch=True) + np.float32(EPSILON))


def normalised(rewards_ES: Rewards) -> np.ndarray:
    """Return (r_i - mean(r)) / (std(r) + EPSILON) over the episodes of a group.

    The standard deviation has the divisor G - 1, as in TRL and verl; the paper does not say which it uses. Equal
    rewards give exactly 0: see `centred`.
    """
    return centred(rewards_ES) / (deviation(rewards_ES) + EPSILON)
