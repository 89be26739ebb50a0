"""`clew blame`: which sequences, and which of their tokens, made a step what it was."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clew.diagnose.replay import batch_as_it_is, configure_as, engine_at, replay
from clew.errors import ConfigError, RecordError, TrainingError
from clew.record.bundle import opened
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.rollout.rewards import shortened
from clew.training.contributions import Contribution, CriticContribution, contributions, critic_contributions
from clew.training.engine import Prepared, TrainEngine

CUT = 400
"""Characters of a prompt or a completion that are shown."""


@dataclass(frozen=True, kw_only=True)
class Blamed:
    """One sequence."""

    sequence: Sequence
    worst: Contribution
    """Of its parts in the step's updates, the largest."""
    critics: CriticContribution | None = None
    """The same of its parts in the critic's updates; None where there is no critic."""


def blame(target: Path, step: int, *, top: int, tokens: int, by: str) -> None:
    """Print the sequences of a step, worst first. Raises ClewError.

    by: gradient, loss, or critic (its gradient). tokens: how many of each sequence are shown.
    """
    if by not in ("gradient", "loss", "critic"):
        raise ConfigError(f"--by {by}: expected gradient, loss or critic.")
    with opened(target) as (run, _):
        engine, batch = _bring_to(run, step)
        if by == "critic" and engine.critic is None:
            raise ConfigError("--by critic: this step has none (algorithm.advantages=gae has).")
        with np.errstate(invalid="ignore"):  # what is not finite is said below
            prepared = engine.prepare(batch)
        try:
            found = _blamed(engine, prepared, batch)
        except TrainingError as error:
            raise TrainingError(
                f"{error}\n`clew blame` computes each sequence alone, as it may be in any micro-batch."
            ) from error
        _show(engine, prepared, found, step, top=top, tokens=tokens, by=by)


def _bring_to(run: RunDirectory, step: int) -> tuple[TrainEngine, list[Sequence]]:
    """The engine where it was when `step` began, committed or not: a step that failed has its batch on record."""
    count = run.steps.count()
    if not (0 <= step < count or (step == count and run.steps.has_data(step))):
        committed = f"the steps 0 to {count - 1}" if count else "no step"
        begun = f", and begun step {count}" if run.steps.has_data(count) else ""
        raise RecordError(f"{run.path} has no batch of step {step}: it has committed {committed}{begun}.")
    engine = engine_at(run, step)
    batch = batch_as_it_is(run, step)
    for done in replay(run, engine, step - 1):
        if done.differences:
            print(f"on the way there: {done.differences[0]}", file=sys.stderr)
    configure_as(run, engine, run.steps.read(step) if step < count else None)
    return engine, batch


def _blamed(engine: TrainEngine, prepared: Prepared, batch: list[Sequence]) -> list[Blamed]:
    worst: dict[int, Contribution] = {}
    for part in contributions(engine, prepared):
        if part.row not in worst or _badness(part) > _badness(worst[part.row]):
            worst[part.row] = part
    critics: dict[int, CriticContribution] = {}
    for part in critic_contributions(engine, prepared):
        if part.row not in critics or _badness_of_critic(part) > _badness_of_critic(critics[part.row]):
            critics[part.row] = part
    return [Blamed(sequence=batch[row], worst=part, critics=critics.get(row)) for row, part in worst.items()]


def _badness(part: Contribution, by: str = "gradient") -> float:
    value = part.gradient_norm if by == "gradient" else abs(part.loss)
    return value if math.isfinite(part.gradient_norm + part.loss) else math.inf


def _badness_of_critic(part: CriticContribution | None) -> float:
    if part is None:  # nothing of it is trained on
        return 0.0
    return part.gradient_norm if math.isfinite(part.gradient_norm + part.loss) else math.inf


def _show(
    engine: TrainEngine, prepared: Prepared, found: list[Blamed], step: int, *, top: int, tokens: int, by: str
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)

    def worst_first(each: Blamed) -> tuple[float, str]:
        return -(_badness_of_critic(each.critics) if by == "critic" else _badness(each.worst, by)), each.sequence.id

    found = sorted(found, key=worst_first)
    median = statistics.median_low(_badness(each.worst) for each in found)
    print(f"step {step}: {len(found)} sequences, worst first by {by}; the median gradient has norm {median:.3g}")
    table = Table(box=None, pad_edge=False)
    of_critic = ("critic's gradient", "critic's loss") if engine.critic is not None else ()
    for name in ("sequence", "gradient", "share", "loss", "reward", "advantage", "tokens", "lag", *of_critic):
        table.add_column(name, justify="left" if name == "sequence" else "right")
    for each in found[:top]:
        part, row = each.worst, each.sequence
        generated = row.versions[row.loss_mask]
        table.add_row(
            row.id,
            f"{part.gradient_norm:.4g}",
            f"{part.share:.1%}",
            f"{part.loss:.4g}",
            f"{row.reward:.4g}",
            f"{prepared.advantages_S[part.where_N].mean() if len(part.where_N) else 0:.4g}",
            str(int(row.loss_mask.sum())),
            f"{step - int(generated.min())}" if len(generated) else "",
            *((f"{each.critics.gradient_norm:.4g}", f"{each.critics.loss:.4g}") if each.critics is not None else ()),
        )
    console.print(table)
    for each in found[: max(1, min(top, 2))]:
        console.print(_tokens(engine, prepared, each, step, tokens))
        console.print(_conversation(each.sequence))
    worst = max((each.worst for each in found), key=_badness)
    recorded = _recorded_not_finite([each.sequence for each in found])
    critics = [each for each in found if not math.isfinite(_badness_of_critic(each.critics))]
    if recorded is not None or not math.isfinite(_badness(worst)):
        where = recorded or worst.first_not_finite or "everything is finite when this sequence is computed alone"
        print(f"FIRST NOT FINITE  {where}")
    elif critics:
        ids = sorted(each.sequence.id for each in critics)
        print(f"FIRST NOT FINITE  the critic's loss or gradient of {ids[0]} (of {len(ids)} sequences; see --by critic)")


def _recorded_not_finite(batch: list[Sequence]) -> str | None:
    """What of the data itself no number can come of: others' advantages follow from it, too."""
    for row in batch:
        if not math.isfinite(row.reward):
            return f"the recorded reward of {row.id}: {row.reward}"
        of_tokens = {"behaviour logprob": np.isfinite(row.logprobs), "temperature": row.temperatures > 0}
        for kind, good_T in of_tokens.items():
            bad = np.flatnonzero(row.loss_mask & ~good_T)
            if len(bad):
                return f"the recorded {kind} of token {bad[0]} of {row.id}"
    return None


def _tokens(engine: TrainEngine, prepared: Prepared, each: Blamed, step: int, count: int) -> Table:
    """The tokens that pull most."""
    part, row = each.worst, each.sequence
    first = int(prepared.tokens.starts[part.row])
    pull_N = np.where(np.isfinite(part.weights_N), part.weights_N, np.inf)
    order = np.argsort(-pull_N, kind="stable")[:count]
    table = Table(title=f"{row.id}: the tokens that pull most", title_justify="left", box=None, pad_edge=False)
    for name in ("token", "text", "pull", "behaviour", "proximal", "current", "reference", "advantage", "lag", "loss"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for n in order:
        at = int(part.where_N[n])
        position = at - first
        token = int(row.input_ids[position])
        proximal = part.logprobs_N[n] if prepared.proximal_S is None else prepared.proximal_S[at]
        reference = "" if prepared.reference_S is None else f"{prepared.reference_S[at]:.4f}"
        table.add_row(
            str(position),
            Text(repr(engine.tokenizer.decode([token]) or f"⟨{token}⟩")),
            f"{pull_N[n]:.3g}",
            f"{row.logprobs[position]:.4f}",
            f"{proximal:.4f}",
            f"{part.logprobs_N[n]:.4f}",
            reference,
            f"{prepared.advantages_S[at]:.4g}",
            str(step - int(row.versions[position])),
            f"{part.losses_N[n]:.4g}",
        )
    return table


def _conversation(row: Sequence) -> Text:
    shown = Text(f"{row.id}: {row.episode_id}, {row.finish_reason}, rewards {row.rewards}\n")
    for said in row.interactions:
        shown.append(
            f"  prompt      {shortened(said['prompt'], CUT)}\n  completion  {shortened(said['completion'], CUT)}\n"
        )
    return shown
