"""The trainer as a process (`clew learn`), and the whole of Clew in one process (launch.mode=inline)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from clew.config import Config
from clew.errors import Interrupted, RolloutError, TrainingError
from clew.record.chain import committed_digest
from clew.record.run import RunDirectory, warn_of_changes
from clew.record.weights import WeightRef
from clew.rollout.evaluation import is_due
from clew.trainer.batches import ReplayedSource, check_origin, dump, resume_dump
from clew.trainer.interrupt import Interrupts
from clew.trainer.loop import Clock, Source, train
from clew.trainer.nothing_to_learn import NothingToLearn
from clew.trainer.publisher import Publisher
from clew.trainer.report import Tensorboard, draw_learning_curve
from clew.trainer.resume import restore
from clew.trainer.servers import Servers
from clew.trainer.sources import LiveSource, RecordedSource, SharedSource
from clew.training import checkpoint
from clew.training.engine import GradientError, StepResult, TrainEngine, make_deterministic
from clew.training.ranks import ALONE, Ranks, process_here, rank_here
from clew.waits import Reporter, waiting

log = logging.getLogger("clew.trainer")

POLL_S = 0.01

Released = Callable[[], AbstractContextManager[None]]
"""Context manager type: inside the block inference is paused, and the memory of its cache is free."""

OnStep = Callable[[int, dict[str, Any]], None]

Beginning = Callable[[Config, Ranks], Config]
"""Function that makes a run begin from something else than its own model. It is called on every rank and returns the
configuration with which the run continues."""


def learn(config: Config, on_step: OnStep = lambda step, summary: None) -> None:
    """Train in this process, with rollout and inference in processes of their own.

    Raises:
        ClewError: The run ended before its last step.
    """
    with _rank_of(config) as (ranks, run, reporter, interrupts), closing(Servers(run)) as servers:

        def pause() -> None:
            interrupts.check()
            time.sleep(POLL_S)

        _train_live(
            config,
            run,
            ranks,
            reporter,
            load=servers.load,
            released=servers.released,
            pause=pause,
            check=interrupts.check,
            on_step=on_step,
        )


def learn_inline(config: Config, on_step: OnStep) -> None:
    """Train with rollout and inference in this process.

    All user code runs on this thread, without time limits, so `breakpoint()` works in the agent, the reward and the
    loss. A run repeats bit for bit with rollout.max_lag=0.
    """
    from clew.inference.local import load_engine
    from clew.rollout.process import gateway_for, inline_runner
    from clew.rollout.setup import side_by_side

    torch.set_num_threads(config.threads)
    run = RunDirectory(config.run_path)
    with ExitStack() as stack:
        stack.enter_context(run.hold("trainer"))
        stack.enter_context(run.hold("rollout"))
        reporter = stack.enter_context(run.report("trainer"))
        loop = stack.enter_context(closing(asyncio.new_event_loop()))
        engine = load_engine(config, max_running=side_by_side(config))
        newest = run.newest_weights()
        if newest is not None and newest.exists():  # an evaluation of that version may not be complete
            loop.run_until_complete(engine.load_weights(newest))
        gateway = gateway_for(config)
        runner = inline_runner(config, run, engine, gateway)
        interrupts = Interrupts()

        def pause() -> None:
            interrupts.check()
            turn = loop.create_task(runner.advance())
            try:
                with interrupts.waking(lambda: loop.call_soon_threadsafe(turn.cancel)):
                    going_on = loop.run_until_complete(turn)
            except (KeyboardInterrupt, asyncio.CancelledError):
                raise Interrupted("") from None
            if not going_on:
                raise RolloutError(
                    "rollout has nothing left to run, and the trainer still waits for a batch: "
                    "this is a defect of Clew; please report it with the run directory."
                )

        def close() -> None:
            for task in asyncio.all_tasks(loop):  # else those that are ready go on into user code
                task.cancel()
            while True:
                try:
                    loop.run_until_complete(runner.close())
                    break
                except KeyboardInterrupt:  # of before: asyncio raises it once more in all that awaited what it ended
                    continue
            if gateway is not None:
                gateway.stop()

        stack.callback(close)

        def ask(work: Coroutine[Any, Any, None]) -> None:
            loop.run_until_complete(work if gateway is None else gateway.call(work))

        @contextmanager
        def released() -> Iterator[None]:
            ask(engine.release_memory())
            try:
                yield
            finally:
                ask(engine.resume_memory())

        _train_live(
            config,
            run,
            ALONE,
            reporter,
            load=lambda ref: ask(engine.load_weights(ref)),
            released=released,
            pause=pause,
            check=interrupts.check,
            on_step=on_step,
        )


def learn_from_record(
    config: Config,
    on_step: OnStep,
    *,
    begun: Beginning | None = None,
    until: int | None = None,
) -> None:
    """Train on the batches in config.debug.path, without rollout and inference. Nothing is published or evaluated.

    Args:
        begun: Makes the run begin from something else than its own model; None: it begins with its own.
        until: Step at which to stop; None: training.steps.

    Raises:
        RecordError: A batch is missing, or the run began with other batches.
        ClewError: Anything else that ends the run before its last step.
    """
    with _rank_of(config) as (ranks, run, reporter, interrupts):
        live = ReplayedSource(config, run, interrupts.check)
        if begun is not None:
            config = begun(config, ranks)
            torch.set_num_threads(config.rank_threads)
        _train(
            config,
            run,
            ranks,
            reporter,
            live=live,
            publish=lambda engine: None,
            evaluated=lambda version: None,
            undisturbed=nullcontext,
            check=interrupts.check,
            clock=Clock(),
            on_step=on_step,
            until=until,
        )


@contextmanager
def _rank_of(config: Config) -> Iterator[tuple[Ranks, RunDirectory, Reporter, Interrupts]]:
    """Join the run's trainer ranks for as long as the block runs."""
    torch.set_num_threads(config.rank_threads)
    run = RunDirectory(config.run_path)
    with ExitStack() as stack:
        stack.enter_context(run.hold(process_here()))
        reporter = stack.enter_context(run.report(process_here()))
        interrupts = Interrupts(leads=rank_here() == 0)
        yield stack.enter_context(Ranks.joined()), run, reporter, interrupts


def _train_live(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    reporter: Reporter,
    *,
    load: Callable[[WeightRef], None],
    released: Released,
    pause: Callable[[], None],
    check: Callable[[], None],
    on_step: OnStep,
) -> None:
    """Train on the batches that rollout makes meanwhile.

    Args:
        load: Returns when every engine serves the given weights.
        check: Raises Interrupted when the trainer was asked to end.
        pause: Does what `check` does, and lets a little time pass.
    """
    check_origin(run, replayed=False)
    clock = Clock()
    with closing(Publisher(config, run, load)) as publisher:
        _train(
            config,
            run,
            ranks,
            reporter,
            live=LiveSource(config, run, pause, clock),
            publish=publisher,
            evaluated=partial(_wait_for_evaluation, config, run, pause),
            undisturbed=partial(_alone_on_device, ranks, clock, released) if config.launch.colocate else nullcontext,
            check=check,
            clock=clock,
            on_step=on_step,
        )


@contextmanager
def _alone_on_device(ranks: Ranks, clock: Clock, released: Released) -> Iterator[None]:
    """Use inference's memory inside this block, on every rank. The allocator keeps none of it afterwards."""
    with ExitStack() as stack:
        with clock("release"):
            ranks.agree("inference to release its memory", lambda: stack.enter_context(released()))
        stack.callback(torch.cuda.empty_cache)  # runs before inference may take memory again
        yield


def _wait_for_evaluation(config: Config, run: RunDirectory, pause: Callable[[], None], version: int) -> None:
    """Return when the evaluation of this version is complete, or at once if none is due."""
    if version < 0 or not is_due(version, config) or run.read_eval(version) is not None:
        return
    weights = run.newest_weights()
    if (run.inbox.published() or 0) > version or weights is None or not weights.exists():
        log.warning("version %d cannot be evaluated any more: its weights are gone", version)
        return
    with waiting(f"the evaluation of version {version}", unblocks="rollout"):
        while run.read_eval(version) is None:
            pause()


def _train(
    config: Config,
    run: RunDirectory,
    ranks: Ranks,
    reporter: Reporter,
    *,
    live: Source,
    publish: Callable[[TrainEngine], None],
    evaluated: Callable[[int], None],
    undisturbed: Callable[[], AbstractContextManager[None]],
    check: Callable[[], None],
    clock: Clock,
    on_step: OnStep,
    until: int | None = None,
) -> None:
    """Load or resume the engine, then train to the last step.

    Args:
        check: Raises Interrupted when the trainer was asked to end.
    """
    reporter.set(doing="loading the model")
    make_deterministic(config.training)
    if ranks.leads and config.debug.dump_rollout_data:
        resume_dump(config, run)

    def published(engine: TrainEngine) -> None:
        reporter.set(version=engine.version)
        publish(engine)
        if config.launch.colocate:
            torch.cuda.empty_cache()  # what the writing of weights took

    until = config.training.steps if until is None else until
    engine = restore(config, run, ranks)

    def describe(step: int) -> None:
        run.describe(
            config,
            step=step,
            threads=torch.get_num_threads(),
            device=engine.device.type,
            topology={"ranks": ranks.size, "tp": config.training.tp},
            parameters=engine.parameter_names,
        )

    if ranks.leads:
        if run.steps.count() == 0 or not run.config_path.exists():
            describe(0)
        else:
            warn_of_changes(log, config, run, run.steps.count(), until)
    tensorboard = Tensorboard(run, first_step=run.steps.count()) if ranks.leads else None
    nothing_to_learn = NothingToLearn(config.algorithm.advantages)

    def stepped(step: int, summary: dict[str, Any], result: StepResult) -> None:
        largest = max(float(abs(advantages_T).max(initial=0.0)) for advantages_T in result.stages["advantages"])
        reporter.set(warning=nothing_to_learn.add(step, summary["metrics"], largest))
        if tensorboard is not None:
            tensorboard.add(step, summary)
        if config.debug.dump_rollout_data:
            dump(config, run, step)
        if config.record.keep_steps is not None:
            resumable = run.checkpointed()[1:]  # from any of them, but the first
            run.prune(min(step + 1 - config.record.keep_steps, min(resumable, default=0)))
        on_step(step, summary)

    reporter.set(doing="training", version=engine.version)
    try:
        train(
            config,
            run,
            engine,
            live=SharedSource(live, run, ranks, described=describe),
            recorded=SharedSource(RecordedSource(run, check), run, ranks),
            publish=published,
            evaluated=lambda version: ranks.agree(f"the evaluation of version {version}", partial(evaluated, version)),
            undisturbed=undisturbed,
            on_step=stepped,
            clock=clock,
            until=until,
        )
    except (Interrupted, TrainingError) as error:
        folder = run.checkpoints / f"step-{engine.version:06d}"
        together = ranks.size == 1 or not isinstance(error, TrainingError) or isinstance(error, GradientError)
        if together and engine.whole and engine.version == run.steps.count() and not folder.exists():
            follows = committed_digest(run.steps, engine.version - 1)
            checkpoint.save(engine, folder, follows=follows)  # so that it can go on with another configuration
        if isinstance(error, TrainingError):
            raise
        raise Interrupted(
            f"interrupted before step {engine.version} of {config.training.steps}; nothing recorded is lost. Start the "
            f"same command again to go on."
        ) from None
    finally:
        if tensorboard is not None:
            tensorboard.close()
            draw_learning_curve(run)
