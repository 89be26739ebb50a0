"""The health check that ends `clew show RUN`: it gathers what `health_rules` judges, and prints the concerns."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from clew.errors import RecordError
from clew.printing import visible
from clew.record.evaluations import comparable
from clew.record.rejected import Rejected
from clew.record.run import RunDirectory, changes_in_words
from clew.record.run_warnings import RunWarning
from clew.view import health_rules
from clew.view.find_episode import settings_of
from clew.view.health_rules import Concern, History
from clew.view.text import pairs

STEPS_LOOKED_INTO = 5
"""Maximum number of steps whose batch is read to tell groups whose rewards are all 0 from those with all 1."""


def judge(run: RunDirectory, history: History, rejected: Rejected, warned: Sequence[RunWarning]) -> list[Concern]:
    """Return what deserves a look in this run, most important first.

    Fallen rewards and evaluations come first, then causes that spoil what is learned, then what only wastes time.
    """
    config = settings_of(run)
    equal = health_rules.equal_steps(history, str(config.get("algorithm.advantages", "group")))
    kinds, looked = _equal_kinds(run, equal)
    last = int(history.steps[-1]) if len(history.steps) else -1
    concerns = [
        health_rules.reward(history, changes_of(run)),
        health_rules.negative_rewards(history, _highest_reward(run, last)),
        health_rules.evaluations(history, comparable(run.evals.read_all(), run.facts().get("changes", []))),
        health_rules.contradiction(history),
        health_rules.gradients(history, _positive(config.get("training.spike_factor")), supervised=run.supervised),
        health_rules.mismatch(history),
        health_rules.lag(history, _max_lag(run, config)),
        health_rules.rejections(rejected, history),
        health_rules.rejected_tokens(history),
        health_rules.truncation(history),
        health_rules.clipping(history, *(str(config.get(f"algorithm.{name}")) for name in ("ratio", "loss"))),
        health_rules.equal_rewards(history, equal, kinds, looked),
        health_rules.warnings(warned, last),
    ]
    return [concern for concern in concerns if concern is not None]


def print_health(
    console: Console,
    concerns: Sequence[Concern],
    count: int,
    unjudged: Sequence[str],
    path: Path,
    *,
    broken: bool = False,
) -> None:
    """Print the concerns, each with its evidence and the next command; or say that nothing stands out.

    Args:
        count: Number of steps that were looked at.
        unjudged: What cannot be judged.
        path: The run directory or bundle, as the user gave it.
        broken: True if the chain of commits does not fit together, which is printed below.
    """
    if not count and not concerns:
        return
    steps = f"all {count:,} steps on record" if count != 1 else "the one step on record"
    without = f" Not on record, so not judged: {', '.join(unjudged)}." if count and unjudged else ""
    console.print()
    if not concerns:
        sound = "nothing but the broken chain below stands out" if broken else "sound: nothing stands out"
        console.print(Text(f"health  {sound} in {steps}.{without}"))
        return
    number = "1 thing deserves" if len(concerns) == 1 else f"{len(concerns)} things deserve"
    looked = f"{steps.capitalize()} {'was' if count == 1 else 'were'} looked at" if count else "No step is on record"
    console.print(Text(f"health  {number} a look. {looked}.{without}"))
    lines = []
    for concern in concerns:
        then = health_rules.command(concern.then, path)
        lines.append((concern.cause, Text(f"{visible(concern.evidence)}.\n→ {visible(then)}")))
    console.print(pairs(lines))


def _equal_kinds(run: RunDirectory, steps: Sequence[int]) -> tuple[Counter[float], str]:
    """Count the groups whose episodes all have the same reward, by that reward. Also return the steps read, as text.

    Only a few of the given steps are read, spread over all that still have their batch.
    """
    names = set(os.listdir(run.steps.folder)) if steps else set()  # noqa: PTH208 (ten thousand looks take longer)
    there = [step for step in steps if run.steps.data_path(step).name in names]
    # evenly spread, with the first and the last
    places = np.linspace(0, len(there) - 1, min(len(there), STEPS_LOOKED_INTO))
    chosen = sorted({there[round(place)] for place in places})
    kinds: Counter[float] = Counter()
    for step in chosen:
        rewards: dict[str, set[float]] = {}
        for group, reward in _rewards_by_group(run, step):
            rewards.setdefault(group, set()).add(reward)
        kinds.update(next(iter(each)) for each in rewards.values() if len(each) == 1)
    which = f"{'Step' if len(chosen) == 1 else 'Steps'} {', '.join(map(str, chosen))}"
    return kinds, which


def _highest_reward(run: RunDirectory, step: int) -> float:
    """Return the highest reward of an episode of the step; NaN if it is not on record."""
    rewards = _rewards_by_group(run, step) if step >= 0 and run.steps.has_data(step) else []
    return max((reward for _, reward in rewards), default=math.nan)


def _rewards_by_group(run: RunDirectory, step: int) -> list[tuple[str, float]]:
    """Return group and reward of each sequence of a step; empty for an altered file, which is reported elsewhere."""
    try:
        table = run.steps.read_table(step)
        both = zip(table["group_id"].to_pylist(), table["reward"].to_pylist(), strict=True)
    except (RecordError, KeyError):
        return []
    return [(group, reward) for group, reward in both if isinstance(reward, float)]


def changes_of(run: RunDirectory) -> list[tuple[int, str]]:
    """Return each change of the configuration: the first step that has it, and a description."""
    return [(each["step"], changes_in_words(each["fields"])) for each in run.facts().get("changes", [])]


def _max_lag(run: RunDirectory, config: Mapping[str, Any]) -> int | None:
    """Return the largest rollout.max_lag that the run was ever trained with; None if it is unknown."""
    changes = [change["fields"].get("rollout.max_lag", ()) for change in run.facts().get("changes", [])]
    values = [config.get("rollout.max_lag"), *(value for change in changes for value in change)]
    return max((value for value in values if type(value) is int), default=None)


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
