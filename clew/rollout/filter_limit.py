"""Decides when `rollout.drop_equal_rewards` has rejected too many groups in a row: it warns, then the run stops."""

from __future__ import annotations

import logging
from collections import Counter

from clew.errors import RolloutError

log = logging.getLogger("clew.rollout")

WARN_BATCHES = 4
STOP_BATCHES = 40
"""Number of batches' worth of groups rejected in a row before a warning (WARN_BATCHES) and before the run stops
(STOP_BATCHES, but never before one pass over the data)."""


class FilterWatch:
    """Counts the groups that the filter has rejected in a row, because all their rewards are equal."""

    def __init__(self, batch_groups: int, n_rows: int) -> None:
        self._batch = batch_groups
        self._warn_at = WARN_BATCHES * batch_groups
        self._stop_at = max(STOP_BATCHES * batch_groups, n_rows)
        self._in_a_row: Counter[float] = Counter()

    def add(self, reward: float | None) -> None:
        """Take the reward that all of a group's episodes have, or None if they differ.

        Raises:
            RolloutError: Every group has been rejected for too long.
        """
        if reward is None:
            self._in_a_row.clear()
            return
        self._in_a_row[reward] += 1
        count = self._in_a_row.total()
        if count == self._warn_at:
            log.warning("%s", self._message(count))
        if count == self._stop_at:
            raise RolloutError(self._message(count))

    def explanation(self) -> str | None:
        """Return a message with advice if at least the last batch of groups was rejected entirely; else None."""
        count = self._in_a_row.total()
        return self._message(count) if count >= self._batch else None

    def _message(self, count: int) -> str:
        which = ", ".join(f"{number} groups all {reward:g}" for reward, number in self._in_a_row.most_common(3))
        return (
            f"rollout.drop_equal_rewards rejected the last {count} groups, one after the other ({which}): no batch "
            f"comes together. The task is too hard or too easy for this model, or the reward does not tell answers "
            f"apart; rejected/ holds the episodes. A higher sampling.temperature, more rollout.n_samples or other "
            f"prompts may help."
        )
