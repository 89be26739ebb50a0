"""`clew sft CONFIG`: training on demonstrations or preferences (training.objective), with the engine that RL uses.

A run that is killed at any point continues from its last checkpoint when restarted, and ends with the same weights.
"""

from __future__ import annotations

import logging
import time

import torch
from rich.console import Console

from clew.config import Config
from clew.console import EscapingConsole
from clew.errors import RecordError
from clew.processes import cores
from clew.record.run import RunDirectory, warn_of_changes
from clew.training import checkpoint
from clew.training.demonstrations import Demonstrations
from clew.training.engine import TrainEngine, make_deterministic
from clew.training.ranks import Ranks, process_here
from clew.training.results import StepResult
from clew.training.tokens import Tokens

log = logging.getLogger("clew.training")

PROGRESS_S = 2.0
"""Seconds between two lines of progress."""


def sft(config: Config) -> None:
    """Train `config.model` for `training.steps` steps of `training.batch_size` demonstrations each.

    Raises:
        DataError: A row of the data cannot be used.
        ModelError: The model cannot be loaded or trained.
        RecordError: The run directory or a checkpoint cannot be used.
        TrainingError: A step failed.
    """
    torch.set_num_threads(config.launch.threads or max(1, cores() // config.launch.ranks))
    make_deterministic(config.training)
    run = RunDirectory(config.run_path)
    with run.hold(process_here()), run.report(process_here()) as reporter, Ranks.joined() as ranks:
        console = EscapingConsole(highlight=False, soft_wrap=True, quiet=not ranks.leads)
        if run.steps.count():
            raise RecordError(f"{run.path} holds a run of `clew train`. Choose another trial=NAME.")
        if ranks.leads:
            checkpoint.clean(run.checkpoints)
        engine = TrainEngine(config, ranks=ranks)
        demonstrations = Demonstrations(config, engine.policy.tokenizer, context=engine.policy.context)
        held_out = None
        if config.eval.path is not None:
            held_out = Demonstrations(
                config, engine.policy.tokenizer, context=engine.policy.context, held_out=True
            ).whole()
        resume(engine, run, console)
        if ranks.leads:
            warn_of_changes(log, config, run, engine.version, config.training.steps)
            if engine.version < config.training.steps:
                topology = {"ranks": ranks.size, "tp": config.training.tp}
                run.describe(config, step=engine.version, threads=torch.get_num_threads(), topology=topology)
        progress = _Progress(console, config.training.steps)
        reporter.set(doing="training", version=engine.version)
        while True:
            if held_out is not None and config.evaluates(engine.version) and run.read_eval(engine.version) is None:
                evaluate(engine, run, held_out, console)
            if engine.version >= config.training.steps:
                break
            result = engine.supervised_step(demonstrations.batch(engine.version))
            progress.say(engine.version, result)
            reporter.set(version=engine.version)
            if checkpoint.is_due(engine.version, config):
                folder = run.checkpoints / f"step-{engine.version:06d}"
                checkpoint.save(engine, folder)
                if ranks.leads:
                    checkpoint.prune(run, config.checkpoint)
        if ranks.leads:
            checkpoint.prune(run, config.checkpoint)  # the last evaluation may be the best
        console.print(f"{engine.version} steps are trained. The model: {run.checkpoints / 'latest'}")


def evaluate(engine: TrainEngine, run: RunDirectory, held_out: Tokens, console: Console) -> None:
    """Compute the held-out loss, write it to evals/ and print it. Every rank calls this at once."""
    began = time.monotonic()
    loss = engine.held_out_loss(held_out)
    if engine.ranks.leads:
        tokens = int(held_out.loss_mask_S.sum())
        said = {"loss": loss, "tokens": tokens, "prompts": len(held_out.ids), "seconds": time.monotonic() - began}
        run.write_eval(engine.version, [], said)
    engine.ranks.meet()
    console.print(f"held-out loss of version {engine.version}: {loss:.4f} nats a token ({len(held_out.ids)} rows)")


def resume(engine: TrainEngine, run: RunDirectory, console: Console) -> None:
    """Continue from the newest checkpoint, if there is one.

    Raises:
        RecordError: The checkpoint is beyond training.steps.
    """
    folders = checkpoint.saved(run.checkpoints)
    if not folders:
        return
    checkpoint.load(engine, folders[-1])
    if engine.ranks.leads:
        checkpoint.point("latest", folders[-1])  # a kill may have come between the two
    steps = engine.config.training.steps
    if engine.version > steps:
        raise RecordError(
            f"{folders[-1]} has {engine.version} steps behind it, but training.steps is {steps}. Raise "
            f"it, or choose another trial=NAME."
        )
    console.print(f"Going on from {folders[-1]}.")


class _Progress:
    """Progress output: one line every few seconds, and one for the last step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._said_at = self._since = time.monotonic()
        self._tokens = 0.0

    def say(self, step: int, result: StepResult) -> None:
        self._tokens += result.metrics["tokens"]
        now = time.monotonic()
        if now - self._said_at < PROGRESS_S and step < self._steps:
            return
        self._said_at = now
        speed = self._tokens / max(1e-9, now - self._since)
        right = result.metrics.get("preference/accuracy")
        self._console.print(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {result.metrics['loss']:.4f}  "
            f"{'' if right is None else f'accuracy {right:.1%}  '}"
            f"lr {result.metrics['lr']:.2e}  gradient {result.metrics['grad_norm']:.3f}  {speed:,.0f} tokens/s"
        )
