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
from clew.diagnose.parts import Part, Parts, parts_of
from clew.errors import ConfigError, RecordError
from clew.printing import print
from clew.record.bundle import opened
from clew.record.rows import Sequence
from clew.rollout.rewards import shortened

BY = ("gradient", "loss", "kl", "behaviour_k3", "pull", "critic")
"""Measures by which sequences can be ranked."""
CUT = 400
"""Number of characters of a prompt or a completion that are shown."""
TOKEN = {
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
"""Columns shown for a token where its value is known, with their number formats. kl and behaviour_k3 are shown only if
sequences are ranked by them."""


def blame(target: Path, step: int, *, top: int, tokens: int, by: str | None, trust: SequenceABC[str] = ()) -> None:
    """Print the sequences of a step, worst first. The help of `clew blame` describes the arguments.

    Raises:
        ClewError: The step cannot be read or trained, or the measure is not known for it.
    """
    if by not in (None, *BY):
        raise ConfigError(f"--by {by}: expected {', '.join(BY[:-1])} or {BY[-1]}.")
    with opened(target, trust) as (run, _):
        count = run.steps.count()
        if not (0 <= step < count or (step == count and run.steps.has_data(step))):
            committed = f"the steps 0 to {count - 1}" if count else "no step"
            begun = f", and begun step {count}" if run.steps.has_data(count) else ""
            raise RecordError(f"{run.path} has no batch of step {step}: it has committed {committed}{begun}.")
        if run.supervised:
            raise RecordError(
                f"{run.path} is a run of `clew sft`, and blame compares parts of the loss that only reinforcement "
                f"learning has. `clew show {run.path} {step}` shows its rows; the stage `loss` in "
                f"{run.steps.stage_path(step, 0)} has the loss of each token."
            )
        found = parts_of(run, step)
        by = by or ("pull" if found.only_recorded else "gradient")
        if not any(by in part.measures for part in found.parts):
            raise ConfigError(f"--by {by}: {found.without[by]}{found.only_recorded and f'; {found.only_recorded}'}.")
        _show(found, step, top=top, tokens=tokens, by=by)


def _badness(part: Part, by: str) -> float:
    """Return the absolute value of a sequence's measure; inf if it, or another number of the sequence, is not finite.

    When sequences are ranked by the critic, only the measure itself counts.
    """
    value = abs(part.measures[by])
    return value if math.isfinite(value) and (part.finite or by == "critic") else math.inf


def _show(found: Parts, step: int, *, top: int, tokens: int, by: str) -> None:
    console = EscapingConsole(wide=160)
    parts = sorted(found.parts, key=lambda part: (-_badness(part, by), part.sequence.id))
    median = statistics.median_low(_badness(part, by) for part in parts)
    # Each sequence's kl is divided by the number of tokens of the step, so that the sum is the mean over all tokens.
    mean = f"{sum(part.measures[by] for part in parts):.3g} in all, " if by in ("kl", "behaviour_k3") else ""
    count = f"{len(parts)} sequences" if len(parts) == found.count else f"{len(parts)} of {found.count} sequences"
    print(f"step {step}: {count}, worst first by {by} ({mean}median {median:.3g})")
    if found.only_recorded:
        print(f"from the record alone: {found.only_recorded}")
    console.print(_sequences(parts[:top], step, by))
    for part in parts[: max(1, min(top, 2))]:
        console.print(_tokens(part, found, tokens, by))
        console.print(_conversation(part.sequence))
    if (where := _not_finite(found)) is not None:
        print(f"FIRST NOT FINITE  {where}")


def _sequences(parts: list[Part], step: int, by: str) -> Table:
    names = list(dict.fromkeys(name for part in parts for name in part.shown))
    names += [by] * (by not in ("critic", *names))
    table = numbers_table("sequence", *names, "reward", "advantage", "tokens", "lag", left=("sequence",))
    for part in parts:
        row, numbers = part.sequence, {**part.measures, **part.shown}
        generated = row.versions[row.loss_mask]
        table.add_row(
            Text(row.id),
            *(
                "" if name not in numbers else f"{numbers[name]:{'.1%' if name in ('share', 'rejected') else '.4g'}}"
                for name in names
            ),
            f"{row.reward:.4g}",
            f"{part.tokens['advantage'].mean() if len(generated) else 0:.4g}",
            str(len(generated)),
            f"{step - int(generated.min())}" if len(generated) else "",
        )
    return table


def _tokens(part: Part, found: Parts, count: int, by: str) -> Table:
    """Return a table of the tokens with the largest pull, or with the largest value of `by` if tokens have one."""
    row, worst = part.sequence, by if by in TOKEN else "pull"
    title = f"{row.id}: the tokens that pull most" if worst == "pull" else f"{row.id}: the tokens with the most {worst}"
    names = [name for name in TOKEN if name in part.tokens and (name == by or name not in ("kl", "behaviour_k3"))]
    table = numbers_table("token", "text", *names, left=("text",), title=Text(title))
    for n in np.argsort(-np.nan_to_num(np.abs(part.tokens[worst]), nan=np.inf), kind="stable")[:count]:
        position = int(part.tokens["position"][n])
        token = int(row.input_ids[position])
        text = found.decode(token)
        numbers = (f"{part.tokens[name][n]:{TOKEN[name]}}" for name in names)
        table.add_row(str(position), Text(repr(text) if text else f"⟨{token}⟩"), *numbers)
    return table


def _conversation(row: Sequence) -> Text:
    shown = Text(f"{row.id}: {row.episode_id}, {row.finish_reason or 'finish reason unknown'}, rewards {row.rewards}\n")
    for place, entry in enumerate(row.interactions or [row.data]):  # another trainer may record none, or other fields
        if isinstance(entry, dict) and {"prompt", "completion"} <= entry.keys():
            if entry["prompt"] is not None:
                shown.append(f"  prompt      {shortened(entry['prompt'], CUT)}\n")
            elif place == 0:  # no text of the prompt was recorded: show the row, once
                shown.append(f"  data        {shortened(row.data, CUT)}\n")
            shown.append(f"  completion  {shortened(entry['completion'], CUT)}\n")
        else:
            shown.append(f"  {'interaction' if row.interactions else 'data       '} {shortened(entry, CUT)}\n")
    return shown


def _not_finite(found: Parts) -> str | None:
    """Return where the first NaN or infinity appears, as far as that is known; None if all numbers are finite."""
    if found.not_finite is not None:
        return found.not_finite
    if bad := sorted((part for part in found.parts if not part.finite), key=lambda part: part.sequence.id):
        return bad[0].not_finite or "everything is finite when this sequence is computed alone"
    critics = sorted(part.sequence.id for part in found.parts if not math.isfinite(part.measures.get("critic", 0.0)))
    if critics:
        return f"the critic's loss or gradient of {critics[0]} (of {len(critics)} sequences; see --by critic)"
    return None
