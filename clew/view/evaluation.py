"""The output of `clew eval`: a table of models, failed episodes, and prompts that do not pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from clew.printing import counted
from clew.record.run_warnings import named_kinds
from clew.view.text import MISSING, Rows, number, one_line, prompt_text

MISSED_SHOWN = 10
ERRORS_SHOWN = 3


def show_models(
    console: Console,
    names: Sequence[str],
    summaries: Sequence[dict[str, Any]],
    behind: Sequence[tuple | None],
    best: int,
) -> None:
    """Print a row per model, with 95 % confidence intervals.

    Args:
        summaries: Summaries of their evaluations, as `clew.rollout.evaluation_summary.summarize` returns them.
        behind: 95 % interval of the best model's pass@1 minus each model's; None if it is not known.
        best: Index of the best model in `names`.
    """
    scores = [*(name for name in summaries[0] if name.startswith("pass@")), "reward"]
    spare = [f"95 % CI of {name}" for name in scores[:0:-1]]
    several = len(names) > 1
    shown = Rows(
        "model",
        *(column for name in scores for column in (name, f"95 % CI of {name}")),
        *(("behind the best",) if several else ()),
        *("length", "truncated", "episodes", "failed", "seconds"),
        left=("model",),
        spare=("truncated", "length", spare[0], "seconds", *spare[1:]),
    )
    for place, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        difference = "best" if place == best else _difference(behind[place])
        shown.add_row(
            name,
            *(cell for score in scores for cell in (number(summary[score]), _interval(summary["intervals"][score]))),
            *((difference,) if several else ()),
            number(summary["length"], ".1f"),
            number(summary["truncated"]),
            str(summary["episodes"]),
            str(summary["failed"]),
            number(summary["seconds"], ".1f"),
        )
    console.print(shown)


def _interval(bounds: Sequence[float] | None) -> str:
    return MISSING if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _difference(bounds: Sequence[float] | None) -> str:
    if bounds is None:
        return MISSING
    chance = "" if bounds[0] > 0 else " (may be chance)"
    return f"{(bounds[0] + bounds[1]) / 2:.3f} ± {(bounds[1] - bounds[0]) / 2:.3f}{chance}"


def show_failed(console: Console, name: str, episodes: Sequence[dict[str, Any]]) -> None:
    kinds = Counter(named_kinds([each["error"] for each in episodes if each["error"] is not None]))
    if not kinds:
        return
    console.print(f"\n{counted(kinds.total(), 'episode')} of {name} failed and are left out of all other numbers:")
    for kind, count in kinds.most_common(ERRORS_SHOWN):
        console.print(Text(f"  {count} x {kind}"))
    if len(kinds) > ERRORS_SHOWN:
        console.print("  and other errors; --to FILE writes them all")


def show_missed(console: Console, name: str, episodes: Sequence[dict[str, Any]], prompt: str) -> None:
    """Print the rows that pass least often, each with the answer of an episode that did not pass.

    `clew.diagnose.evaluate.EPISODES` describes the episodes. `prompt` is the column of the data with the prompt.
    """
    by_row: dict[int, list[dict[str, Any]]] = {}
    for episode in episodes:
        if episode["error"] is None:
            by_row.setdefault(episode["row"], []).append(episode)
    rates = {row: sum(each["passed"] for each in of_row) / len(of_row) for row, of_row in by_row.items()}
    missed = sorted((row for row in rates if rates[row] < 1), key=lambda row: (rates[row], row))
    if not missed:
        return
    always = "always " if any(len(of_row) > 1 for of_row in by_row.values()) else ""
    console.print(f"\n{len(missed)} of {len(rates)} prompts did not {always}pass with {name}:")
    shown = Rows("row", "passed", "reward", "prompt", "answer", words=("prompt", "answer"))
    for row in missed[:MISSED_SHOWN]:
        of_row = by_row[row]
        example = next(each for each in of_row if not each["passed"])
        shown.add_row(
            str(row),
            f"{sum(each['passed'] for each in of_row)}/{len(of_row)}",
            number(sum(each["reward"] for each in of_row) / len(of_row)),
            one_line(prompt_text(json.loads(example["data"])[prompt])),
            one_line(example["answer"]),
        )
    console.print(shown)
    if len(missed) > MISSED_SHOWN:
        console.print(f"and {len(missed) - MISSED_SHOWN} more; --to FILE writes them all")
