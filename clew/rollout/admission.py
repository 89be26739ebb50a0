"""Which groups may start, and which finished groups make a batch: two pure functions.

Neither keeps a counter: both follow from what lies in the run directory, so nothing has to be recovered after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


def may_start(*, waiting: int, running: int, remaining: int, max_lag: int, batch_groups: int) -> int:
    """How many new groups may start now.

    waiting: groups finished and not yet consumed. running: groups being made. remaining: groups that the run still
    has to consume. With first-come-first-served batches this bounds the lag by construction: at most `max_lag` whole
    batches lie before a group that starts now.
    """
    return max(0, min((max_lag + 1) * batch_groups, remaining) - waiting - running)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The batch of a step, or what it waits for."""

    groups: tuple[str, ...]
    """The chosen groups, oldest admitted first; empty while there is no batch."""
    missing: int
    """Finished groups that are lacking."""
    too_old: tuple[str, ...]
    """Groups still running that would be too old after this step: the batch waits for them."""


def choose_batch(
    *,
    step: int,
    finished: Mapping[str, int],
    running: Mapping[str, int],
    batch_groups: int,
    max_lag: int,
    late: Literal["wait", "train"],
) -> Choice:
    """Oldest admitted first among the finished; see the module's words on waiting.

    finished, running: group ID to the version at which the group was admitted. After this step the trainer's version
    is `step + 1`, so a group admitted at version v that is left out now has a lag of at least `step + 1 - v` later.
    Nothing is dropped for being slow: that would favour short episodes.
    """
    too_old = tuple(sorted(g for g, v in running.items() if step + 1 - v > max_lag)) if late == "wait" else ()
    missing = max(0, batch_groups - len(finished))
    if missing or too_old:
        return Choice(groups=(), missing=missing, too_old=too_old)
    oldest_first = sorted(finished, key=lambda group_id: (finished[group_id], group_id))
    return Choice(groups=tuple(oldest_first[:batch_groups]), missing=0, too_old=())
