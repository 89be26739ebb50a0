"""RLOO, REINFORCE leave-one-out: "Back to basics", arXiv 2402.14740.

    1/k sum_i ( R(y_i, x) - 1/(k - 1) sum_{j != i} R(y_j, x) ) grad log pi(y_i | x)

A whole response is one action. R is its reward minus beta log(pi / pi_ref). Clew also clips the ratio of each token,
which changes nothing if a step has one update.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import numpy as np

from clew.algorithms.ppo import loss
from clew.algorithms.reward_statistics import EPSILON, Rewards, centred, deviation, within_groups

if TYPE_CHECKING:
    from clew.record.rows import Sequence

__all__ = ["OPTIONS", "advantages", "advantages_std", "loss"]

OPTIONS = {
    "advantages": "leave_one_out",
    "loss_mean": "constant",  # with 1 below: log pi(y | x) is the sum over the tokens of a response
    "loss_constant": 1,
    "kl_in": "reward",
    "kl_estimator": "k1",  # log(pi / pi_ref)
    "kl_coef": 0.05,  # TRL's
}


def advantages(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return each sequence's advantage over the other episodes of its group: [sequences] float32."""
    return within_groups(sequences, leave_one_out)


def advantages_std(sequences: SequenceABC[Sequence]) -> np.ndarray:
    """Return the result of `advantages` divided by s + EPSILON, for each sequence of a step: [sequences] float32.

    s is the standard deviation of the rewards of all G episodes of the group, with the divisor G - 1. An episode counts
    in its own s, but not in its own baseline.
    """
    return within_groups(sequences, lambda rewards_ES: leave_one_out(rewards_ES) / (deviation(rewards_ES) + EPSILON))


def leave_one_out(rewards_ES: Rewards) -> np.ndarray:
    """Return for each sequence its reward minus the mean of the group's other episodes: [sequences] float64.

    If all rewards are equal, it is exactly 0: see `centred`.
    """
    if not (same := centred(rewards_ES)).any():
        return same
    means_E = np.array([np.mean(rewards_S) for rewards_S in rewards_ES])
    others_E = (means_E.sum() - means_E) / (len(rewards_ES) - 1)
    return np.concatenate([np.array(rewards_S) - other for rewards_S, other in zip(rewards_ES, others_E, strict=True)])
