"""Finds the first difference between two runs, from what both recorded of each step.

A step is compared in the order in which it was computed: its sequences, the stages that were computed from them, then
metrics and digests. The search ends at the first difference, because what follows may be its effect.
"""

from __future__ import annotations

import filecmp
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clew import config as configuration
from clew.console import tracked
from clew.diagnose.causes import Pair, differing
from clew.errors import RecordError
from clew.loop import differences
from clew.loop.differences import Difference
from clew.loop.tolerance import EXACT, TOLERANCES, Tolerance
from clew.printing import around, common_length
from clew.reading import RESTORE, flat
from clew.record.batch_digest import digest_rows, from_hex, to_hex
from clew.record.rows import ALIGNED, COLUMNS, TIMES, Sequence, timeless
from clew.record.summary import rounding_doubt

SAMPLING_NOISE = "how the engine rounds a logprob depends on which sequences it computes side by side"

METRICS = ("reward", "loss", "grad_norm")
"""Metrics that are compared within a tolerance, for steps whose sequences one of the runs no longer has."""

ROUNDED = {*differences.STAGES} - {"rewards", "advantages", "update", "metrics"}
"""Stages whose values a model computed, so that rounding may change them. `data` has the logprobs from sampling."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of comparing the steps of two runs."""

    difference: Difference | None
    """First difference; None if all that was compared agrees."""
    apart: int
    """First step whose digests differ; the end of the range if there is none. Steps before it are compared exactly."""
    tolerance: Tolerance
    """Limit within which two values count as equal in the steps from `apart` on."""
    reasons: list[str]
    """Reasons why these steps are not compared bit for bit; empty if they are."""


def compare_runs(runs: Pair, steps: range) -> Comparison:
    """Compare the steps of both runs: bit for bit until their digests differ, then with a tolerance if one applies.

    Args:
        steps: Steps that both runs have committed.

    Raises:
        RecordError: A file of a step is missing, truncated or altered.
    """
    indices = [run.steps.index() for run in runs]
    differ = (step for step in steps if indices[0][step]["digests"] != indices[1][step]["digests"])
    apart = next(differ, steps.stop)
    before, after = range(steps.start, apart), range(apart, steps.stop)
    reasons = _other_environment(runs, apart) if after else []
    tolerance = _near(runs) if reasons else EXACT
    # The files of a step may have been altered even if the digests in the index agree.
    difference = _first_difference(runs, before, EXACT) or _first_difference(runs, after, tolerance)
    result = Comparison(difference=difference, apart=apart, tolerance=tolerance, reasons=reasons)
    if difference is None or difference.step < apart or not tolerance.exact:
        return result

    # The environments are equal, but rounding may still explain the difference: look for one beyond the tolerance.
    doubt = _rounding_doubt(runs, difference)
    noise = _is_sampling_noise(difference)
    if not doubt and not noise:
        return result
    beyond = _first_difference(runs, after, _near(runs))
    if doubt and str(beyond) != str(difference):
        reason = doubt
    elif noise and beyond is not None:
        reason = SAMPLING_NOISE
    else:  # rounding does not explain it, or the noise is all that differs
        return result
    return Comparison(difference=beyond, apart=apart, tolerance=_near(runs), reasons=[reason])


def _other_environment(runs: Pair, step: int) -> list[str]:
    """Return a line for each way in which the environments that computed a step differ."""
    then, now = (flat({**run.steps.read(step).get("environment", {}), "rounding": None}) for run in runs)
    return [*differing(then, now).values()]


def _near(runs: Pair) -> Tolerance:
    """Return the tolerance for stages that were computed in different environments."""
    if not all(run.steps.by_clew for run in runs):
        return TOLERANCES["another trainer"]
    dtypes = {configuration.load(run.config_path).model.dtype for run in runs}
    return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.absolute)


def _rounding_doubt(runs: Pair, difference: Difference) -> str:
    """Return why a difference may be due to rounding alone; empty if it cannot be.

    Gradients or weights that agree bit for bit show that both runs rounded alike.
    """
    then, now = (run.steps.read(difference.step) for run in runs)
    if difference.stage not in ROUNDED or not ("environment" in then and "environment" in now):
        return ""
    if any(then["digests"].get(kind) == now["digests"].get(kind) for kind in ("gradients", "weights")):
        return ""
    return rounding_doubt(then["environment"], now["environment"])


def _is_sampling_noise(difference: Difference) -> bool:
    """Return whether a difference is in the last digits of a sampled token's logprob."""
    values = difference.recorded, difference.found
    of_logprobs = difference.stage == "data" and difference.where.endswith(", logprobs") and "absent" not in values
    return of_logprobs and abs(values[0] - values[1]) <= differences.TINY


# One step -------------------------------------------------------------------------------------------------------------


def _first_difference(runs: Pair, steps: range, tolerance: Tolerance) -> Difference | None:
    for step in tracked(steps, "comparing", total=len(steps), unit="steps"):
        if (difference := _in_step(runs, step, tolerance)) is not None:
            return difference
    return None


def _in_step(runs: Pair, step: int, tolerance: Tolerance) -> Difference | None:
    if _same_files(runs, step):
        return None
    then, now = (run.steps.read(step) for run in runs)
    if all(run.steps.has_data(step) for run in runs):
        ours, theirs = (run.steps.read_data(step) for run in runs)
        difference = _in_data(step, ours, theirs, tolerance) or _in_stages(runs, step, ours, tolerance)
    elif tolerance.exact:  # the sequences were pruned; the digests remain
        difference = _in_digests(step, then["digests"], now["digests"])
    else:  # rounding alone would change the digests
        difference = _in_what_is_left(step, then, now, tolerance)
    if difference is None and tolerance.exact:
        difference = differences.in_metrics(step, then.get("metrics", {}), now.get("metrics", {}))
        difference = difference or _in_digests(step, then["digests"], now["digests"])
    return difference


def _in_what_is_left(step: int, then: dict[str, Any], now: dict[str, Any], tolerance: Tolerance) -> Difference | None:
    """Return the first group that only one run has, or else the first of `METRICS` that differs beyond the tolerance.

    This is for a step whose sequences one of the runs no longer has.
    """
    ours, theirs = then["groups"], now["groups"]
    if differing := sorted({*ours} ^ {*theirs}):
        [group, *_] = differing
        return differences.on_one_side(step, "data", group, recorded=group in ours)
    for name in METRICS:
        values = [side.get("metrics", {}).get(name) for side in (then, now)]
        if None not in values and not tolerance.agree(*(np.array([value], np.float32) for value in values)).all():
            return Difference(step=step, stage="metrics", where=name, recorded=values[0], found=values[1])
    return None


def _same_files(runs: Pair, step: int) -> bool:
    """Return True if both runs have the same files of this step, byte for byte."""
    ours, theirs = (
        [run.steps.json_path(step), run.steps.data_path(step), *run.steps.stage_paths(step)] for run in runs
    )
    return [path.name for path in ours] == [path.name for path in theirs] and all(
        a.exists() and b.exists() and filecmp.cmp(a, b, shallow=False) for a, b in zip(ours, theirs, strict=True)
    )


def _in_digests(step: int, then: dict[str, Any], now: dict[str, Any]) -> Difference | None:
    """Return the first digest that both runs recorded and that differs."""
    for kind, digest in then.items():
        if now.get(kind, digest) != digest:
            return Difference(step=step, stage=kind, where="digest", recorded=digest, found=now[kind])
    return None


# Stages ---------------------------------------------------------------------------------------------------------------


def _in_stages(runs: Pair, step: int, batch: list[Sequence], tolerance: Tolerance) -> Difference | None:
    """Return the first difference in the stages that the two runs computed from the same batch.

    Raises:
        RecordError: The plan of the first run has more sequences than the batch, or a file of stages is damaged.
    """
    then, now = (run.steps.read(step) for run in runs)
    plan = then.get("plan") or [[list(range(len(batch)))]]  # another trainer may record no plan
    if max((row for minibatch in plan for micro in minibatch for row in micro), default=0) >= len(batch):
        raise RecordError(
            f"Cannot compare step {step}: {runs[0].steps.json_path(step)} plans with more sequences than "
            f"{runs[0].steps.data_path(step)} has, so one of the two was altered. {RESTORE.capitalize()}."
        )
    left, right = (run.steps.read_stages(step, batch).arrays for run in runs)
    names, others = (run.facts().get("parameters", []) for run in runs)
    found = differences.in_stages(
        step,
        [row.id for row in batch],
        stages=(left, right),
        tensors=(then.get("tensors", {}), _in_order(now.get("tensors", {}), others, names)),
        plan=plan,
        parameters=names,
        tolerance=tolerance,
    )
    return next(found, None)


def _in_order(tensors: dict[str, Any], names: list[str], wanted: list[str]) -> dict[str, Any]:
    """Return a step's digests by parameter, reordered to match another run that has the same parameters.

    A run lists the parameters that it does not train first, so the order differs if two runs train different ones.

    Args:
        tensors: Digests of each kind, for all parameters, in the order of `names`.
        names: Parameters of the run that recorded `tensors`.
        wanted: Parameters of the other run, in its order. If they are not the same, `tensors` is returned unchanged.
    """
    if names == wanted or sorted(names) != sorted(wanted):
        return tensors

    def ordered(digests: str) -> str:
        if len(digests) != 16 * len(names):  # other parameters, such as those of a critic that was dropped later
            return digests
        by_name = dict(zip(names, from_hex(digests), strict=True))
        return to_hex(by_name[name] for name in wanted)

    return {
        kind: ordered(digests) if isinstance(digests, str) else list(map(ordered, digests))
        for kind, digests in tensors.items()
    }


# Sequences ------------------------------------------------------------------------------------------------------------


def _in_data(step: int, left: list[Sequence], right: list[Sequence], tolerance: Tolerance) -> Difference | None:
    """Return the first difference in the data, with its sequence, column and token, and its likely cause.

    The tolerance is for the logprobs only: they came from weights that may have been computed in another environment.
    """
    difference = _in_batches(step, left, right, tolerance)
    if difference is None or difference.suggests:
        return difference
    ours, theirs = digest_rows(left), digest_rows(right)
    differing = [id for id in ours if id in theirs and ours[id] != theirs[id]]
    return replace(difference, suggests=differences.of_sequences(differing, list(ours), math.inf))


def _in_batches(step: int, left: list[Sequence], right: list[Sequence], tolerance: Tolerance) -> Difference | None:
    ours, theirs = ({row.id: row for row in batch} for batch in (left, right))
    for id in {**ours, **theirs}:
        if id not in ours or id not in theirs:
            return differences.on_one_side(step, "data", id, recorded=id in ours)
        if (difference := _in_sequence(step, ours[id], theirs[id], tolerance)) is not None:
            return difference
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.id != b.id:
            where = f"the order of the sequences, number {place}"
            return Difference(step=step, stage="data", where=where, recorded=a.id, found=b.id)
    return None


def _in_sequence(step: int, a: Sequence, b: Sequence, tolerance: Tolerance) -> Difference | None:
    """Return the first difference between two sequences with the same ID: data row, then tokens, then other fields."""
    if (difference := _in_field(step, f"{a.id}, the prompt's row", a.data, b.data)) is not None:
        return difference
    of_columns = [_in_column(step, column, a, b, tolerance if column == "logprobs" else EXACT) for column in ALIGNED]
    if in_tokens := [each for each in of_columns if each is not None]:
        # If the logprobs and another column differ at the same token, the other one is the likely cause: name it.
        return min(in_tokens, key=lambda each: (each.position or 0, each.where.endswith(", logprobs")))
    for (place, then), (_, now) in zip(_fields(a), _fields(b), strict=False):
        if (difference := _in_field(step, f"{a.id}, {place}", then, now)) is not None:
            return difference
    return None


def _in_column(step: int, column: str, a: Sequence, b: Sequence, tolerance: Tolerance) -> Difference | None:
    """Return the first token whose value in this column differs; None if all are equal."""
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
        where=f"{a.id}, {column}",
        position=position,
        recorded=values[0],
        found=values[1],
        suggests=suggests,
    )


def _in_field(step: int, where: str, then: Any, now: Any) -> Difference | None:
    """Return the difference between two values that are not aligned with tokens; None if they are equal.

    Long values are shortened to the text around the place where they first differ.
    """
    if then == now:
        return None
    a, b = (json.dumps(each, sort_keys=True, default=str, ensure_ascii=False) for each in (then, now))
    if a == b:  # both NaN
        return None
    length = 100 if max(len(a), len(b)) > 200 else 200
    recorded, found = (around(text, common_length(a, b), length) for text in (a, b))
    return Difference(step=step, stage="data", where=where, recorded=recorded, found=found)


def _fields(row: Sequence) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field of a row, except aligned columns, `data`, times and `sampled_by`.

    The interactions come last, key by key.
    """
    for name in COLUMNS:
        if name not in (*ALIGNED, *TIMES, "data", "interactions", "sampled_by"):
            value = getattr(row, name)
            yield name, value.tolist() if isinstance(value, np.ndarray) else value
    yield "the number of interactions", len(row.interactions)
    for number, interaction in enumerate(map(timeless, row.interactions)):
        if not isinstance(interaction, dict):
            yield f"interaction {number}", interaction
            continue
        yield f"the keys of interaction {number}", sorted(interaction)
        for key in sorted(interaction):
            yield f"{key} of interaction {number}", interaction[key]
