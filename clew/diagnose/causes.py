"""Causes of a difference between two runs: configuration, code, packages, weights, and rows of data.

Only what is on record can be a cause: see `clew.loop.bit_for_bit`, and run.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from rich.table import Table

from clew.config import Config
from clew.console import numbers_table, tracked
from clew.errors import RecordError, first_line
from clew.loop.differences import Difference
from clew.printing import print
from clew.reading import flat, read_json, read_yaml
from clew.record import rows
from clew.record.run import RunDirectory

Pair = tuple[RunDirectory, RunDirectory]
"""The two runs, in the order in which the user named them."""

FACTS = ("packages", "python", "git")
"""Entries of run.json that may explain a difference."""

NOT_CAUSES = ("experiment", "trial", "root", "debug.", "launch.restarts", "record.", "eval.", "checkpoint.")
"""Fields and sections of the configuration that no step depends on."""

STEPS_OF_DATA = 50
"""Maximum number of steps whose rows of data are compared, when the first difference is in the data."""

MORE_DIFFERENT = 1.1
"""Ratio of the runs' shares of distinct prompts above which one run counts as repeating more prompts."""

SAME_FACTOR = 1e-3
"""Maximum relative distance from their median at which ratios count as one factor."""


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each key whose value differs, by key."""
    return {
        name: f"{name}: {then.get(name, 'absent')} → {now.get(name, 'absent')}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    }


def other_files(
    then: Mapping[str, str], now: Mapping[str, str], *, which: str, ignore: Collection[str] = ()
) -> list[str]:
    """Return a line for each file whose digest differs. A file that several fields name is listed once.

    Args:
        then: Digests of the files of one run, by the field that names the file or by the file's name.
        now: Those of the other run.
        which: Words that say which file it is.
        ignore: Fields and sections to leave out.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name in sorted({*then, *now}):
        pair = then.get(name, "absent"), now.get(name, "absent")
        if pair[0] != pair[1] and not is_ignored(name, ignore):
            names.setdefault(pair, []).append(name)
    return [f"{', '.join(of_file)}: {which}, {a} → {b}" for (a, b), of_file in names.items()]


def is_ignored(name: str, ignore: Collection[str]) -> bool:
    """Return whether --ignore names this field: by its full name, its last part or its section."""
    return any(name == asked or name.endswith(f".{asked}") or name.startswith(f"{asked}.") for asked in ignore if asked)


def print_list(title: str, lines: Collection[str], names: tuple[str, str]) -> None:
    if lines:
        print(f"{title} ({names[0]} → {names[1]}):", *lines, sep="\n  ")


def table_of_changes(
    what: str, names: Sequence[str], rows: Iterable[tuple[int, Mapping[str, Any], Mapping[str, Any]]], title: str = ""
) -> Table:
    """Return a table of numbers, each as "then → now", or once if it is the same.

    Args:
        what: Heading of the first column.
        names: The other columns, which are keys of the numbers.
        rows: Number of the row, the numbers then, and the numbers now.
    """
    table = numbers_table(what, *names, title=title or None)
    for number, then, now in rows:
        pairs = [(then.get(name), now.get(name)) for name in names]
        shown = [["-" if value is None else f"{value:.4g}" for value in pair] for pair in pairs]
        cells = (a if then == now else f"{a} → {b}" for (then, now), (a, b) in zip(pairs, shown, strict=True))
        table.add_row(str(number), *cells)
    return table


# Configuration and code -----------------------------------------------------------------------------------------------


def values_at(run: RunDirectory, step: int) -> dict[str, Any]:
    """Return the configuration at a step by dotted names, from config.yaml, later changes and the step's own record."""
    configured = flat(read_yaml(run.config_path) if run.config_path.exists() else {})
    return configured | _replaced_after(run, step) | flat(run.steps.read(step).get("config", {}))


def with_sections_at(run: RunDirectory, config: Config, step: int, *sections: str) -> Config:
    """Return the run's configuration with its seed and these sections, such as "sampling", as they were at a step.

    Raises:
        RecordError: run.json has changes that do not fit.
    """
    values = config.model_dump(mode="json")
    for name, old in _replaced_after(run, step).items():
        if name.partition(".")[0] in (*sections, "seed"):
            _put(values, name, old)
    try:
        update = {name: type(getattr(config, name)).model_validate(values[name]) for name in sections}
    except ValidationError as error:
        raise RecordError(f"{run.run_json} has changes that do not fit this Clew: {first_line(error)}") from None
    return config.model_copy(update=update | {"seed": values["seed"]})


def _replaced_after(run: RunDirectory, step: int) -> dict[str, Any]:
    """Return the values that changes after a step have replaced, by dotted names; see `RunDirectory.changes`."""
    later = [each["fields"] for each in run.facts().get("changes", []) if each["step"] > step]
    return {name: old for fields in reversed(later) for name, (old, _) in fields.items()}


def _put(values: dict[str, Any], name: str, value: Any, depth: int = 0) -> None:
    """Set a value by its dotted name. Keys of options may have dots; None removes an option, as in workflow_kwargs."""
    head, _, rest = name.partition(".")
    if rest and name not in values:
        if not isinstance(values.get(head), dict):
            values[head] = {}
        _put(values[head], rest, value, depth + 1)
    elif value is None and depth > 1:
        values.pop(name, None)
    else:
        values[name] = value


def code_at(run: RunDirectory, step: int) -> dict[str, str]:
    """Return the digest of each configured function's file, by field of the configuration, as a step recorded it."""
    return run.steps.read(step).get("code", {})


def configuration_changes(runs: Pair, step: int) -> dict[str, str]:
    """Return a line for each field of the configuration that differs, by name.

    The configuration that a step recorded takes precedence over that of its run.
    """
    then, now = (values_at(run, step) for run in runs)
    return {
        name: line
        for name, line in differing(then, now).items()
        if not name.startswith(tuple(cause for cause in NOT_CAUSES if cause.endswith(".")))
        and name not in NOT_CAUSES
        and not (name in ("model.path", "algorithm.critic") and step > 0)  # the steps before agree: these are the same
    }


def note_configuration(runs: Pair, steps: range, names: tuple[str, str], ignore: list[str]) -> None:
    """Print how configurations and files of configured functions differ although all stages agree.

    Configurations are compared at the first step whose recorded ones differ, or else at the last step. Files are
    compared at the last step.
    """
    sides = ((step, [run.steps.read(step).get("config") for run in runs]) for step in steps)
    step, last = next((step for step, (then, now) in sides if then != now), steps[-1]), steps[-1]
    changed = configuration_changes(runs, step)
    fields = [line for name, line in changed.items() if not is_ignored(name, ignore)]
    print_list(f"but the configuration of step {step} differs", fields, names)
    files = other_files(*(code_at(run, last) for run in runs), which="another file", ignore=ignore)
    print_list(f"but the code of step {last} differs", files, names)


def code_changed_later(runs: Pair, steps: range) -> list[str]:
    """Return a line for each file of configured code that changed in one run alone, after the first of these steps.

    Asynchronous runs differ from the start, so the first difference often does not explain a later drop of the reward.
    """
    lines: list[str] = []
    before: list[dict[str, str]] | None = None
    for step in tracked(steps, "comparing code", total=len(steps), unit="steps"):
        now = [code_at(run, step) for run in runs]
        if before is not None and now != before:
            changed = [
                {name for name in {*a, *b} if a.get(name) != b.get(name)} for a, b in zip(before, now, strict=True)
            ]
            once = changed[0] ^ changed[1]  # a change in both runs explains nothing
            sides = ({name: side[name] for name in once if name in side} for side in now)
            lines += other_files(*sides, which=f"another file from step {step} on")
        before = now
    return lines


def print_explanation(runs: Pair, found: Difference, names: tuple[str, str], environments: list[str]) -> bool:
    """Print what besides the configuration could have caused a difference; return whether there is anything."""
    before = [_checkpoint_before(run, found.step) for run in runs]
    facts = (flat({key: run.facts().get(key) for key in FACTS}) for run in runs)
    lines = [
        *differing(*facts).values(),
        *other_files(*(code_at(run, found.step) for run in runs), which="another file"),
        *other_files(*map(_files, before), which="of the checkpoint before this step"),
    ]
    if not environments or not before[0].get("version"):  # in another environment, rounding may explain them
        lines += _other_weights(*before)
    print_list("environment of the step", environments, names)
    print_list("packages, code and files", lines, names)
    return bool(environments or lines)


def _checkpoint_before(run: RunDirectory, step: int) -> dict[str, Any]:
    """Return checkpoint.json of the last checkpoint up to `step`; empty if there is none."""
    version = max((each for each in run.checkpointed() if each <= step), default=None)
    if version is None:
        return {}
    return manifest_of(run, version)


def manifest_of(run: RunDirectory, version: int) -> dict[str, Any]:
    """Return checkpoint.json of a version that has a checkpoint."""
    return read_json(run.checkpoint(version) / "checkpoint.json", dict[str, Any])


def _files(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Return the digests of the files that a checkpoint has beside its tensors, by name."""
    return {name: each for name, each in checkpoint.get("files", {}).items() if not name.endswith(".safetensors")}


def _other_weights(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a line if the checkpoints before the first difference are of one version but their weights differ."""
    ours, theirs = (each.get("weights", {}) for each in (then, now))
    others = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    if others and then["version"] == now["version"]:
        which = f"version {then['version']}" if then["version"] else "the first model"
        yield f"{which}: {len(others)} of {len(ours)} parameters differ, first {others[0]}"


# Data and numbers -----------------------------------------------------------------------------------------------------


def other_prompts(runs: Pair, steps: range, names: tuple[str, str]) -> list[str]:
    """Return lines on how the prompts of these steps differ: in which columns, and which run repeats more of them."""
    both = [step for step in steps[:STEPS_OF_DATA] if all(run.steps.has_data(step) for run in runs)]
    rows_of_runs = ([_rows_of(run.steps.data_path(step)) for step in both] for run in runs)
    sides = [{group: row for of_step in of_run for group, row in of_step.items()} for of_run in rows_of_runs]
    lines = _other_columns(*sides)
    counts = [(len({*side.values()}), len(side)) for side in sides]
    (fewest, which), (most, _) = sorted((a / max(1, b), name) for name, (a, b) in zip(names, counts, strict=True))
    if fewest > 0 and most > MORE_DIFFERENT * fewest:
        of_runs = (f"{name} has {a} distinct ones in {b} groups" for name, (a, b) in zip(names, counts, strict=True))
        lines.append(f"{which} repeats prompts more often: {', '.join(of_runs)}")
    return lines


def other_held_out(runs: Pair, versions: set[int]) -> list[str]:
    """Return a line on how the held-out prompts differ in the newest evaluation that both runs have."""
    for version in sorted(versions, reverse=True):
        files = [run.evals.folder / f"version-{version:06d}.parquet" for run in runs]
        if all(file.exists() for file in files):
            return [
                f"the held-out prompts of version {version}: {line}" for line in _other_columns(*map(_rows_of, files))
            ]
    return []


def _rows_of(file: Path) -> dict[str, str]:
    """Return the row of data of each group in a file, as JSON; empty if it was altered, which is reported elsewhere."""
    try:
        table = rows.read_table(file)
        return dict(zip(table["group_id"].to_pylist(), table["data"].to_pylist(), strict=True))
    except (RecordError, KeyError, TypeError):
        return {}


def _other_columns(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return a line that counts the groups whose rows of data differ, by column; no line if none differs."""
    both = [group for group in ours if group in theirs]
    differing = [group for group in both if ours[group] != theirs[group]]
    pairs = [(rows.parse_data(ours[group]), rows.parse_data(theirs[group])) for group in differing]
    columns = Counter(name for a, b in pairs for name in {**a, **b} if a.get(name) != b.get(name))
    which = ", ".join(f"{name} in {count}" for name, count in columns.items())
    return [f"of {len(both)} groups, {len(pairs)} have other rows of data ({which})"] if columns else []


def factor_between(runs: Pair, found: Difference, names: tuple[str, str]) -> str:
    """Return a line if one factor or flipped signs explain how the rewards, or the numbers of a stage, differ.

    Return "" if neither does.
    """
    step, of_rewards = found.step, found.where.endswith((", reward", ", rewards"))
    if not all(run.steps.has_data(step) for run in runs) or (found.stage == "data" and not of_rewards):
        return ""
    batches = [{row.id: row for row in run.steps.read_data(step)} for run in runs]
    ids = [id for id in batches[0] if id in batches[1]]
    if found.stage == "data":
        what, sides = "rewards", [np.array([batch[id].reward for id in ids]) for batch in batches]
    else:
        what, stages = found.stage, [run.steps.read_stages(step).arrays.get(found.stage, {}) for run in runs]
        if plan := runs[0].steps.read(step).get("plan"):  # only the first update: later ones have other weights
            in_order = list(batches[0])
            ids = [in_order[row] for micro in plan[0] for row in micro]
        ids = [id for id in ids if all(id in stage for stage in stages)]
        sides = [np.concatenate([np.empty(0), *(stage[id] for id in ids)]) for stage in stages]
    then, now = sides
    if then.shape != now.shape or not np.isfinite([then, now]).all() or ((then == 0) != (now == 0)).any():
        return ""
    ratios = now[then != 0] / then[then != 0]
    factor = float(np.median(ratios)) if len(ratios) else 1.0
    one_factor = (np.abs(ratios - factor) <= SAME_FACTOR * abs(factor)).all()
    if one_factor and len(ratios) > 1 and abs(factor - 1) > SAME_FACTOR:  # otherwise it is rounding
        return f"all numbers of {what} in {names[1]} are {factor:.4g} times those in {names[0]}"
    if (ratios < 0).any() and (np.abs(ratios) == 1).all():
        return f"{(ratios < 0).sum()} of {len(ratios)} numbers of {what} have the opposite sign in {names[1]}"
    return ""
