"""The trainer as a process (`clew learn`), and the whole of Clew in one process (launch.mode=inline)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from clew.config import Config
from clew.errors import Interrupted, RecordError, RolloutError, TrainingError
from clew.inference.protocol import Timings
from clew.loop.branch import begin
from clew.loop.dumped_batches import resume_dump
from clew.loop.inference_servers import InferenceServers
from clew.loop.interrupt import Interrupts
from clew.loop.loop import save_checkpoint, train
from clew.loop.resume import restore
from clew.loop.surroundings import OnStep, Surroundings
from clew.record.run import WRITES_CHECKPOINT, RunDirectory, changes_in_words
from clew.record.weights import WeightRef
from clew.training.engine import make_deterministic
from clew.training.optimizer import GradientError
from clew.training.ranks import ALONE, Ranks, process_here, rank_here
from clew.waits import Reporter

log = logging.getLogger("clew.trainer")


def learn(config: Config, on_step: OnStep = lambda step, summary: None) -> None:
    """Train in this process, with rollout and inference in processes of their own.

    Raises:
        ClewError: The run ended before its last step.
    """
    patient = config.inference.on_update == "wait"
    with (
        rank_of(config) as (ranks, run, reporter, interrupts),
        closing(InferenceServers(run, patient=patient)) as servers,
        Surroundings(config, run, ranks, inference=servers, reporter=reporter, interrupts=interrupts) as around,
    ):
        train_here(config, run, around, on_step)


class EngineHere:
    """Engine for launch.mode=inline (an `Inference`), with the rollout that takes turns with the trainer."""

    def __init__(self, config: Config, run: RunDirectory, loop: asyncio.AbstractEventLoop) -> None:
        """Load the engine and prepare rollout, which runs in `loop`."""
        from clew.inference.local import load_engine
        from clew.rollout.process import gateway_for, make_runner
        from clew.rollout.setup import max_running_of

        self._loop = loop
        self._engine = load_engine(config, max_running=max_running_of(config))
        newest = run.newest_weights()
        if newest is not None and newest.exists():  # an evaluation of that version may not be complete
            self._loop.run_until_complete(self._engine.load_weights(newest))
        self._gateway = gateway_for(config)
        self._runner = make_runner(config, run, self._engine, self._gateway)
        self.interrupts = Interrupts()

    def load(self, ref: WeightRef) -> Timings:
        return self._ask(self._engine.load_weights(ref))

    @contextmanager
    def released(self) -> Iterator[None]:
        self._ask(self._engine.release_memory())
        try:
            yield
        finally:
            self._ask(self._engine.resume_memory())

    def let_rollout_run(self) -> None:
        """Let rollout run until it has finished at least one group or evaluation."""
        turn = self._loop.create_task(self._runner.advance())
        try:
            with self.interrupts.waking(lambda: self._loop.call_soon_threadsafe(turn.cancel)):
                going_on = self._loop.run_until_complete(turn)
        except (KeyboardInterrupt, asyncio.CancelledError):
            self.interrupts.check()  # ends the alarm, which would interrupt the checkpoint
            raise Interrupted("") from None
        if not going_on:
            raise RolloutError(
                "Cannot go on: rollout has nothing left to run, and the trainer still waits for a batch. This is a "
                "defect of Clew; please report it with the run directory."
            )

    def close(self) -> None:
        for task in asyncio.all_tasks(self._loop):  # otherwise those that are ready would run user code
            task.cancel()
        while True:
            try:
                self._loop.run_until_complete(self._runner.close())
                break
            except KeyboardInterrupt:  # an earlier one, which asyncio raises again in whatever awaited the ended task
                continue
        if self._gateway is not None:
            self._gateway.stop()

    def _ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work if self._gateway is None else self._gateway.call(work))


def learn_inline(config: Config, on_step: OnStep) -> None:
    """Train with rollout and inference in this process.

    User code runs on this thread, without time limits, so `breakpoint()` works in the agent, the reward and the loss.
    Only an agent's plain `def run` has a thread of its own. A run repeats bit for bit with rollout.max_lag=0.
    """
    torch.set_num_threads(config.threads)
    run = RunDirectory(config.run_path)
    with ExitStack() as stack:
        stack.enter_context(run.hold("trainer"))
        stack.enter_context(run.hold("rollout"))
        reporter = stack.enter_context(run.report("trainer"))
        loop = stack.enter_context(closing(asyncio.new_event_loop()))
        here = stack.enter_context(closing(EngineHere(config, run, loop)))
        around = Surroundings(config, run, ALONE, inference=here, reporter=reporter, interrupts=here.interrupts)
        train_here(config, run, stack.enter_context(around), on_step)


def learn_from_record(config: Config, on_step: OnStep, *, until: int | None = None) -> None:
    """Train on the batches in config.debug.path, without rollout and inference. Nothing is published or evaluated.

    With debug.first_step, the run begins with what the steps before it left in the run directory debug.path.

    Raises:
        ClewError: A batch is missing, the run began with other batches, or it ended before its last step.
    """
    with rank_of(config) as (ranks, run, reporter, interrupts):
        if config.debug.first_step:
            config = begin(config, ranks)
            torch.set_num_threads(config.rank_threads)  # `begin` may have set the other run's number
        with Surroundings(config, run, ranks, reporter=reporter, interrupts=interrupts) as around:
            train_here(config, run, around, on_step, until=until)


@contextmanager
def rank_of(config: Config) -> Iterator[tuple[Ranks, RunDirectory, Reporter, Interrupts]]:
    """Join the run's trainer ranks for as long as the block runs."""
    torch.set_num_threads(config.rank_threads)
    run = RunDirectory(config.run_path)
    with ExitStack() as stack:
        stack.enter_context(run.hold(process_here()))
        reporter = stack.enter_context(run.report(process_here()))
        interrupts = Interrupts(leads=rank_here() == 0)
        yield stack.enter_context(Ranks.joined()), run, reporter, interrupts


def train_here(
    config: Config, run: RunDirectory, around: Surroundings, on_step: OnStep, *, until: int | None = None
) -> None:
    """Load or resume the engine, then train to the last step."""
    ranks, reporter = around.ranks, around.reporter
    reporter.set(doing="loading the model")
    make_deterministic(config.training)
    if ranks.leads and config.debug.dump_rollout_data:
        resume_dump(config, run)
    until = config.training.steps if until is None else until
    engine = restore(config, run, ranks, supervised=around.supervised)
    if ranks.leads:
        if run.steps.count() == 0 or not run.config_path.exists():
            around.describe(engine)
        elif changed := run.changes(config):
            if (step := run.steps.count()) < until:
                log.warning("the configuration changes from step %d on: %s", step, changes_in_words(changed))
            else:
                log.warning(
                    "no step is left to train, so these changes of the configuration have no effect, and config.yaml "
                    "stays as it is: %s",
                    changes_in_words(changed),
                )
    reporter.set(doing="training", version=engine.version)
    try:
        train(config, run, engine, around, until=until, on_step=on_step)
    except (Interrupted, TrainingError) as error:
        around.interrupts.hold()  # it may still write a checkpoint
        # Only these are raised on every rank: after any other error a rank would wait for the others forever.
        together = ranks.size == 1 or not isinstance(error, TrainingError) or isinstance(error, GradientError)
        written = run.checkpoint(engine.version).exists()
        if together and engine.between_steps and engine.version == run.steps.count() and not written:
            try:
                reporter.set(doing=WRITES_CHECKPOINT)
                save_checkpoint(run, engine)  # so that it can go on with another configuration
            except RecordError as failed:  # such as a full disk, which must not hide why the run ends
                log.warning("no checkpoint of version %d was written: %s", engine.version, failed)
        if isinstance(error, TrainingError):
            raise
        raise Interrupted(
            f"interrupted before step {engine.version} of {config.training.steps}; nothing recorded is lost. Start the "
            f"same command again to go on."
        ) from None
