"""The training loop.

Synchronous training is asynchronous training with a permitted lag of 0. Resuming is the same loop: it begins with
`replay`, which `clew replay` and counterfactuals call too.

::

    steps/ ──► replay what is recorded after the checkpoint
                                   │
                                   ▼
    ┌──► publish ──► checkpoint ──► take a batch ──► train ──► commit ──┐
    └───────────────────────────────────────────────────────────────────┘

    rollout ──► inbox/g*.arrows ──►  batch  ──► steps/step-N.parquet ──► train_step ──► steps/step-N.json   (committed)
       ▲                                                                                      │
       └────────── inbox/version.json ◄── servers load ◄── weights of version N + 1 ◄─────────┘

consumes  batches of groups, one per step
produces  committed steps, published versions, checkpoints
waits     for a batch and for evaluations (rollout ends both waits), and for the servers to load weights

Every rank of the trainer runs it. Only rank 0 talks to rollout and inference, and commits; the others follow it from
one batch to the next.
"""

from __future__ import annotations

import logging

from clew.config import Config
from clew.errors import TrainingError
from clew.loop.replay import replay
from clew.loop.step_summary import summarize, write_stages
from clew.loop.surroundings import OnStep, Surroundings
from clew.record.batch_digest import digest_rows
from clew.record.chain import committed_digest
from clew.record.run import RunDirectory
from clew.training import checkpoint
from clew.training.engine import TrainEngine

log = logging.getLogger("clew.trainer")


def train(
    config: Config, run: RunDirectory, engine: TrainEngine, around: Surroundings, *, until: int, on_step: OnStep
) -> None:
    """Train from the newest checkpoint, where `engine` is, until `until` steps are committed.

    Args:
        on_step: Called on rank 0 after each new step is committed.

    Raises:
        TrainingError: A recorded step differs when it is trained again, or a new step fails.
        Interrupted: This process was asked to end.
    """
    ranks, clock = engine.ranks, around.clock
    train_again(config, run, engine, around)
    around.before_first_step(engine)
    while True:
        version = engine.version  # also the number of the next step
        with clock("evaluation"):
            around.wait_for_evaluation(version - 1)  # a version is evaluated before the next one is published
        with clock("publish"):
            around.publish(engine)
            around.evaluate_here(engine)
        if ranks.leads:
            with clock("record"):
                run.inbox.remove(run.steps.read(version - 1)["groups"] if version else ())
        if checkpoint.is_due(version, config) or version >= until:
            with clock("checkpoint"), around.interrupts.held():
                save_checkpoint(run, engine)
                if ranks.leads:
                    checkpoint.prune(run, config.checkpoint)
        if version >= until:
            around.wait_for_evaluation(version)
            if ranks.leads:
                checkpoint.prune(run, config.checkpoint)  # the last evaluation may be the best
            return

        with clock("rollout"):
            batch = around.batch(engine)
        with around.alone_on_device():
            result = engine.train_step(batch)
        engine.drifted = False  # the commit will have the digests of these weights
        digests = digest_rows(batch)
        with clock("record"):
            write_stages(run, version, digests, result, ranks)
            ranks.meet()  # the commit comes after the files of all ranks
        if ranks.leads:
            summary = summarize(run, batch, digests, result, engine)
            run.steps.commit(version, {**summary, "timings": {**result.timings, **clock.take()}})
            around.committed(version, result, on_step)


def train_again(config: Config, run: RunDirectory, engine: TrainEngine, around: Surroundings) -> None:
    """Train the committed steps after the engine's checkpoint again. Nothing is published meanwhile.

    Raises:
        TrainingError: A step differs from its record.
        Interrupted: This process was asked to end.
    """
    if engine.version >= run.steps.count():
        return
    reason = ""
    for done in replay(run, engine, run.steps.count() - 1):
        if done.differences:
            engine.between_steps = False  # its weights must not become a checkpoint
            raise TrainingError(
                f"step {done.step}, trained again from the record, differs: {done.differences[0]}. Nothing was "
                f"published or overwritten. Either {run.steps.data_path(done.step)} or a checkpoint was altered, or "
                f"the training code has changed since: restore it, or start another trial=NAME."
            )
        if engine.ranks.leads and done.because != reason:
            reason = done.because
            log.warning("step %d: compared %s, not bit for bit: %s", done.step, done.tolerance, reason)
        around.check()
    engine.configure(config.training, config.algorithm)  # `replay` used the configuration of the recorded steps
    engine.config = config


def save_checkpoint(run: RunDirectory, engine: TrainEngine) -> None:
    """Write a checkpoint of the engine's version. All ranks call this together."""
    follows = committed_digest(run.steps, engine.version - 1)
    checkpoint.save(engine, run.checkpoint(engine.version), follows=follows)
