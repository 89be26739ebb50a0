"""`clew show RUN --off-policy`: the sequences whose logprobs changed most since sampling."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from clew.algorithms.kl import divergences
from clew.console import tracked
from clew.errors import RecordError
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.view.episode import lag
from clew.view.find_episode import read_batch
from clew.view.health_rules import command
from clew.view.text import Rows

SHOWN = 10
"""Number of sequences that are listed."""
STAGE = "proximal_logprobs"
"""Stage with the logprobs of the policy at the start of the step."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distance between the policy that sampled a sequence and the policy that was trained on it."""

    k3: float
    """Mean over its tokens of the mismatch KL, as in the metric behaviour_k3."""
    ratio: float
    """Ratio of the trainer's to the engine's probability, for the token with the largest absolute log ratio."""
    step: int
    id: str
    tokens: int
    lag: str


def show_off_policy(console: Console, run: RunDirectory, steps: Iterable[int], path: Path) -> None:
    """Print the most off-policy sequences of these steps, worst first.

    Args:
        steps: Committed steps. Those whose sequences were removed are left out.
        path: The run directory or bundle, as the user gave it.

    Raises:
        RecordError: No step has both its sequences and the stage `STAGE` on record.
    """
    there = [step for step in steps if run.steps.has_data(step)]
    worst = heapq.nlargest(SHOWN, _distances(run, there), key=lambda one: inf if isnan(one.k3) else one.k3)
    if not worst:
        raise RecordError(
            f"Cannot rank the sequences of {path}: none of these steps has both its sequences and the stage {STAGE} on "
            f"record. record.keep_steps keeps those of the newest steps, and other trainers may not write the stage."
        )
    looked = f"{len(there)} steps, {there[0]} to {there[-1]}" if len(there) > 1 else f"step {there[0]}"
    console.print(Text(f"the most off-policy sequences of {looked}, by the mean k3 of behaviour and proximal logprobs"))
    made = Rows("step", "sequence", "k3", "ratio", "lag", "tokens", left=("sequence",), spare=("tokens", "ratio"))
    for one in worst:
        made.add_row(str(one.step), one.id, f"{one.k3:.2e}", f"{one.ratio:.3g}", one.lag, str(one.tokens))
    console.print(made)
    console.print(Text(f"→ {command(f'show RUN {worst[0].id} --tokens', path)}"))


def _distances(run: RunDirectory, steps: list[int]) -> Iterator[Distance]:
    """Yield the distance of every trained sequence. Only one step is in memory at a time."""
    all_steps = tracked(steps, "measuring", total=len(steps), unit="steps")
    for step in filter(run.steps.has_data, all_steps):  # some may have been pruned since the list was made
        batch = read_batch(run, step)
        proximal = run.steps.read_stages(step).arrays.get(STAGE, {})
        trained = [row for row in batch if row.id in proximal and any(row.loss_mask)]
        whole = [row for row in trained if len(proximal[row.id]) == len(row.loss_mask)]  # else altered
        yield from (distance_of(row, proximal[row.id], step) for row in whole)


def distance_of(sequence: Sequence, proximal_T: np.ndarray, step: int) -> Distance:
    """Return the distance of a sequence from the policy at the start of the step, given that policy's logprobs [T]."""
    behaviour_N = sequence.logprobs[sequence.loss_mask].astype(np.float64)
    proximal_N = proximal_T[sequence.loss_mask].astype(np.float64)
    difference_N = proximal_N - behaviour_N
    return Distance(
        k3=float(np.mean(divergences(behaviour_N, proximal_N, "k3"))),
        ratio=float(np.exp(difference_N[np.argmax(np.abs(difference_N))])),
        step=step,
        id=sequence.id,
        tokens=len(behaviour_N),
        lag=lag([sequence], step),
    )
