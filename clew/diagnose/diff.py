"""`clew diff A B`: find where two runs first differ, what could explain it, and how far they drift apart.

It needs no torch and reads only what both runs recorded, so it also compares runs of other trainers (see
`clew.record.Writer`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from clew.config import field_names
from clew.console import EscapingConsole
from clew.diagnose import causes
from clew.diagnose.causes import Pair, is_ignored, print_list
from clew.diagnose.first_difference import METRICS, SAMPLING_NOISE, Comparison, compare_runs
from clew.diagnose.stages import chain_holds, suggestions
from clew.errors import ConfigError, RecordError
from clew.loop import differences
from clew.loop.differences import Difference
from clew.loop.tolerance import EXACT
from clew.printing import few, print
from clew.reading import read_yaml
from clew.record.bundle import opened
from clew.record.files import explain_disk_errors, write_bytes
from clew.record.run import RunDirectory

DRIFT = ("reward", "loss", "grad_norm", "entropy", "behaviour_k3")

SCORES = ("pass@1", "reward", "loss")
"""Numbers of an evaluation whose drift is printed; `loss` is that of `clew sft`."""


def diff(a: Path, b: Path, *, ignore: list[str], plot: Path | None) -> bool:
    """Print how two runs, or bundles of them, compare. The help of `clew diff` describes the arguments.

    Returns:
        True if all steps that both runs have agree, no other difference was found, and both records are intact.

    Raises:
        RecordError: A run cannot be read, or the two have no step in common.
        ConfigError: `ignore` names no field or section of the configuration.
    """
    if unknown := [name for name in ignore if name and not any(is_ignored(field, [name]) for field in field_names())]:
        raise ConfigError(f"--ignore {unknown[0]}: no field or section of the configuration has this name.")
    with opened(a) as (left, bundle_a), opened(b) as (right, bundle_b):
        runs, names = (left, right), _short_names(a, b)
        steps = _common_steps(runs, bundle_a, bundle_b)
        comparison = compare_runs(runs, steps)
        how = _how_compared(comparison, steps)
        print(f"{names[0]} and {names[1]}: steps {steps[0]} to {steps[-1]} of both, compared {how}")
        unbroken = [chain_holds(run, steps, f"{name}: ") for run, name in zip(runs, names, strict=True)]
        without_data = _without_data(runs, steps, names, exact=comparison.tolerance.exact)
        for line in without_data:
            print(line)
        held_out = causes.other_held_out(runs, {*steps, steps.stop})
        exact, still_different = comparison.tolerance.exact, list[str]()
        if comparison.difference is None:
            still_different = [*_still_different(runs, steps), *held_out] if exact else []
            print("everything that was compared agrees." if without_data else "every stage of every step agrees.")
            for line in still_different:
                print(f"STILL DIFFERENT  {line}")
            causes.note_configuration(runs, steps, names, ignore)
            plans = "" if exact else ", plans of micro-batches"
            print(f"not compared: contents of checkpoint and image files{plans} (`clew replay` compares them).")
        else:
            _print_difference(runs, comparison.difference, comparison.reasons, steps, names, ignore, named=a)
            print_list("evaluations", held_out, names)
        _print_drift(runs, steps, names)
        if plot is not None:
            _plot(runs, steps, names, plot)
            print(f"plot: {plot}")
        return comparison.difference is None and not still_different and all(unbroken)


# What is compared -----------------------------------------------------------------------------------------------------


def _short_names(a: Path, b: Path) -> tuple[str, str]:
    """Return two short names that differ: the last parts of the paths, or A and B."""
    parts = [path.resolve().parts for path in (a, b)]
    for length in range(1, 6):
        short = ["/".join(each[-length:]) for each in parts]
        if short[0] != short[1]:
            return short[0], short[1]
    return "A", "B"


def _common_steps(runs: Pair, *bundles: dict[str, Any] | None) -> range:
    """Return the steps that both runs have committed. Raises RecordError if there are none."""
    counts = [run.steps.count() for run in runs]
    for run, count in zip(runs, counts, strict=True):
        if not count:
            raise RecordError(f"Cannot compare {run.path}: it has no committed step.")
    first = max((bundle["first"] for bundle in bundles if bundle is not None), default=0)
    if first >= min(counts):
        raise RecordError(
            f"Cannot compare {runs[0].path} with {runs[1].path}: they have no step in common. One begins with "
            f"step {first}, the other ends with step {min(counts) - 1}."
        )
    return range(first, min(counts))


def _how_compared(comparison: Comparison, steps: range) -> str:
    """Return words that say how strictly the steps were compared, and why."""
    if not comparison.reasons:
        return str(comparison.tolerance)
    before = f"{EXACT} up to step {comparison.apart - 1}, then " if comparison.apart > steps[0] else ""
    return f"{before}{comparison.tolerance} ({'; '.join(comparison.reasons)})"


def _without_data(runs: Pair, steps: range, names: tuple[str, str], *, exact: bool) -> list[str]:
    """Return lines that name the steps whose stages were not compared, because a run lacks their sequences.

    Args:
        exact: True if the runs are compared bit for bit.
    """
    what = "digests and metrics are" if exact else f"only the groups, {', '.join(METRICS[:-1])} and {METRICS[-1]} are"
    having = [tuple(run.steps.has_data(step) for run in runs) for step in steps]
    who = {(True, False): f"only {names[0]} has", (False, True): f"only {names[1]} has", (False, False): "neither has"}
    lines: list[str] = []
    for case, words in who.items():
        lacking = [step for step, of_step in zip(steps, having, strict=True) if of_step == case]
        if lacking:
            which = f"step{'s' * (len(lacking) > 1)} {few(lacking)}"
            whose = "their" if len(lacking) > 1 else "its"
            lines.append(f"{words} the sequences of {which}: {what} compared, not {whose} stages")
    return lines


# The first difference -------------------------------------------------------------------------------------------------


def _print_difference(
    runs: Pair,
    difference: Difference,
    reasons: list[str],
    steps: range,
    names: tuple[str, str],
    ignore: list[str],
    *,
    named: Path,
) -> None:
    """Print the first difference, what it suggests, and everything on record that could have caused it.

    Args:
        reasons: Reasons why the step is not compared bit for bit.
        named: Path of the first run, as the user gave it.
    """
    step, stage = difference.step, difference.stage
    changed = causes.configuration_changes(runs, step)
    counted = {name: line for name, line in changed.items() if not is_ignored(name, ignore)}
    print_list("configuration", counted.values(), names)
    if len(counted) < len(changed):
        print(f"left out: {', '.join(name for name in changed if name not in counted)}")
    if counted and _differ_by_chance(runs, difference, counted):
        _print_effect_of_configuration(runs, difference, steps, names, counted, named)
    else:
        print(f"FIRST DIFFERENCE  {difference.in_words(*names)}")
    for line in suggestions(difference, {f"{name}: ": run for name, run in zip(names, runs, strict=True)}):
        print(line)
    if factor := causes.factor_between(runs, difference, names):
        print(f"this suggests: {factor}")
    if stage == "data":
        for line in causes.other_prompts(runs, steps, names):
            print(f"rows of data: {line}")
    if runs[0].steps.by_clew and stage == "data" and difference.where.endswith((", reward", ", rewards")):
        again = f"clew replay {shlex.quote(str(named))} --step {step} --reward"
        print(f"the tokens agree: `{again}` shows what the reward function returns now")
    print_list("changed later", causes.code_changed_later(runs, range(step, steps.stop)), names)
    environment = [reason for reason in reasons if reason != SAMPLING_NOISE]
    explained = causes.print_explanation(runs, difference, names, environment)
    if not (changed or explained):
        print(
            "configuration, environment, packages, tokenizer and the files of configured functions are "
            "the same: what differs was altered, or is not recorded, such as the content of the data file, an "
            "environment variable or a module that a configured function imports"
        )


CHOOSING = ("data.", "rollout.batch_groups", "rollout.n_samples", "rollout.drop_equal_rewards", "seed")
"""Prefixes of the fields that decide which groups there are, and how many make a batch."""


def _differ_by_chance(runs: Pair, difference: Difference, changed: Collection[str]) -> bool:
    """Return whether asynchronous runs may have taken different groups only because of timing.

    Timing decides which groups finish first, and so which of them make a batch.

    Args:
        changed: Fields of the configuration that differ.
    """
    if any(field.startswith(CHOOSING) for field in changed):
        return False
    other_groups = difference.stage == "data" and "absent" in (difference.recorded, difference.found)
    lags = [causes.values_at(run, difference.step).get("rollout.max_lag") for run in runs]
    return other_groups and any(isinstance(lag, int) and lag > 0 for lag in lags)


def _print_effect_of_configuration(
    runs: Pair, difference: Difference, steps: range, names: tuple[str, str], changed: Collection[str], named: Path
) -> None:
    """Print the first metric that differs because of the configuration, and that the runs took different groups.

    Then print the command that shows the effect of the changed settings alone. If the batches differ, only a metric
    named like a changed field, such as `lr`, is certain to follow from it.
    """
    fields = {field.rpartition(".")[2]: field for field in changed}
    for step in steps:
        sides = [run.steps.read(step).get("metrics", {}) for run in runs]
        own = [{name: side[name] for name in fields if name in side} for side in sides]
        if (metric := differences.in_metrics(step, *own)) is not None:
            print(f"FIRST DIFFERENCE  {metric.in_words(*names)}, which follows from {fields[metric.where]}")
            break
    by_chance = "as asynchronous runs do by chance (rollout.max_lag)"
    print(f"the runs took different groups, {by_chance}: {difference.in_words(*names)}")
    values = {field: causes.values_at(runs[1], difference.step).get(field) for field in changed}
    changes = [
        shlex.quote(f"{field}={value if isinstance(value, str) else json.dumps(value)}")
        for field, value in values.items()
        if field.startswith(("training.", "algorithm."))
    ]
    if changes:
        command = f"clew replay {shlex.quote(str(named))} {' '.join(changes)} trial=NAME"
        print(f"to see the effect of these settings alone: `{command}`")


# Beside the steps -----------------------------------------------------------------------------------------------------


def _still_different(runs: Pair, steps: range) -> list[str]:
    """Return a line for each thing that differs although all stages agree.

    These are plans of micro-batches, entries of checkpoint.json, and evaluations. A checkpoint's other files are not
    read: checkpoint.json has their digests.
    """
    lines = []
    for step in steps:
        plans = [run.steps.read(step).get("plan") for run in runs]
        if None not in plans and plans[0] != plans[1]:
            lines.append(f"step {step}: the plan of micro-batches")
            break
    both = set.intersection(*({*run.checkpointed()} for run in runs))
    for version in sorted(both & {*steps, steps.stop}):
        if keys := _other_keys(*(causes.manifest_of(run, version) for run in runs)):
            lines.append(f"checkpoints/{runs[0].checkpoint(version).name}: {', '.join(keys)}")
    return [*lines, *_other_evaluations(runs, {*steps, steps.stop})]


def _other_evaluations(runs: Pair, versions: set[int]) -> Iterator[str]:
    """Yield a line for each evaluation that differs.

    An evaluation that only one run has counts if both runs have evaluations and the same `eval` section.
    """
    sides = [_evaluations(run) for run in runs]
    wanted = [read_yaml(run.config_path).get("eval") if run.config_path.exists() else None for run in runs]
    for version in sorted({*sides[0], *sides[1]} & versions):
        then, now = (side.get(version) for side in sides)
        if then is not None and now is not None:
            if keys := _other_keys(then, now):
                yield f"the evaluation of version {version}: {', '.join(keys)}"
        elif all(sides) and wanted[0] == wanted[1]:  # a bundle has no evaluations
            yield f"the evaluation of version {version}: only one of the two has it"


def _evaluations(run: RunDirectory) -> dict[int, dict[str, Any]]:
    return {each["version"]: each for each in run.evals.read_all()}


def _other_keys(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys whose values differ, except those that differ between any two runs."""
    keys = {*then, *now} - {"follows", "rows", "seal", "seconds"}
    return sorted(key for key in keys if repr(then.get(key)) != repr(now.get(key)))  # NaN is not equal to NaN


def _print_drift(runs: Pair, steps: range, names: tuple[str, str]) -> None:
    """Print the metrics of both runs at evenly spaced steps, and the evaluations that both made."""
    stride = max(1, len(steps) // 9)
    chosen = sorted({*steps[::stride], steps[-1]})
    rows = [(step, *(run.steps.read(step).get("metrics", {}) for run in runs)) for step in chosen]
    metrics = [name for name in DRIFT if all(name in each for row in rows for each in row[1:])]
    console = EscapingConsole(wide=160)
    if metrics:  # another trainer may have recorded none
        console.print(causes.table_of_changes("step", metrics, rows, title=f"{names[0]} → {names[1]}"))
    sides = [_evaluations(run) for run in runs]
    both = sorted({*sides[0]} & {*sides[1]} & {*steps, steps.stop})
    if both:
        rows = [(version, sides[0][version], sides[1][version]) for version in both]
        scores = [name for name in SCORES if all(each.get(name) is not None for row in rows for each in row[1:])]
        console.print()
        console.print(causes.table_of_changes("evaluation of version", scores, rows))


def _plot(runs: Pair, steps: range, names: tuple[str, str], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = [[run.steps.read(step).get("metrics", {}) for step in steps] for run in runs]
    metrics = [name for name in DRIFT if all(name in each for side in series for each in side)]
    if not metrics:
        raise RecordError(f"Cannot plot: none of the metrics {', '.join(DRIFT)} is on record for all of these steps.")
    figure = Figure(figsize=(8, 2.2 * len(metrics)))
    axes = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], metrics, strict=True):
        for side, label, style in zip(series, names, ("-", "--"), strict=True):
            axis.plot(list(steps), [each[name] for each in side], style, label=label, linewidth=1.4)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(frameon=False, ncols=2)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.tight_layout()
    figure.savefig(drawn := BytesIO(), dpi=120, format="png")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, drawn.getvalue())
