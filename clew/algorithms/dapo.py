"""DAPO, decoupled clip and dynamic sampling policy optimization: arXiv 2503.14476.

Equation 8, with GRPO's advantages (equation 9):

    J = 1/sum_i |o_i| sum_i sum_t min(r_t A_i, clip(r_t, 1 - eps_low, 1 + eps_high) A_i)
"""

from __future__ import annotations

from clew.algorithms.grpo import advantages
from clew.algorithms.ppo import loss

__all__ = ["OPTIONS", "advantages", "loss", "overlong"]

OPTIONS = {
    "advantages": "group",
    "clip_low": 0.2,
    "clip_high": 0.28,  # "clip-higher", section 3.1: lets unlikely tokens gain more probability; values of section 4.1
    "loss_mean": "token",  # section 3.3: every token counts the same, however long its response
    "overlong_penalty": lambda max_new_tokens: max(1, max_new_tokens // 5),  # 4096 of 20480 in section 4.1
    "rollout.drop_equal_rewards": True,  # "dynamic sampling", section 3.2
}


def overlong(length: int, limit: int, buffer: int) -> float:
    """Return the overlong penalty of a response, from 0 to 1: the negative of equation 13.

    It is 0 up to a length of `limit - buffer`, rises linearly to 1 at `limit`, and stays 1 beyond.

    Args:
        length: Length of the response, in tokens.
        limit: Maximum length of the response, in tokens.
        buffer: Number of tokens before the limit over which the penalty rises, at least 1; the paper's L_cache.
    """
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))
