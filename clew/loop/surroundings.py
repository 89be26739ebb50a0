"""Everything outside the trainer that a step needs: batches, inference, evaluations, reports, and requests to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from clew.config import Config
from clew.loop.choose_batch import LiveBatches
from clew.loop.dumped_batches import DumpedBatches, dump
from clew.loop.interrupt import Interrupts
from clew.loop.nothing_to_learn import NothingToLearn
from clew.loop.publisher import Inference, Publisher
from clew.loop.stopwatch import Clock
from clew.loop.tensorboard import Tensorboard
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.training.engine import TrainEngine
from clew.training.ranks import Ranks
from clew.training.results import StepResult
from clew.waits import Reporter, waiting

log = logging.getLogger("clew.trainer")

OnStep = Callable[[int, dict[str, Any]], None]
"""Function that is called on rank 0 with each committed step and its JSON."""


class Batches(Protocol):
    """Source of the batches of a run."""

    def write(self, step: int) -> None:
        """Write the batch of a step into the run directory, unless it is there."""
        ...


class WeightsWanted(Exception):
    """Raised in a wait of rank 0 when a server waits for the weights to be broadcast again."""


class Surroundings:
    """Everything outside the trainer that a step needs. Use it in a `with` block.

    Ranks other than 0 only wait for what rank 0 decides.
    """

    supervised = False
    """True if the run trains on demonstrations or preferences, as `clew sft` does."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        ranks: Ranks,
        *,
        inference: Inference | None = None,
        batches: Batches | None = None,
        reporter: Reporter,
        interrupts: Interrupts,
    ) -> None:
        """Connect a trainer to what is around it.

        Args:
            inference: Engines that the run samples from; None: nothing is published or evaluated.
            batches: Source of the batches without `inference`; None: the batches in debug.path.
        """
        self.config = config
        self.run = run
        self.ranks = ranks
        self.clock = Clock()
        self.reporter = reporter
        self._inference = inference
        self.interrupts = interrupts
        self._open = ExitStack()
        self._publisher: Publisher | None = None
        if inference is not None:
            self._batches: Batches = LiveBatches(config, run, self._let_rollout_run, self.clock)
            self._publisher = self._open.enter_context(closing(Publisher(config, run, inference, self.clock)))
        else:
            self._batches = batches or DumpedBatches(config, run)
        self._tensorboard: Tensorboard | None = None
        if batches is None and inference is None:
            self.supervised = RunDirectory(Path(config.debug.path or ""), make=False).supervised
        self._nothing_to_learn = NothingToLearn(config.algorithm.advantages)
        self._described = False

    def __enter__(self) -> Surroundings:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _let_rollout_run(self) -> None:
        self.interrupts.check()
        assert self._inference is not None and self._publisher is not None, "recorded batches are not waited for"
        if self._publisher.wanted():
            raise WeightsWanted
        self._inference.let_rollout_run()

    def _unless_wanted(self, wait: Callable[[], None]) -> bool:
        """Run a wait of rank 0. Return False if it cannot end before a server is sent the weights again."""
        try:
            wait()
        except WeightsWanted:
            return False
        return True

    def check(self) -> None:
        """Raise Interrupted on every rank when rank 0 was asked to end."""
        self.ranks.agree("whether to go on", self.interrupts.check)

    def before_first_step(self, engine: TrainEngine) -> None:
        """Do what is to be done once, after recorded steps were trained again. Only `clew sft` overrides this."""

    def evaluate_here(self, engine: TrainEngine) -> None:
        """Evaluate the engine's version on every rank. `clew sft` does this; otherwise rollout evaluates."""

    def publish(self, engine: TrainEngine) -> None:
        """Hand the engine's weights to inference, and return when they are served."""
        self.reporter.set(version=engine.version)
        if self._publisher is not None:
            self._publisher(engine)
        if self.config.launch.colocate:
            torch.cuda.empty_cache()  # frees the memory that writing the weights took

    def wait_for_evaluation(self, version: int) -> None:
        """Wait until the evaluation of this version is complete, if one is due and its weights still exist."""
        if self._inference is None or version < 0 or not self.config.evaluates(version):
            return
        what = f"the evaluation of version {version}"
        evaluated = self.ranks.agree(what, lambda: self._unless_wanted(lambda: self._wait_for_evaluation(version)))
        if not evaluated and self.ranks.leads:
            log.warning("version %d cannot be evaluated any more: a server has lost its weights", version)

    def _wait_for_evaluation(self, version: int) -> None:
        if self.run.evals.read(version) is not None:
            return
        weights = self.run.newest_weights()
        newest = max(self.run.inbox.published() or 0, weights.version if weights is not None else 0)
        if newest > version or weights is None or not weights.exists():
            log.warning("version %d cannot be evaluated any more: its weights are gone", version)
            return
        with waiting(f"the evaluation of version {version}", unblocks="rollout"):
            while self.run.evals.read(version) is None:
                self._let_rollout_run()

    def batch(self, engine: TrainEngine) -> list[Sequence]:
        """Return the batch of the engine's next step: on every rank, what steps/step-N.parquet holds."""
        what = f"the batch of step {engine.version}"
        while not self.ranks.agree(what, lambda: self._unless_wanted(lambda: self._write_batch(engine))):
            self.publish(engine)  # a server needs the weights again before rollout can go on
        with self.clock("record"):
            return self.run.steps.read_data(engine.version)

    def _write_batch(self, engine: TrainEngine) -> None:
        self.interrupts.check()
        self._batches.write(engine.version)
        if not self._described:  # only now: config.yaml says what was trained, not what was tried
            self.describe(engine)

    def describe(self, engine: TrainEngine) -> None:
        """Write config.yaml and run.json as they hold from the engine's next step on."""
        self._described = True
        self.run.describe(
            self.config,
            step=engine.version,
            threads=torch.get_num_threads(),
            device=engine.policy.device.type,
            topology={"ranks": self.ranks.size, "tp": self.config.training.tp},
            parameters=engine.parameter_names,
        )

    @contextmanager
    def alone_on_device(self) -> Iterator[None]:
        """Use inference's memory inside this block, on every rank, if launch.colocate puts both on one device."""
        inference = self._inference
        with ExitStack() as stack:
            if inference is not None and self.config.launch.colocate:
                with self.clock("release"):
                    what = "inference to release its memory"
                    self.ranks.agree(what, lambda: stack.enter_context(inference.released()))
                stack.callback(torch.cuda.empty_cache)  # runs before inference may take memory again
            yield

    def committed(self, step: int, result: StepResult, on_step: OnStep) -> None:
        """Report a committed step, and copy or remove what the configuration asks for."""
        summary = self.run.steps.read(step)
        if not self.supervised:
            largest = max(float(abs(advantages_T).max(initial=0.0)) for advantages_T in result.stages["advantages"])
            self.reporter.set(warning=self._nothing_to_learn.add(step, summary["metrics"], largest))
        if self._tensorboard is None:
            self._tensorboard = self._open.enter_context(closing(Tensorboard(self.run, first_step=step)))
        self._tensorboard.add(step, summary)
        if self.config.debug.dump_rollout_data:
            dump(self.config, self.run, step)
        if (keep := self.config.record.keep_steps) is not None:
            # The first is kept for the KL term and the best for its evaluation, not to resume from.
            resumable = self.run.checkpointed()[1:][-self.config.checkpoint.keep :]
            self.run.prune(min(step + 1 - keep, min(resumable, default=0)))
        on_step(step, summary)
