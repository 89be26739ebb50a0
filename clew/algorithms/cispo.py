"""CISPO, clipped importance sampling policy optimization: MiniMax-M1, arXiv 2506.13585.

Equations 4 and 5: the clipped ratio is a constant (sg: stop gradient), so clipping takes no token's gradient away:

    J = 1/sum_i |o_i| sum_i sum_t sg(clip(r_t, 1 - eps_low, 1 + eps_high)) A_i log pi(o_i,t)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.algorithms.grpo import advantages
from clew.algorithms.losses import PolicyLoss, TrainedTokens, decoupled, ratios

if TYPE_CHECKING:
    from clew.config import Algorithm

__all__ = ["OPTIONS", "advantages", "loss"]

OPTIONS = {
    "advantages": "group",
    "loss": "cispo",
    "loss_mean": "token",
    "clip_low": 1.0,  # no lower bound, as in the paper's experiments
    "clip_high": 4.0,  # the paper does not give its upper bound; this is ScaleRL's, arXiv 2510.13786
}


def loss(tokens: TrainedTokens, options: Algorithm) -> PolicyLoss:
    """Return the negative of equation 4, with the terms of `decoupled`. Only its gradient is meaningful."""
    ratio_N = ratios(tokens, options)
    clipped_N = ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
    objective_N = clipped_N.detach() * tokens.advantages_N * tokens.logprobs_N
    held_N = (clipped_N != ratio_N) & (tokens.advantages_N != 0)
    return decoupled(objective_N, held_N, tokens, options)
