"""The training loop.

Synchronous training is asynchronous training with a permitted lag of 0. Resuming is the same loop, with recorded
batches.

::

    rollout ──► inbox/g*.arrows ──►  source ──► steps/step-N.parquet ──► train_step ──► steps/step-N.json   (committed)
       ▲                                                                                      │
       └────────── inbox/version.json ◄── servers load ◄── weights of version N + 1 ◄─────────┘

consumes  batches of groups, one per step
produces  committed steps, published versions, checkpoints
waits     for a batch and for evaluations (rollout unblocks both), and for servers to load weights (the servers do)

Every rank of the trainer runs it. Only rank 0 talks to rollout and inference, and commits; the others follow it from
one batch to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from clew.config import Config
from clew.record.chain import committed_digest
from clew.record.digest import digest_rows
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.trainer.commit import summarize, write_stages
from clew.trainer.resume import verify
from clew.training import checkpoint
from clew.training.engine import StepResult, TrainEngine


class Source(Protocol):
    """A source of batches: `sources.LiveSource` or `sources.RecordedSource`."""

    def batch(self, step: int) -> list[Sequence]:
        """Return the batch of `step`, which is in steps/step-N.parquet by then."""
        ...


class Clock:
    """Adds up the seconds of a step by activity. Time inside a nested activity counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        before, self._within = self._within, 0.0
        began = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.seconds[what] = self.seconds.get(what, 0.0) + whole - self._within
            self._within = before + whole

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by activity."""
        taken, self.seconds = self.seconds, {}
        return taken


def train(
    config: Config,
    run: RunDirectory,
    engine: TrainEngine,
    *,
    live: Source,
    recorded: Source,
    publish: Callable[[TrainEngine], None],
    evaluated: Callable[[int], None],
    undisturbed: Callable[[], AbstractContextManager[None]],
    on_step: Callable[[int, dict[str, Any], StepResult], None],
    clock: Clock,
    until: int,
) -> None:
    """Train from `engine.version` to `until`.

    Steps that are already committed are trained again from the record and verified against it. Nothing is published
    until the last of them is done.

    Args:
        publish: Hands the weights to inference and returns when they are served.
        evaluated: Returns when the evaluation of a version, if one is due, is complete.
        undisturbed: Context manager inside which a step is trained.
        on_step: Called for each step that this call commits.
    """
    committed, ranks = run.steps.count(), engine.ranks
    while True:
        version = engine.version  # also the number of the step that these weights will make
        replaying = version < committed
        if not replaying:
            with clock("evaluation"):
                evaluated(version - 1)  # by one version all of it: so before the next one is published
            with clock("publish"):
                publish(engine)
            if ranks.leads:
                with clock("record"):
                    run.inbox.remove(run.steps.read(version - 1)["groups"] if version else ())
        if not replaying and checkpoint.is_due(version, config):  # a committed step may name the one that was there
            with clock("checkpoint"):
                follows = committed_digest(run.steps, version - 1)
                checkpoint.save(engine, run.checkpoints / f"step-{version:06d}", follows=follows)
                if ranks.leads:
                    checkpoint.prune(run.checkpoints, config.checkpoint.keep)
        if version >= until:
            evaluated(version)
            return

        with clock("rollout"):
            batch = (recorded if replaying else live).batch(version)
        with undisturbed():
            result = engine.train_step(batch)
        digests = digest_rows(batch)
        summary = summarize(run, batch, digests, result, engine)
        if replaying:
            verify(run, version, summary)
            continue
        with clock("record"):
            write_stages(run, version, digests, result, ranks)
            ranks.meet()  # what is committed is there from all of them
        if ranks.leads:
            run.steps.commit(version, {**summary, "timings": {**result.timings, **clock.take()}})
            on_step(version, run.steps.read(version), result)
