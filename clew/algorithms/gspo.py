"""GSPO, group sequence policy optimization: arXiv 2507.18071.

Equation 5 is PPO's minimum with one ratio for the whole sequence (equation 7) instead of one for each token:

    J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)
    s_i = exp( 1/|y_i| sum_t log(pi(y_i,t) / pi_old(y_i,t)) )

The gradient flows through this mean, equally to all tokens of a sequence.
Advantages are GRPO's (equation 6).
"""

from __future__ import annotations

from clew.algorithms.grpo import advantages
from clew.algorithms.ppo import loss

__all__ = ["OPTIONS", "advantages", "loss"]

OPTIONS = {
    "advantages": "group",
    "ratio": "sequence",  # s_i: `clew.algorithms.losses.ratios`
    # The weight that corrects for lag is also one per sequence. With one weight per token, a
    # sequence in which one token has become unlikely would still count almost fully.
    "importance": "sequence_truncate",
    "loss_mean": "sequence",  # 1/G sum_i: within a sequence all tokens have the same loss
    "clip_low": 3e-4,  # section 5.1: s_i is a mean, and therefore much nearer to 1 than a token's ratio
    "clip_high": 4e-4,
}
