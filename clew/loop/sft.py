"""`clew sft CONFIG`: training on demonstrations or preferences (training.objective), by the loop that RL uses.

::

    rows of the data ──► steps/step-N.parquet ──► supervised step ──► steps/step-N.json   (committed)

A run that is killed at any point continues from its last checkpoint when restarted, trains the recorded steps after it
again, and ends with the same weights.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from clew.config import Config
from clew.console import EscapingConsole
from clew.errors import RecordError
from clew.loop.interrupt import Interrupts
from clew.loop.surroundings import Surroundings
from clew.loop.trainer_process import rank_of, train_here
from clew.models.architecture import context_of
from clew.models.loading import load_tokenizer
from clew.record import rows
from clew.record.run import RunDirectory
from clew.training.demonstrations import Demonstrations
from clew.training.engine import TrainEngine
from clew.training.ranks import Ranks
from clew.training.tokens import Tokens
from clew.waits import Reporter

PROGRESS_S = 2.0
"""Seconds between two lines of progress."""


def sft(config: Config) -> None:
    """Train `config.model` for `training.steps` steps of `training.batch_size` demonstrations or pairs each.

    Raises:
        ClewError: A row of the data, the model, the run directory or a checkpoint cannot be used, or a step failed.
    """
    demonstrations, held_out = read_data(config)  # first: a bad row then leaves no run directory behind
    with rank_of(config) as (ranks, run, reporter, interrupts):
        console = EscapingConsole(highlight=False, soft_wrap=True, quiet=not ranks.leads)
        progress = _Progress(console, config.training.steps)
        around = SftSurroundings(
            config, run, ranks, demonstrations, held_out, console=console, reporter=reporter, interrupts=interrupts
        )
        with around:
            train_here(config, run, around, lambda step, summary: progress.say(step + 1, summary))
        model = f"{run.checkpoints / 'latest'}{run.best_in_words()}"
        console.print(f"{run.steps.count()} steps are trained. The model: {model}")


def read_data(config: Config) -> tuple[Demonstrations, Tokens | None]:
    """Return the demonstrations that a run will use, and its held-out rows (None without eval.path)."""
    tokenizer, context = load_tokenizer(config.model.path), context_of(config.model.path)
    demonstrations = Demonstrations(config, tokenizer, context=context)
    if config.eval.path is None:
        return demonstrations, None
    return demonstrations, Demonstrations(config, tokenizer, context=context, held_out=True).all_rows()


def check_first_row(config: Config) -> None:
    """Check that the first row of the data can be used, before ranks are started, each of which reads all rows.

    Raises:
        ClewError: The row or the tokenizer cannot be used.
    """
    first = config.model_copy(update={"data": config.data.model_copy(update={"limit": 1})})
    Demonstrations(first, load_tokenizer(config.model.path), context=context_of(config.model.path))


class SftSurroundings(Surroundings):
    """The rows of the data in place of rollout, and the held-out loss in place of evaluations."""

    supervised = True

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        ranks: Ranks,
        demonstrations: Demonstrations,
        held_out: Tokens | None,
        *,
        console: Console,
        reporter: Reporter,
        interrupts: Interrupts,
    ) -> None:
        super().__init__(config, run, ranks, batches=self, reporter=reporter, interrupts=interrupts)
        self._console = console
        self._demonstrations = demonstrations
        self._held_out = held_out

    def before_first_step(self, engine: TrainEngine) -> None:
        if engine.version > (steps := self.config.training.steps):
            raise RecordError(
                f"{self.run.path} has done {engine.version} steps, but training.steps is {steps}. Raise it, "
                f"or choose another trial=NAME."
            )
        if engine.version:
            self._console.print(f"Going on from version {engine.version}.")

    def write(self, step: int) -> None:
        """Write the batch of a step, even if it is there already: it depends only on the configuration and the data."""
        self.run.steps.write_data(step, rows.to_table(self._demonstrations.batch(step)))

    def evaluate_here(self, engine: TrainEngine) -> None:
        """Compute the held-out loss if it is due, write it to evals/ and print it."""
        held_out = self._held_out
        if held_out is None or not self.config.evaluates(engine.version) or self.run.evals.read(engine.version):
            return
        began = time.monotonic()
        loss = engine.held_out_loss(held_out)
        if self.ranks.leads:
            tokens = int(held_out.loss_mask_S.sum())
            seconds = time.monotonic() - began
            summary = {"loss": loss, "tokens": tokens, "prompts": len(held_out.ids), "seconds": seconds}
            self.run.evals.write(engine.version, [], summary)
        self.ranks.meet()
        self._console.print(
            f"held-out loss of version {engine.version}: {loss:.4f} nats a token ({len(held_out.ids)} rows)"
        )


class _Progress:
    """One line of progress every few seconds, and one for the last step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._printed_at = time.monotonic()
        self._tokens = self._seconds = 0.0

    def say(self, step: int, summary: dict[str, Any]) -> None:
        metrics: dict[str, float] = summary["metrics"]
        self._tokens += metrics["tokens"]
        self._seconds += sum(summary["timings"].values())
        now = time.monotonic()
        if now - self._printed_at < PROGRESS_S and step < self._steps:
            return
        self._printed_at = now
        speed = self._tokens / max(1e-9, self._seconds)
        right = metrics.get("preference/accuracy")
        self._console.print(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {metrics['loss']:.4f}  "
            f"{'' if right is None else f'accuracy {right:.1%}  '}"
            f"lr {metrics['lr']:.2e}  gradient {metrics['grad_norm']:.3f}  {speed:,.0f} tokens/s"
        )
