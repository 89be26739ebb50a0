"""`clew diff A B`: find where two runs first differ, what could explain it, and how far they drift apart.

It needs no torch and reads only what both runs recorded, so it also compares runs of other trainers (see
`clew.record.Writer`).
"""

from __future__ import annotations

import filecmp
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clew import config as configuration
from clew.config import field_names
from clew.console import EscapingConsole, tracked
from clew.diagnose import causes
from clew.diagnose.causes import Pair, is_ignored, print_list
from clew.diagnose.stages import chain_holds, suggestions
from clew.errors import ConfigError, RecordError
from clew.loop import differences
from clew.loop.differences import EXACT, TOLERANCES, Difference, Tolerance
from clew.printing import common_length, few, print
from clew.reading import RESTORE, flat, read_json, read_yaml
from clew.record.batch_digest import digest_rows, from_hex, to_hex
from clew.record.bundle import opened
from clew.record.rows import ALIGNED, COLUMNS, TIMES, Sequence, timeless
from clew.record.summary import rounding_doubt

DRIFT = ("reward", "loss", "grad_norm", "entropy", "behaviour_k3")

SCORES = ("pass@1", "reward", "loss")
"""Numbers of an evaluation whose drift is printed; `loss` is that of `clew sft`."""


def diff(a: Path, b: Path, *, ignore: list[str], plot: Path | None) -> bool:
    """Print how two runs, or bundles of them, compare. The help of `clew diff` describes the arguments.

    Returns:
        True if every step that both runs have is the same and the record of both is intact.

    Raises:
        RecordError: A run cannot be read, or the two have no step in common.
        ConfigError: `ignore` names no field or section of the configuration.
    """
    if unknown := [name for name in ignore if name and not any(is_ignored(field, [name]) for field in field_names())]:
        raise ConfigError(f"--ignore {unknown[0]}: no field of the configuration has this name, nor a section.")
    with opened(a) as (left, bundle_a), opened(b) as (right, bundle_b):
        runs = left, right
        names = _names(a, b)
        steps = _common(runs, bundle_a, bundle_b)
        found, tolerance, environments, apart = _compared(runs, steps)
        how = str(tolerance)
        if environments:
            before = f"{EXACT} up to step {apart - 1}, then " if apart > steps[0] else ""
            how = f"{before}{tolerance} ({'; '.join(environments)})"
        print(f"{names[0]} and {names[1]}: steps {steps[0]} to {steps[-1]} of both, compared {how}")
        unbroken = [chain_holds(run, steps, f"{name}: ") for run, name in zip(runs, names, strict=True)]
        lacking = _without_data(runs, steps, names)
        for line in lacking:
            print(line)
        held_out = causes.other_held_out(runs, {*steps, steps.stop})
        besides = [*_besides(runs, steps), *held_out] if found is None and tolerance.exact else []
        if found is None:
            print("what is compared agrees." if lacking else "every stage of every step agrees.")
            for line in besides:
                print(f"STILL DIFFERENT  {line}")
            causes.note_configuration(runs, steps, names, ignore)
            plans = "" if tolerance.exact else ", plans of micro-batches"
            print(f"not compared: contents of checkpoint and image files{plans} (`clew replay` compares them).")
        else:
            _print_difference(runs, found, steps, names, ignore, environments, named=a)
            print_list("evaluations", held_out, names)
        _drift(runs, steps, names)
        if plot is not None:
            print(f"plot: {_plot(runs, steps, names, plot)}")
        return found is None and not besides and all(unbroken)


def _print_difference(
    runs: Pair,
    found: Difference,
    steps: range,
    names: tuple[str, str],
    ignore: list[str],
    environments: list[str],
    *,
    named: Path,
) -> None:
    """Print the first difference, what it suggests, and everything on record that could have caused it.

    Args:
        environments: What differs in the environments of the step.
        named: Path of the first run, as the user gave it.
    """
    changed = causes.configuration_changes(runs, found.step)
    counted = {name: line for name, line in changed.items() if not is_ignored(name, ignore)}
    print_list("configuration", counted.values(), names)
    if len(counted) < len(changed):
        print(f"left out: {', '.join(name for name in changed if name not in counted)}")
    if counted and _is_chance(runs, found, counted):
        _print_configured(runs, found, steps, names, counted)
    else:
        print(f"FIRST DIFFERENCE  {found.in_words(*names)}")
    for line in suggestions(found, {f"{name}: ": run for name, run in zip(names, runs, strict=True)}):
        print(line)
    if factor := causes.factor_between(runs, found, names):
        print(f"this suggests: {factor}")
    if found.stage == "data":
        for line in causes.other_prompts(runs, steps, names):
            print(f"rows of data: {line}")
    if runs[0].steps.by_clew and found.stage == "data" and found.where.endswith((", reward", ", rewards")):
        again = f"clew replay {named} --step {found.step} --reward"
        print(f"the tokens agree: `{again}` shows what the reward function returns now")
    print_list("changed later", causes.code_changed_later(runs, range(found.step, steps.stop)), names)
    explained = causes.print_explanation(runs, found, names, [each for each in environments if each != SAMPLING_NOISE])
    if not (changed or explained):
        print(
            "configuration, environment, packages, tokenizer and the files of configured functions are "
            "the same: what differs was altered, or is not recorded, such as the content of the data file, an "
            "environment variable or a module that a configured function imports"
        )


def _compared(runs: Pair, steps: range) -> tuple[Difference | None, Tolerance, list[str], int]:
    """Compare the steps of both runs: bit for bit until their digests differ, then with a tolerance if one applies.

    Returns:
        The first difference, the tolerance, the reasons for it, and the first step whose digests differ.
    """
    indices = [run.steps.index() for run in runs]
    differ = (step for step in steps if indices[0][step]["digests"] != indices[1][step]["digests"])
    start = next(differ, steps.stop)
    apart = range(start, steps.stop)
    tolerance, environments = _tolerance(runs, start) if apart else (EXACT, [])
    found = _first_difference(runs, range(steps.start, start), EXACT)
    if found is not None:
        return found, tolerance, environments, start
    found = _first_difference(runs, apart, tolerance)
    if found is not None and tolerance.exact and (doubt := _rounding(runs, found)):
        near = _first_difference(runs, apart, _near(runs))
        if str(near) != str(found):  # the first difference is within rounding
            return near, _near(runs), [doubt], start
    if found is not None and tolerance.exact and _is_sampling_noise(found):
        near = _first_difference(runs, apart, _near(runs))
        if near is not None:  # more than noise differs
            return near, _near(runs), [SAMPLING_NOISE], start
    return found, tolerance, environments, start


SAMPLING_NOISE = "how the engine rounds a logprob depends on which sequences it computes side by side"


def _is_sampling_noise(found: Difference) -> bool:
    """Return whether a difference is in the last digits of a sampled token's logprob."""
    values = (found.recorded, found.found)
    of_logprobs = found.stage == "data" and found.where.endswith(", logprobs") and "absent" not in values
    return of_logprobs and abs(values[0] - values[1]) <= differences.TINY


CHOOSING = ("data.", "rollout.batch_groups", "rollout.n_samples", "rollout.drop_equal_rewards", "seed")
"""Prefixes of the fields that decide which groups there are, and how many make a batch."""


def _is_chance(runs: Pair, found: Difference, changed: Iterable[str]) -> bool:
    """Return whether asynchronous runs differ by chance alone: timing decides which groups finish first and are taken.

    `changed` are the fields of the configuration that differ.
    """
    if any(field.startswith(CHOOSING) for field in changed):
        return False
    other_groups = found.stage == "data" and "absent" in (found.recorded, found.found)
    lags = [causes.values_at(run, found.step).get("rollout.max_lag") for run in runs]
    return other_groups and any(isinstance(lag, int) and lag > 0 for lag in lags)


def _print_configured(
    runs: Pair, found: Difference, steps: range, names: tuple[str, str], changed: Mapping[str, str]
) -> None:
    """Print the first metric that differs because of the configuration, then that the runs took other groups.

    When the batches differ, only a metric named like a changed field, such as `lr`, is certain to follow from it.
    """
    fields = {field.rpartition(".")[2]: field for field in changed}
    for step in steps:
        sides = [run.steps.read(step).get("metrics", {}) for run in runs]
        own = [{name: side[name] for name in fields if name in side} for side in sides]
        if (first := next(differences.in_metrics(step, *own), None)) is not None:
            print(f"FIRST DIFFERENCE  {first.in_words(*names)}, which follows from {fields[first.where]}")
            break
    by_chance = "as asynchronous runs do by chance (rollout.max_lag)"
    print(f"the runs took different groups, {by_chance}: {found.in_words(*names)}")
    values = {field: causes.values_at(runs[1], found.step).get(field) for field in changed}
    changes = [f"{field}={value}" for field, value in values.items() if field.startswith(("training.", "algorithm."))]
    if changes:
        print(f"to see the effect of these settings alone: `clew replay {runs[0].path} {' '.join(changes)} trial=NAME`")


def _besides(runs: Pair, steps: range) -> list[str]:
    """Return what differs although all stages agree: plans of micro-batches, evaluations, entries of checkpoint.json.

    A checkpoint's own files are not read here, only the digests that checkpoint.json names.
    """
    lines = []
    for step in steps:
        plans = [run.steps.read(step).get("plan") for run in runs]
        if None not in plans and plans[0] != plans[1]:
            lines.append(f"step {step}: the plan of micro-batches")
            break
    both = set.intersection(*({*run.checkpointed()} for run in runs))
    for version in sorted(both & {*steps, steps.stop}):
        name = f"step-{version:06d}"
        said = [read_json(run.checkpoints / name / "checkpoint.json", dict[str, Any]) for run in runs]
        if keys := _other_keys(*said):
            lines.append(f"checkpoints/{name}: {', '.join(keys)}")
    return [*lines, *_evaluations(runs, {*steps, steps.stop})]


def _evaluations(runs: Pair, versions: set[int]) -> Iterator[str]:
    """Yield a line for each evaluation that differs.

    An evaluation that only one run has counts if both runs have evaluations and the same `eval` section.
    """
    sides = [{each["version"]: each for each in run.read_evals()} for run in runs]
    wanted = [read_yaml(run.config_path).get("eval") if run.config_path.exists() else None for run in runs]
    for version in sorted({*sides[0], *sides[1]} & versions):
        then, now = (side.get(version) for side in sides)
        if then is not None and now is not None:
            if keys := _other_keys(then, now):
                yield f"the evaluation of version {version}: {', '.join(keys)}"
        elif all(sides) and wanted[0] == wanted[1]:  # a bundle has no evaluations
            yield f"the evaluation of version {version}: only one of the two has it"


def _other_keys(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the keys whose values differ, except those that differ between any two runs."""
    keys = {*then, *now} - {"follows", "rows", "seal", "seconds"}
    return sorted(key for key in keys if repr(then.get(key)) != repr(now.get(key)))  # NaN is not equal to NaN


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Return two short names that differ: the last parts of the paths, or A and B."""
    parts = [path.resolve().parts for path in (a, b)]
    for length in range(1, 6):
        short = ["/".join(each[-length:]) for each in parts]
        if short[0] != short[1]:
            return short[0], short[1]
    return "A", "B"


def _common(runs: Pair, *bundles: dict[str, Any] | None) -> range:
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


def _tolerance(runs: Pair, step: int) -> tuple[Tolerance, list[str]]:
    """Return the tolerance for comparing a step, and what differs in its environment.

    A step that both runs computed in the same environment is compared bit for bit.
    """
    then, now = (run.steps.read(step).get("environment", {}) for run in runs)
    changed = [*causes.differing(flat({**then, "rounding": None}), flat({**now, "rounding": None})).values()]
    return (_near(runs) if changed else EXACT), changed


def _near(runs: Pair) -> Tolerance:
    """Return the tolerance for stages that were computed in different environments."""
    if not all(run.steps.by_clew for run in runs):
        return TOLERANCES["another trainer"]
    dtypes = {configuration.load(run.config_path).model.dtype for run in runs}
    return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda each: each.absolute)


ROUNDED = {*differences.STAGES} - {"rewards", "advantages", "update", "metrics"}
"""Stages that hold what a model computed; `data` holds the logprobs of the tokens when they were sampled."""


def _rounding(runs: Pair, found: Difference) -> str:
    """Return why a difference may be due to rounding alone; empty if it cannot be.

    Gradients or weights that agree bit for bit show that both runs rounded alike.
    """
    then, now = (run.steps.read(found.step) for run in runs)
    if found.stage not in ROUNDED or not ("environment" in then and "environment" in now):
        return ""
    if any(then["digests"].get(kind) == now["digests"].get(kind) for kind in ("gradients", "weights")):
        return ""
    return rounding_doubt(then["environment"], now["environment"])


def _without_data(runs: Pair, steps: range, names: tuple[str, str]) -> list[str]:
    """Return lines that name the steps whose sequences one or both runs lack, so that no stage of them was compared."""
    lines: list[str] = []
    for who, having in ((f"only {names[0]} has", (True, False)), (f"only {names[1]} has", (False, True)),
                        ("neither has", (False, False))):  # fmt: skip
        lacking = [step for step in steps if tuple(run.steps.has_data(step) for run in runs) == having]
        if lacking:
            which = f"step{'s' * (len(lacking) > 1)} {few(lacking)}"
            lines.append(f"{who} the sequences of {which}: digests and metrics are compared, not its stages")
    return lines


def _first_difference(runs: Pair, steps: range, tolerance: Tolerance) -> Difference | None:
    """Return the first difference, stage by stage within each step; None if there is none."""
    looked_at = tracked(steps, "comparing", total=len(steps), unit="steps")
    return next((found for step in looked_at for found in _in_step(runs, step, tolerance)), None)


def _in_step(runs: Pair, step: int, tolerance: Tolerance) -> Iterator[Difference]:
    if _same_files(runs, step):
        return
    then, now = (run.steps.read(step) for run in runs)
    if all(run.steps.has_data(step) for run in runs):
        yield from _in_stages(runs, step, tolerance, then, now)
        if not tolerance.exact:
            return
    else:  # pruned: only the digests are left
        yield from _in_digests(step, then["digests"], now["digests"])
    if tolerance.exact:
        yield from differences.in_metrics(step, then.get("metrics", {}), now.get("metrics", {}))
        yield from _in_digests(step, then["digests"], now["digests"])


def _in_stages(
    runs: Pair, step: int, tolerance: Tolerance, then: dict[str, Any], now: dict[str, Any]
) -> Iterator[Difference]:
    """Yield differences in the sequences of a step, and in what was computed from them.

    `then` and `now` are the step's JSON in the two runs.
    """
    ours, theirs = (run.steps.read_data(step) for run in runs)
    if (found := _in_batches(step, ours, theirs, tolerance)) is not None:
        before, after = digest_rows(ours), digest_rows(theirs)
        differing = [name for name in before if name in after and before[name] != after[name]]
        suggests = found.suggests or differences.of_sequences(differing, list(before), math.inf)
        yield replace(found, suggests=suggests)
    plan = then.get("plan") or [[list(range(len(ours)))]]  # another trainer may record no plan
    if max((row for minibatch in plan for micro in minibatch for row in micro), default=0) >= len(ours):
        raise RecordError(
            f"Cannot compare step {step}: {runs[0].steps.json_path(step)} plans with more sequences than "
            f"{runs[0].steps.data_path(step)} has, so one of the two was altered. {RESTORE.capitalize()}."
        )
    names, others = (run.facts().get("parameters", []) for run in runs)
    yield from differences.in_stages(
        step,
        [row.id for row in ours],
        *(run.steps.read_stages(step, ours).arrays for run in runs),
        plan=plan,
        tensors=(then.get("tensors", {}), _in_order(now.get("tensors", {}), others, names)),
        parameters=names,
        tolerance=tolerance,
    )


def _in_order(tensors: dict[str, Any], names: list[str], wanted: list[str]) -> dict[str, Any]:
    """Return a step's digests of each parameter in the order of another run that has the same parameters.

    Parameters that are not trained come first, so the order differs if the two runs train different ones.
    """
    if names == wanted or sorted(names) != sorted(wanted):
        return tensors

    def ordered(digests: str) -> str:
        if len(digests) != 16 * len(names):  # the step had other parameters, such as a critic's that was dropped later
            return digests
        by_name = dict(zip(names, from_hex(digests), strict=True))
        return to_hex(by_name[name] for name in wanted)

    return {
        kind: ordered(digests) if isinstance(digests, str) else list(map(ordered, digests))
        for kind, digests in tensors.items()
    }


def _in_digests(step: int, then: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    """Yield a difference for each digest that both sides have and that is not the same."""
    for kind, digest in then.items():
        if now.get(kind, digest) != digest:
            yield Difference(step=step, stage=kind, where="digest", recorded=digest, found=now[kind])


def _same_files(runs: Pair, step: int) -> bool:
    """Return whether the files of this step are the same in both runs, byte by byte."""
    ours, theirs = (
        [run.steps.json_path(step), run.steps.data_path(step), *run.steps.stage_paths(step)] for run in runs
    )
    return [path.name for path in ours] == [path.name for path in theirs] and all(
        a.exists() and b.exists() and filecmp.cmp(a, b, shallow=False) for a, b in zip(ours, theirs, strict=True)
    )


def _in_batches(step: int, left: list[Sequence], right: list[Sequence], tolerance: Tolerance) -> Difference | None:
    """Return the first difference in the data, with its sequence, column and token; None if there is none.

    The tolerance is for the logprobs only: they came from weights that may have been computed in another environment.
    """
    ours, theirs = ({row.id: row for row in batch} for batch in (left, right))
    for name in [*ours, *(each for each in theirs if each not in ours)]:
        if name not in ours or name not in theirs:
            return differences.on_one_side(step, "data", name, recorded=ours, found=theirs, name=name)
        a, b = ours[name], theirs[name]
        if (found := _in_field(step, f"{name}, the prompt's row", a.data, b.data)) is not None:
            return found
        aligned = [
            _in_column(step, name, column, a, b, tolerance if column == "logprobs" else EXACT)
            # logprobs come last, because a difference in another column explains theirs
            for column in sorted(ALIGNED, key=lambda column: column == "logprobs")
        ]
        if apart := [each for each in aligned if each is not None]:
            return min(apart, key=lambda each: each.position or 0)
        fields = zip(_fields(a), _fields(b), strict=False)
        for (place, then), (_, now) in fields:
            if (found := _in_field(step, f"{name}, {place}", then, now)) is not None:
                return found
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.id != b.id:
            where = f"the order of the sequences, number {place}"
            return Difference(step=step, stage="data", where=where, recorded=a.id, found=b.id)
    return None


def _fields(row: Sequence) -> Iterator[tuple[str, Any]]:
    """Yield each field of a row with its place, except aligned columns, the prompt's row, times and `sampled_by`.

    The interactions come last, key by key.
    """
    for name in COLUMNS:
        if name not in (*ALIGNED, *TIMES, "data", "interactions", "sampled_by"):
            value = getattr(row, name)
            yield name, value.tolist() if isinstance(value, np.ndarray) else value
    yield "the number of interactions", len(row.interactions)
    for number, said in enumerate(map(timeless, row.interactions)):
        if not isinstance(said, dict):
            yield f"interaction {number}", said
            continue
        yield f"the keys of interaction {number}", sorted(said)
        for key in sorted(said):
            yield f"{key} of interaction {number}", said[key]


def _in_field(step: int, where: str, then: Any, now: Any) -> Difference | None:
    """Return the difference between two values that are not aligned with tokens; None if they are equal.

    Long values are shown from just before the place where they first differ.
    """
    if then == now:
        return None
    a, b = (json.dumps(each, sort_keys=True, default=str, ensure_ascii=False) for each in (then, now))
    if a == b:  # both NaN
        return None
    first = common_length(a, b)
    cut = max(0, first - 60) if max(len(a), len(b)) > 200 else 0
    shown = [("…" if cut else "") + each[cut : cut + 200] + ("…" if len(each) > cut + 200 else "") for each in (a, b)]
    return Difference(step=step, stage="data", where=where, recorded=shown[0], found=shown[1])


def _in_column(step: int, name: str, column: str, a: Sequence, b: Sequence, tolerance: Tolerance) -> Difference | None:
    then, now = getattr(a, column), getattr(b, column)
    length = min(len(then), len(now))
    ours, theirs = then[:length], now[:length]
    both_nan = (ours != ours) & (theirs != theirs)
    same = (ours == theirs) | both_nan if tolerance.exact else tolerance.agree(ours, theirs)
    differs = np.flatnonzero(~same)
    if not len(differs) and len(then) == len(now):
        return None
    position = int(differs[0]) if len(differs) else length
    values = [row[position].item() if position < len(row) else "absent" for row in (then, now)]
    suggests = ""
    if column == "input_ids" and "absent" in values:
        suggests = "one answer is the beginning of the other: a token limit differs, or the token that ends an answer"
    elif column == "input_ids" and not (a.loss_mask[: position + 1] & b.loss_mask[: position + 1]).any():
        suggests = "the data rows agree, but the prompt's tokens differ: another chat template, or another tokenizer"
    return Difference(
        step=step,
        stage="data",
        where=f"{name}, {column}",
        position=position,
        recorded=values[0],
        found=values[1],
        suggests=suggests,
    )


def _drift(runs: Pair, steps: range, names: tuple[str, str]) -> None:
    """Print the metrics of both runs at evenly spaced steps, and the evaluations that both made."""
    stride = max(1, len(steps) // 9)
    chosen = sorted({*steps[::stride], steps[-1]})
    rows = [(step, *(run.steps.read(step).get("metrics", {}) for run in runs)) for step in chosen]
    metrics = [name for name in DRIFT if all(name in each for row in rows for each in row[1:])]
    console = EscapingConsole(wide=160)
    console.print(causes.table_of_changes("step", metrics, rows, title=f"{names[0]} → {names[1]}"))
    sides = [{each["version"]: each for each in run.read_evals()} for run in runs]
    both = sorted({*sides[0]} & {*sides[1]} & {*steps, steps.stop})
    if both:
        rows = [(version, sides[0][version], sides[1][version]) for version in both]
        scores = [name for name in SCORES if all(each.get(name) is not None for row in rows for each in row[1:])]
        console.print()
        console.print(causes.table_of_changes("evaluation of version", scores, rows))


def _plot(runs: Pair, steps: range, names: tuple[str, str], path: Path) -> Path:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
