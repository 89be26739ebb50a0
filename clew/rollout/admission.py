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
    has to consume. This bounds the lag by construction, together with `choose_batch`: at most `max_lag` whole batches
    lie before a group that starts now.
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
    """Groups still running that would be too old by the time they are consumed: the batch waits for them."""


def choose_batch(
    *,
    step: int,
    finished: Mapping[str, int],
    running: Mapping[str, int],
    batch_groups: int,
    max_lag: int,
    late: Literal["wait", "train"],
) -> Choice:
    """Oldest admitted first among the finished, unless that would leave behind what cannot be consumed in time.

    finished, running: group ID to the version at which the group was admitted; read `running` first, so that a group
    which moves meanwhile is seen (it counts as finished). Groups left out now are consumed at best in order of age,
    `batch_groups` a step: the i-th oldest (from 0) by step `step + 1 + i // batch_groups`, at that lag. Where one would
    exceed `max_lag` then, the batch waits for the running groups up to it (late="wait"): once they are finished, they
    take the places of younger ones. `may_start` sees to it that this is always enough.
    Nothing is dropped for being slow: that would favour short episodes.
    """
    outstanding = {**running, **finished}
    by_age = sorted(outstanding, key=lambda group_id: (outstanding[group_id], group_id))
    chosen = [group_id for group_id in by_age if group_id in finished][:batch_groups]
    left = [group_id for group_id in by_age if group_id not in chosen]
    late_from = [i for i, g in enumerate(left) if step + 1 + i // batch_groups - outstanding[g] > max_lag]
    pressing = left[: late_from[-1] + 1] if late_from and late == "wait" else []
    too_old = tuple(group_id for group_id in pressing if group_id not in finished)
    missing = batch_groups - len(chosen)
    return Choice(groups=() if missing or too_old else tuple(chosen), missing=missing, too_old=too_old)
