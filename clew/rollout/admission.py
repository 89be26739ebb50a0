"""Admission: how many groups may start.

It keeps no counter: the number follows from what lies in the run directory, so nothing has to be recovered after a
kill. `clew.loop.choose_batch.choose_batch` is its counterpart.
"""

from __future__ import annotations


def may_start(*, waiting: int, running: int, remaining: int, max_lag: int, batch_groups: int) -> int:
    """Return the number of new groups that may start now.

    Together with `clew.loop.choose_batch`, this bounds the lag by construction: at most `max_lag` whole batches are
    ahead of a group that starts now.

    Args:
        waiting: Groups that are finished and not yet consumed.
        running: Groups that are being made.
        remaining: Groups that the run still has to consume.
    """
    return max(0, min((max_lag + 1) * batch_groups, remaining) - waiting - running)
