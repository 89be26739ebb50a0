"""Two pure functions for admission: one limits the groups that may start, the other chooses the groups of a batch.

Neither keeps a counter: both follow from what lies in the run directory, so nothing has to be recovered after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


def may_start(*, waiting: int, running: int, remaining: int, max_lag: int, batch_groups: int) -> int:
    """Return the number of new groups that may start now.

    Together with `choose_batch`, this bounds the lag by construction: at most `max_lag` whole batches lie before a
    group that starts now.

    Args:
        waiting: Groups that are finished and not yet consumed.
        running: Groups that are being made.
        remaining: Groups that the run still has to consume.
        max_lag: Limit of the lag, in steps.
        batch_groups: Groups in a batch.
    """
    return max(0, min((max_lag + 1) * batch_groups, remaining) - waiting - running)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The batch of a step, or the reasons why there is none yet."""

    groups: tuple[str, ...]
    """The chosen groups, oldest admitted first; empty while there is no batch."""
    missing: int
    """Number of finished groups that the batch still lacks."""
    too_old: tuple[str, ...]
    """Running groups that would be too old by the time they are consumed: the batch waits for them."""


def choose_batch(
    *,
    step: int,
    finished: Mapping[str, int],
    running: Mapping[str, int],
    batch_groups: int,
    max_lag: int,
    late: Literal["wait", "train"],
) -> Choice:
    """Choose the finished groups of a batch, oldest admitted first, unless an older running group has to go first.

    Groups left out now are consumed at best in order of age, `batch_groups` a step: the i-th oldest (from 0) by step
    `step + 1 + i // batch_groups`, at that lag. If a group would then exceed `max_lag`, the batch waits for the running
    groups up to it (late="wait"): once they are finished, they take the places of younger ones. `may_start` makes sure
    that this is always enough. Nothing is dropped for being slow, because that would favour short episodes.

    Args:
        step: The step that the batch is for.
        finished: Group ID to the version at which the group was admitted. A group in both mappings counts as finished.
        running: The same for running groups. Read it before `finished`, so that no group is missed that finishes
            meanwhile.
        batch_groups: Groups in a batch.
        max_lag: Limit of the lag, in steps.
        late: "wait" makes the batch wait for groups that would become too old; "train" takes the batch without them.
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
