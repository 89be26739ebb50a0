"""What a run should be told while it goes on: that its rewards have nothing to teach."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from clew.algorithms import WITHIN_GROUP

log = logging.getLogger("clew.trainer")

WARN_STEPS = 4
"""So many steps in a row without a difference between rewards are worth a warning, which is repeated each time that
their number has doubled."""


class NothingToLearn:
    """Counts the steps in a row whose rewards were all equal among those that algorithm.advantages compares."""

    def __init__(self, advantages: str) -> None:
        self._within_groups = advantages in WITHIN_GROUP
        self._in_a_row = 0
        self._warn_at = WARN_STEPS

    def add(self, step: int, metrics: Mapping[str, float]) -> str:
        """Take a step's metrics; returns what `clew status` shows: nothing, where there is nothing to warn of."""
        alike = metrics["equal_groups_share"] == 1 if self._within_groups else metrics["reward_std"] == 0
        if not alike:
            self._in_a_row, self._warn_at = 0, WARN_STEPS
            return ""
        self._in_a_row += 1
        if self._in_a_row < WARN_STEPS:
            return ""
        whose = "each group" if self._within_groups else "the batch"
        warning = (
            f"nothing to learn for {self._in_a_row} steps (up to step {step}): within {whose} all rewards are equal; "
            f"the mean of the last batch is {metrics['reward']:g}, of {metrics['groups']:.0f} groups. The task is too "
            f"hard or too easy for this model, or the reward does not tell answers apart: `clew show RUN {step}` shows "
            f"some"
        )
        if self._in_a_row == self._warn_at:
            self._warn_at *= 2
            log.warning("%s", warning)
        return warning
