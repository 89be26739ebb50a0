"""Warnings for a run whose rewards teach it nothing, or whose advantages contradict its rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from clew.algorithms import WITHIN_GROUP
from clew.algorithms.reward_statistics import CONTRADICTS, SAME

log = logging.getLogger("clew.trainer")

WARN_STEPS = 4
"""Number of consecutive steps without any difference between rewards that triggers a warning."""


class NothingToLearn:
    """Warns about steps that teach nothing, and about a user's own advantages that do not follow the rewards.

    It counts steps whose advantages are all zero, steps whose tokens are all rejected, and consecutive steps in which
    all rewards that algorithm.advantages compares are equal. A warning is repeated whenever its count has doubled.
    """

    def __init__(self, advantages: str) -> None:
        self._within_groups = advantages in WITHIN_GROUP
        self._advantages = advantages
        self._in_a_row = self._zero_steps = self._rejected_steps = 0
        self._correlations: list[float] = []

    def add(self, step: int, metrics: Mapping[str, float], largest_advantage: float = 1.0) -> str:
        """Log a warning when a step teaches nothing. Return the warning that `clew status` shows; "" if there is none.

        Args:
            largest_advantage: The largest absolute advantage of the step's tokens.
        """
        warning = self._equal_rewards(step, metrics)
        self._all_rejected(step, metrics)
        self._correlate(step, metrics.get("advantage_reward_correlation"))
        if largest_advantage <= SAME:
            self._zero_steps += 1
            if _is_power_of_two(self._zero_steps) and not warning:
                log.warning(
                    f"step {step}: all advantages are zero ({self._zero_steps} such steps so far), so nothing was "
                    f"learnt from its rewards; only the optimizer's momentum and weight decay move the weights. Either "
                    f"all rewards that algorithm.advantages={self._advantages} compares are equal, or that function is "
                    f"wrong"
                )
        return warning

    def _all_rejected(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get("rejected_share") != 1:
            return
        self._rejected_steps += 1
        if _is_power_of_two(self._rejected_steps):
            log.warning(
                f"step {step}: algorithm.reject, veto or off_policy_delta rejected every token ({self._rejected_steps} "
                f"such steps so far), so the step taught nothing. Widen their bounds, or lower rollout.max_lag or "
                f"training.lr"
            )

    def _correlate(self, step: int, correlation: float | None) -> None:
        """Warn once if a user's own advantages do not follow the rewards in the first steps that have a correlation."""
        if correlation is None or len(self._correlations) == WARN_STEPS:
            return
        self._correlations.append(correlation)
        mean = sum(self._correlations) / len(self._correlations)
        if len(self._correlations) == WARN_STEPS and mean <= CONTRADICTS:
            log.warning(
                f"step {step}: advantages contradict rewards: within groups their correlation was {mean:.2f} in the "
                f"first {WARN_STEPS} steps with differing rewards, so better answers are not made likelier. Does "
                f"algorithm.advantages={self._advantages} return its numbers in the order of the sequences? `clew "
                f"replay RUN --step {step} --break advantages` stops before it"
            )

    def _equal_rewards(self, step: int, metrics: Mapping[str, float]) -> str:
        all_equal = metrics["equal_groups_share"] == 1 if self._within_groups else metrics["reward_std"] <= SAME
        self._in_a_row = self._in_a_row + 1 if all_equal else 0
        if self._in_a_row < WARN_STEPS:
            return ""
        whose = "each group" if self._within_groups else "the batch"
        warning = (
            f"nothing to learn for {self._in_a_row} steps (up to step {step}): within {whose} all rewards are equal; "
            f"the mean of the last batch is {metrics['reward']:g}, of {metrics['groups']:.0f} groups. The task is too "
            f"hard or too easy for this model, or the reward does not tell answers apart: `clew show RUN {step}` shows "
            f"some"
        )
        if _is_power_of_two(self._in_a_row):  # WARN_STEPS is a power of two, too
            log.warning("%s", warning)
        return warning


def _is_power_of_two(count: int) -> bool:
    return count.bit_count() == 1
