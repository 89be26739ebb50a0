"""Batches from the run's own rollout, chosen from the inbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from clew.config import Config
from clew.loop.dumped_batches import check_origin
from clew.loop.stopwatch import Clock
from clew.record.rows import concatenated
from clew.record.run import RunDirectory
from clew.waits import waiting


class LiveBatches:
    """Source of batches that are chosen from the inbox."""

    def __init__(self, config: Config, run: RunDirectory, let_rollout_run: Callable[[], None], clock: Clock) -> None:
        """Prepare to choose batches. Raises RecordError if the run began with batches from another run.

        Args:
            let_rollout_run: Lets a little time pass, in which rollout can continue. It may raise to end the wait.
        """
        check_origin(run, replayed=False)
        self._rollout = config.rollout
        self._run = run
        self._let_rollout_run = let_rollout_run
        self._clock = clock

    def write(self, step: int) -> None:
        """Wait for the batch of a step, and write it. A batch chosen before a kill is trained on as it is."""
        if self._run.steps.has_data(step):
            return
        tables = self._choose(step)
        with self._clock("record"):
            table = concatenated(tables).combine_chunks()  # Parquet writes one piece a third faster than many
            consumed_at = pa.array([time.time()] * table.num_rows)
            place = table.schema.get_field_index("consumed_at")
            self._run.steps.write_data(step, table.set_column(place, "consumed_at", consumed_at))

    def _choose(self, step: int) -> list[pa.Table]:
        def look() -> Choice:
            with self._clock("record"):
                running = self._run.inbox.running()  # first: a group that finishes meanwhile is then seen in both
                finished = self._run.inbox.scan()
            return choose_batch(
                step=step,
                finished={name: table.column("admitted_version")[0].as_py() for name, table in finished.items()},
                running={name: version for name, version in running.items() if name not in finished},
                batch_groups=self._rollout.batch_groups,
                max_lag=self._rollout.max_lag,
                late=self._rollout.late,
            )

        def numbers() -> str:
            late = f", too old after this step: {' '.join(choice.too_old[:4])}" if choice.too_old else ""
            return (
                f"{self._rollout.batch_groups} groups wanted, {len(self._run.inbox.names())} ready, "
                f"{len(self._run.inbox.running())} running{late}"
            )

        choice = look()
        with waiting(f"a batch for step {step}", unblocks="rollout", numbers=numbers):
            while not choice.groups:
                self._let_rollout_run()
                choice = look()
        finished = self._run.inbox.scan()
        return [finished[group_id] for group_id in choice.groups]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The batch of a step, or the reasons why there is none yet."""

    groups: tuple[str, ...]
    """The chosen groups, oldest admitted first; empty while there is no batch."""
    too_old: tuple[str, ...]
    """Running groups that the batch waits for, because these or younger ones would exceed max_lag otherwise."""


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
    `step + 1 + i // batch_groups`. Its lag is that step minus its admitted version. If a group would then exceed
    `max_lag`, the batch waits for the running groups up to it (late="wait"): once they are finished, they take the
    places of younger ones. `may_start` makes sure that this is always enough. Nothing is dropped for being slow,
    because that would favour short episodes.

    Args:
        finished: Group ID to the version at which the group was admitted. A group in both mappings counts as finished.
        running: The same for running groups.
        late: "wait" makes the batch wait for groups that would become too old; "train" takes the batch without them.
    """
    outstanding = {**running, **finished}
    by_age = sorted(outstanding, key=lambda group_id: (outstanding[group_id], group_id))
    chosen = [group_id for group_id in by_age if group_id in finished][:batch_groups]
    left = [group_id for group_id in by_age if group_id not in chosen]
    late_ones = (i for i, g in enumerate(left) if step + 1 + i // batch_groups - outstanding[g] > max_lag)
    pressing = left[: max(late_ones, default=-1) + 1] if late == "wait" else []
    too_old = tuple(group_id for group_id in pressing if group_id not in finished)
    return Choice(groups=() if len(chosen) < batch_groups or too_old else tuple(chosen), too_old=too_old)
