"""Dr. GRPO, "GRPO done right": arXiv 2503.20783.

GRPO without the two divisors that bias it. Dividing by the standard deviation of a group's rewards gives more weight to
questions that are too easy or too hard. Dividing by the length of a response punishes long wrong responses less.
Without them:

    J = 1/G sum_i 1/L sum_t min(r_t A_i, clip(r_t, 1 - eps, 1 + eps) A_i)        A_i = R_i - mean(R)
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.ppo import loss
from clew.algorithms.reward_statistics import centred, within_groups

if TYPE_CHECKING:
    from clew.record.rows import Sequence

__all__ = ["OPTIONS", "advantages", "loss"]

OPTIONS = {
    "advantages": "mean",
    "loss_mean": "constant",
    "loss_constant": lambda max_new_tokens: max_new_tokens,  # L is the generation budget, as in the paper
}


def advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return the advantage of each sequence of a step, R_i - mean(R) over its group: [sequences] float32.

    Raises:
        TrainingError: A group has only one episode, so its advantage would always be 0.
    """
    return within_groups(sequences, centred)
