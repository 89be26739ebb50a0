"""`clew blame`: find the sequences, and the tokens in them, that had the most effect on a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as SequenceABC
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from clew.console import EscapingConsole, numbers_table
from clew.diagnose.attribution import SequenceAttribution, StepAttribution, attribute_step
from clew.errors import ConfigError, RecordError
from clew.printing import print
from clew.record.bundle import opened
from clew.record.rows import Sequence
from clew.rollout.reward_function import shortened

BY = ("gradient", "loss", "kl", "behaviour_k3", "pull", "critic")
"""Measures by which sequences can be ranked."""
CUT = 400
"""Number of characters of a prompt or a completion that are shown."""
TOKEN_COLUMNS = {
    "kl": ".3g",
    "behaviour_k3": ".3g",
    "pull": ".3g",
    "behaviour": ".4f",
    "proximal": ".4f",
    "current": ".4f",
    "reference": ".4f",
    "advantage": ".4g",
    "lag": "d",
    "rejected": ".0f",
    "loss": ".4g",
}
"""Columns of the table of tokens, with their number formats. A column is shown if its values are known; kl and
behaviour_k3 only if sequences are ranked by them."""


def blame(target: Path, step: int, *, top: int, tokens: int, by: str | None, trust: SequenceABC[str] = ()) -> None:
    """Print the sequences of a step, worst first. The help of `clew blame` describes the arguments.

    Raises:
        ClewError: The step cannot be read or trained, or the measure is not known for it.
    """
    if by not in (None, *BY):
        raise ConfigError(f"--by {by}: expected {', '.join(BY[:-1])} or {BY[-1]}.")
    with opened(target, trust) as (run, bundle):
        count = run.steps.count()
        if not (0 <= step < count or (step == count and run.steps.has_data(step))):
            committed = f"steps 0 to {count - 1}" if count else "no step"
            begun = f", and begun step {count}" if run.steps.has_data(count) else ""
            raise RecordError(f"{run.path} has no batch of step {step}: it has committed {committed}{begun}.")
        if bundle is not None and step < bundle["first"]:
            raise RecordError(f"--step {step}: the bundle {target} holds the steps {bundle['first']} to {count - 1}.")
        if run.supervised:
            where = f"The rows are in {run.steps.data_path(step)}."
            if step < count:
                where = (
                    f"`clew show {run.path} {step}` shows its rows; the stage `loss` in "
                    f"{run.steps.stage_path(step, 0)} has the loss of each token."
                )
            raise RecordError(
                f"{run.path} is a run of `clew sft`, and blame compares parts of the loss that only reinforcement "
                f"learning has. {where}"
            )
        attribution = attribute_step(run, step)
        by = by or ("pull" if attribution.only_recorded else "gradient")
        if not any(by in entry.measures for entry in attribution.sequences):
            why = attribution.only_recorded
            raise ConfigError(f"--by {by}: {attribution.why_unknown[by]}{why and f'; {why}'}.")
        _show(attribution, step, top=top, tokens=tokens, by=by)


def _badness(entry: SequenceAttribution, by: str) -> float:
    """Return the absolute value of a sequence's measure; inf if it, or another number of the sequence, is not finite.

    When sequences are ranked by the critic, only the measure itself counts.
    """
    value = abs(entry.measures[by])
    return value if math.isfinite(value) and (entry.finite or by == "critic") else math.inf


def _show(attribution: StepAttribution, step: int, *, top: int, tokens: int, by: str) -> None:
    console = EscapingConsole(wide=160)
    sequences = sorted(attribution.sequences, key=lambda entry: (-_badness(entry, by), entry.sequence.id))
    median = statistics.median_low(_badness(entry, by) for entry in sequences)
    # Each sequence's kl is already divided by the step's number of trained tokens: the sum is the mean over these.
    in_all = f"{sum(entry.measures[by] for entry in sequences):.3g} in all, " if by in ("kl", "behaviour_k3") else ""
    of_all = f" of {attribution.count}" if len(sequences) < attribution.count else ""
    print(f"step {step}: {len(sequences)}{of_all} sequences, worst first by {by} ({in_all}median {median:.3g})")
    if attribution.only_recorded:
        print(f"from the record alone: {attribution.only_recorded}")
    console.print(_sequences(sequences[:top], step, by))
    for entry in sequences[: max(1, min(top, 2))]:
        console.print(_tokens(entry, attribution, tokens, by))
        console.print(_conversation(entry.sequence))
    if (where := _not_finite(attribution)) is not None:
        print(f"FIRST NOT FINITE  {where}")


def _sequences(sequences: list[SequenceAttribution], step: int, by: str) -> Table:
    names = list(dict.fromkeys(name for entry in sequences for name in entry.shown))
    if by not in names and by != "critic":  # the critic's gradient is shown already
        names.append(by)
    formats = {name: ".1%" if name in ("share", "rejected") else ".4g" for name in names}
    table = numbers_table("sequence", *names, "reward", "advantage", "tokens", "lag", left=("sequence",))
    for entry in sequences:
        row, numbers = entry.sequence, {**entry.measures, **entry.shown}
        generated = row.versions[row.loss_mask]
        table.add_row(
            Text(row.id),
            *(format(numbers[name], formats[name]) if name in numbers else "" for name in names),
            f"{row.reward:.4g}",
            f"{entry.tokens['advantage'].mean() if len(generated) else 0:.4g}",
            str(len(generated)),
            f"{step - int(generated.min())}" if len(generated) else "",
        )
    return table


def _tokens(entry: SequenceAttribution, attribution: StepAttribution, count: int, by: str) -> Table:
    """Return a table of the tokens with the largest pull, or with the largest value of `by` if tokens have one."""
    row, worst = entry.sequence, by if by in TOKEN_COLUMNS else "pull"
    title = f"{row.id}: the tokens with the most {worst}"
    names = [
        name for name in TOKEN_COLUMNS if name in entry.tokens and (name == by or name not in ("kl", "behaviour_k3"))
    ]
    table = numbers_table("token", "text", *names, left=("text",), title=Text(title))
    for n in np.argsort(-np.nan_to_num(np.abs(entry.tokens[worst]), nan=np.inf), kind="stable")[:count]:
        position = int(entry.tokens["position"][n])
        token = int(row.input_ids[position])
        text = attribution.decode(token)
        numbers = (f"{entry.tokens[name][n]:{TOKEN_COLUMNS[name]}}" for name in names)
        table.add_row(str(position), Text(repr(text) if text else f"⟨{token}⟩"), *numbers)
    return table


def _conversation(row: Sequence) -> Text:
    shown = Text(f"{row.id}: {row.episode_id}, {row.finish_reason or 'finish reason unknown'}, rewards {row.rewards}\n")
    for place, entry in enumerate(row.interactions or [row.data]):  # another trainer may record none, or other fields
        if isinstance(entry, dict) and {"prompt", "completion"} <= entry.keys():
            if entry["prompt"] is not None:
                shown.append(f"  prompt      {shortened(entry['prompt'], CUT)}\n")
            elif place == 0:  # the prompt's text was not recorded: show the row of data instead, once
                shown.append(f"  data        {shortened(row.data, CUT)}\n")
            shown.append(f"  completion  {shortened(entry['completion'], CUT)}\n")
        else:
            shown.append(f"  {'interaction' if row.interactions else 'data       '} {shortened(entry, CUT)}\n")
    return shown


def _not_finite(attribution: StepAttribution) -> str | None:
    """Return where the first NaN or infinity appears, as far as that is known; None if all numbers are finite."""
    sequences = sorted(attribution.sequences, key=lambda entry: entry.sequence.id)
    if attribution.not_finite is not None:
        return attribution.not_finite
    if bad := [entry for entry in sequences if not entry.finite]:
        return bad[0].not_finite or f"{bad[0].sequence.id}, but not when it was computed again to find the place"
    critics = [entry.sequence.id for entry in sequences if not math.isfinite(entry.measures.get("critic", 0.0))]
    if critics:
        return f"the critic's loss or gradient of {critics[0]} (of {len(critics)} sequences; see --by critic)"
    return None
