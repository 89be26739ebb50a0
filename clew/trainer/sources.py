"""Sources of batches. Each hands out what is in steps/step-N.parquet, so live training and replay cannot differ."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa

from clew.config import Config
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.rollout.admission import Choice, choose_batch
from clew.trainer.loop import Clock, Source
from clew.training.ranks import Ranks
from clew.waits import waiting


class SharedSource:
    """Gives every rank the batch that another source gives to rank 0; the other ranks read it from steps/."""

    def __init__(
        self, source: Source, run: RunDirectory, ranks: Ranks, described: Callable[[int], None] | None = None
    ) -> None:
        """Share `source`.

        Args:
            described: Called on rank 0 with the first step that has its batch, before that step is trained.
        """
        self._source = source
        self._run = run
        self._ranks = ranks
        self._described = described

    def batch(self, step: int) -> list[Sequence]:
        batch: list[Sequence] = []

        def wait() -> None:
            batch.extend(self._source.batch(step))
            if self._described is not None:
                self._described(step)
                self._described = None

        self._ranks.agree(f"the batch of step {step}", wait)
        return batch if self._ranks.leads else self._run.steps.read_data(step)


class RecordedSource:
    """Source of the batches of committed steps.

    `check` is called before each batch; it may raise to end the replay.
    """

    def __init__(self, run: RunDirectory, check: Callable[[], None]) -> None:
        self._run = run
        self._check = check

    def batch(self, step: int) -> list[Sequence]:
        self._check()
        return self._run.steps.read_data(step)


class LiveSource:
    """Source of batches that are chosen from the inbox.

    `pause` lets a little time pass, in which rollout can continue: a short sleep when rollout is another process, a
    turn of its event loop when everything is in one process (launch.mode=inline). It may raise to end the wait.
    """

    def __init__(self, config: Config, run: RunDirectory, pause: Callable[[], None], clock: Clock) -> None:
        self._rollout = config.rollout
        self._run = run
        self._pause = pause
        self._clock = clock

    def batch(self, step: int) -> list[Sequence]:
        if not self._run.steps.has_data(step):  # chosen before a kill: it is trained on as it is
            tables = self._choose(step)
            with self._clock("record"):
                table = pa.concat_tables(tables).combine_chunks()  # Parquet takes one piece a third quicker than many
                consumed_at = pa.array([time.time()] * table.num_rows)
                place = table.schema.get_field_index("consumed_at")
                self._run.steps.write_data(step, table.set_column(place, "consumed_at", consumed_at))
        with self._clock("record"):
            return self._run.steps.read_data(step)

    def _choose(self, step: int) -> list[pa.Table]:
        def look() -> Choice:
            with self._clock("record"):
                running = self._run.inbox.running()  # before the finished: a group that moves meanwhile is seen in both
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
                self._pause()
                choice = look()
        finished = self._run.inbox.scan()
        return [finished[group_id] for group_id in choice.groups]
