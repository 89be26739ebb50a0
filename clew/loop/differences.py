"""Search for the first difference between two computations of the same step: pure comparison, without torch.

A step is compared stage by stage, in the order in which it was computed; within a stage, sequence by sequence and token
by token. Whatever differs after the first difference follows from it, and is only counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clew.errors import RecordError
from clew.record import rows
from clew.record.digest import RowDigest, digest_batch, digest_rows, from_hex
from clew.record.run import RunDirectory

STAGES = (
    "data",
    "rewards",
    "values",
    "returns",
    "advantages",
    "proximal_logprobs",
    "reference_logprobs",
    "logprobs",
    "entropies",
    "loss",
    "gradients",
    "update",
    "metrics",
)
"""Stages in the order in which a step computes them; those of `OF_UPDATES` again for each of its updates."""

OF_UPDATES = ("logprobs", "entropies", "loss", "gradients")
"""Stages that an update computes from the rows of its mini-batch, with the weights that the updates before it left."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limit within which two values agree: |a - b| <= absolute + relative x |a|. If both are zero: bit for bit."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        return not (self.absolute or self.relative)

    def agree(self, recorded: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return which values agree, as booleans in the shape of the inputs."""
        if self.exact:
            return recorded.view(np.uint32) == found.view(np.uint32)
        both_nan = np.isnan(recorded) & np.isnan(found)
        with np.errstate(invalid="ignore"):
            near = np.abs(recorded - found) <= self.absolute + self.relative * np.abs(recorded)
        return near | both_nan | (recorded == found)

    def __str__(self) -> str:
        return "bit for bit" if self.exact else f"within {self.absolute:g} + {self.relative:g} x |recorded|"


EXACT = Tolerance()

TOLERANCES = {
    "float64": Tolerance(absolute=1e-6, relative=1e-6),
    "float32": Tolerance(absolute=1e-3, relative=1e-3),
    "bfloat16": Tolerance(absolute=5e-2, relative=5e-2),
    "recomputed": Tolerance(absolute=1e-6, relative=1e-6),
    "another trainer": Tolerance(absolute=1e-3, relative=1e-3),
}
"""Tolerances wherever equality bit for bit is not promised.

- by model.dtype: a step that was trained in another environment; logprobs, losses and the norm of the gradient
- recomputed: the loss, from recorded inputs: another processor may round the last bit of an exponential differently
- another trainer: advantages and loss in the record of another trainer, which rounds differently throughout, and adds
  another epsilon to a deviation
"""

_OF_OPTIMIZER = "the learning rate does, or another setting of the optimizer"

TINY = 1e-4
"""Largest difference in logprobs, losses and the like that rounding may cause."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First place in a stage where two computations differ."""

    step: int
    stage: str
    where: str
    """ID of a sequence, name of a parameter or metric, or a description of the place."""
    position: int | None
    """Index of the token in the sequence; None if the difference is not in a token."""
    recorded: Any
    found: Any
    more: str = ""
    """Extent of the differences in this stage, in words, and what else is known about them."""
    suggests: str = ""
    """Usual cause of such a difference; empty if none is known."""

    def __str__(self) -> str:
        return self.told("recorded", "here")

    def told(self, recorded: str, found: str) -> str:
        """Return the difference as one line.

        Args:
            recorded: Name of the first side.
            found: Name of the second side.
        """
        place = f"{self.where}, token {self.position}" if self.position is not None else self.where
        then, now = (_shown(each) for each in (self.recorded, self.found))
        if then == now:  # in the last digits of a float64
            then, now = (str(each) for each in (self.recorded, self.found))
        values = f"{recorded} {then}, {found} {now}"
        return f"step {self.step}, {self.stage}: {place}: {values}{f' ({self.more})' if self.more else ''}"


class DifferenceFound(RecordError):
    """Raised when a batch is not what was trained on."""

    def __init__(self, run: RunDirectory, difference: Difference) -> None:
        super().__init__(f"{run.path} was altered: {difference}")
        self.difference = difference


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, (float, np.floating)) else str(value)


def in_stage(
    step: int,
    stage: str,
    ids: Sequence[str],
    recorded: Sequence[np.ndarray],
    found: Sequence[np.ndarray],
    tolerance: Tolerance = EXACT,
    *,
    after_update: bool = False,
) -> Difference | None:
    """Return the first token of a stage that differs; None if all agree.

    Args:
        step: Number of the step.
        stage: Name of the stage.
        ids: The IDs of the sequences.
        recorded: [T] float32 for each sequence.
        found: [T] float32 for each sequence, from the other side.
        tolerance: Limit within which two values agree.
        after_update: Whether the weights were updated earlier in this step, by gradients that agree.
    """
    if list(map(len, recorded)) == list(map(len, found)):
        then, now = (np.concatenate([np.empty(0, np.float32), *side], dtype=np.float32) for side in (recorded, found))
        if tolerance.agree(then, now).all():  # as it should be: at once, not row by row
            return None
    first: Difference | None = None
    tokens, names, largest = 0, [], 0.0
    for name, then, now in zip(ids, recorded, found, strict=True):
        if len(then) != len(now):
            return Difference(
                step=step, stage=stage, where=name, position=None, recorded=f"{len(then)} tokens", found=len(now)
            )
        differs = ~tolerance.agree(np.asarray(then, np.float32), np.asarray(now, np.float32))
        if not differs.any():
            continue
        tokens += int(differs.sum())
        names.append(name)
        largest = max(largest, float(np.abs(np.subtract(then, now, dtype=np.float64))[differs].max()))
        if first is None:
            position = int(differs.argmax())
            first = Difference(
                step=step, stage=stage, where=name, position=position, recorded=then[position], found=now[position]
            )
    if first is None:
        return None
    more = f"{tokens} tokens of {len(names)} sequences differ" if tokens > 1 else ""
    return replace(first, more=more, suggests=of_sequences(names, ids, largest, after_update))


def of_sequences(differing: Sequence[str], ids: Sequence[str], largest: float, after_update: bool = False) -> str:
    """Return the likely reason why just these sequences differ; empty if none is known.

    Args:
        differing: Their IDs.
        ids: The IDs of all sequences that were compared.
        largest: The largest difference between two values; inf if what differs are not numbers.
        after_update: See `in_stage`.
    """
    groups = {name.partition(".")[0] for name in differing}
    whole = [name for name in ids if name.partition(".")[0] in groups]
    if after_update and len(differing) == len(ids):
        return f"the gradients of the update before agree and all sequences differ after it: {_OF_OPTIMIZER}"
    if largest <= TINY and len(differing) > 1:
        return f"no value differs by more than {largest:.1e}: this is rounding, as by another processor or library"
    if len(differing) == 1 and len(ids) > 1:
        return "one sequence differs alone: its row was altered, or what it was computed from"
    if len(groups) == 1 and len(whole) == len(differing) < len(ids):
        return f"exactly the sequences of the group {groups.pop()} differ: its prompt does, or a reward"
    return ""


def suspect(found: Difference, then: str | None, now: str | None, *, checked: bool, chance: str) -> Difference:
    """Return a difference in the advantages or the loss, with how the user's own function may have caused it.

    Args:
        found: The difference.
        then: `clew.training.custom.source_of` as recorded.
        now: `clew.training.custom.source_of` here.
        checked: Whether all inputs of the computation are known to agree; otherwise they are only what the record says.
        chance: Why the function's results vary from call to call, as far as that is known.
    """
    field = f"algorithm.{found.stage}"
    others = (
        "depends on which sequences share a micro-batch"
        if found.stage == "loss"
        else "depends on what is not on record"
    )
    altered = "the record of it was altered" if checked else "it or its inputs were altered on record"
    if chance:
        why = f"{field} {chance}"
    elif then is None:
        why = f"{altered}, or what {field} names was changed since, or {others}"
    elif then != now:
        why = f"the file of {field} was changed since"
    else:
        why = f"the file of {field} is the same: {altered}, or what the file calls was changed since, or it {others}"
    if checked:
        why = f"its inputs agree; {why}"
    return replace(found, more=f"{found.more}; {why}" if found.more else why)


def in_rewards(step: int, batch: Sequence[rows.Sequence]) -> Difference | None:
    """Return the first sequence whose reward is not the sum of its named rewards; None if there is none."""
    for row in batch:
        total = math.fsum(row.rewards.values())
        if row.rewards and row.reward != total:
            return Difference(step=step, stage="rewards", where=row.id, position=None, recorded=row.reward, found=total)
    return None


ORIGIN = "group, episode, turns, finish reason, rewards by name, data or interactions"
"""Fields that the digest of a sequence's origin covers, in words."""


def in_data(step: int, recorded: Mapping[str, RowDigest], found: Mapping[str, RowDigest]) -> Difference | None:
    """Return the first sequence whose data has another digest, or which only one side has.

    Args:
        step: Number of the step.
        recorded: Digests by sequence ID.
        found: Digests by sequence ID, from the other side.
    """
    return _in_digests(step, *({name: each.data for name, each in side.items()} for side in (recorded, found)), what="")


def in_origins(step: int, recorded: Mapping[str, RowDigest], found: Mapping[str, RowDigest]) -> Difference | None:
    """Return the first sequence that has another origin. Older records have no digests of it.

    Args:
        step: Number of the step.
        recorded: Digests by sequence ID.
        found: Digests by sequence ID, from the other side.
    """
    known = {name: each.origin for name, each in recorded.items() if each.origin is not None}
    return _in_digests(step, known, {name: found[name].origin or 0 for name in known}, what=f", its {ORIGIN}")


def _in_digests(step: int, recorded: Mapping[str, int], found: Mapping[str, int], *, what: str) -> Difference | None:
    differing = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    if not differing:
        return None
    name = differing[0]
    shown = [f"digest {side[name]:016x}" if name in side else "absent" for side in (recorded, found)]
    more = f"{len(differing)} sequences differ" if len(differing) > 1 else ""
    other = next((each for each in differing[1:] if _exchanged(recorded, found, name, each)), None)
    if other is not None:
        more = f"{name} and {other} have changed places; {more}"
    elif len(differing) > 1:
        more = f"{more}, {differing[1]} next"
    where = f"{name}{what}"
    return Difference(step=step, stage="data", where=where, position=None, recorded=shown[0], found=shown[1], more=more)


def _exchanged(recorded: Mapping[str, int], found: Mapping[str, int], a: str, b: str) -> bool:
    """Return whether two sequences have each other's content."""
    there = a in recorded and b in recorded and a in found and b in found
    return there and recorded[a] == found[b] and recorded[b] == found[a]


def in_tensors(
    step: int, stage: str, names: Sequence[str], recorded: str, found: str, update: str = ""
) -> Difference | None:
    """Return the first parameter whose digest differs.

    Args:
        step: Number of the step.
        stage: Name of the stage.
        names: Names of the parameters.
        recorded: Digests as `clew.record.digest.to_hex` writes them.
        found: Digests of the other side, written the same way.
        update: Text that follows the parameter's name and says which update it is.
    """
    then, now = from_hex(recorded), from_hex(found)
    differing = [i for i in range(max(len(then), len(now))) if then[i : i + 1] != now[i : i + 1]]
    if not differing:
        return None
    i = differing[0]
    name = names[i] if i < len(names) else f"parameter {i}"
    shown = [f"digest {side[i]:016x}" if i < len(side) else "absent" for side in (then, now)]
    count = max(len(then), len(now))
    suggests = ""
    if stage == "update" and len(differing) == count > 1:
        suggests = f"gradients agree and all parameters differ: {_OF_OPTIMIZER}"
    elif stage == "update" and len(differing) == 1:
        suggests = "gradients agree and one parameter differs: its moments in the optimizer do"
    return Difference(
        step=step,
        stage=stage,
        where=f"{name}{update}",
        position=None,
        recorded=shown[0],
        found=shown[1],
        more=f"{len(differing)} of {count} parameters differ" if len(differing) > 1 else "",
        suggests=suggests,
    )


def in_batch(
    step: int,
    recorded: Mapping[str, RowDigest],
    batch: Sequence[rows.Sequence],
    whole: str | None = None,
    *,
    rewards_add_up: bool = True,
) -> Difference | None:
    """Return the first place where a batch is not what was trained on: data, rewards, or the order of the sequences.

    Args:
        step: Number of the step.
        recorded: The recorded digests of its sequences.
        batch: The batch.
        whole: The digest of all sequences, from the step's JSON; None if the step was not committed.
        rewards_add_up: Whether each reward must be the sum of its parts, as Clew's own are.
    """
    digests = digest_rows(batch)
    found = in_data(step, recorded, digests)
    if rewards_add_up:
        found = found or in_rewards(step, batch)
    found = found or in_origins(step, recorded, digests)
    now = digest_batch(digests)
    if found is not None or whole in (None, now):
        return found
    moved = [(then, row.id) for then, row in zip(recorded, batch, strict=False) if then != row.id]
    before = {name: digests[name] for name in recorded if name in digests}
    if moved and digest_batch(before) == whole:  # several ranks record their rows in another order than the batch's
        where = f"the order of the sequences, number {list(recorded).index(moved[0][0])}"
        more = f"{len(moved)} sequences are in other places"
        if len(moved) == 2:
            more = f"{moved[0][0]} and {moved[1][0]} have changed places"
        then, here = moved[0]
        return Difference(step=step, stage="data", where=where, position=None, recorded=then, found=here, more=more)
    return Difference(step=step, stage="data", where="all, in their order", position=None, recorded=whole, found=now)


def in_metrics(step: int, recorded: Mapping[str, Any], found: Mapping[str, float]) -> Difference | None:
    """Return the first metric that is not exactly what was recorded, or that only one side has."""
    for name in {**found, **recorded}:
        then, now = recorded.get(name, "absent"), found.get(name, "absent")
        if then != now and not (then != then and now != now):  # two NaNs
            return Difference(step=step, stage="metrics", where=name, position=None, recorded=then, found=now)
    return None


def in_number(
    step: int, stage: str, name: str, recorded: float, found: float, tolerance: Tolerance
) -> Difference | None:
    """Return the difference between two numbers that need not be equal bit for bit; None if they agree."""
    if bool(tolerance.agree(np.array([recorded], np.float32), np.array([found], np.float32))[0]):
        return None
    return Difference(step=step, stage=stage, where=name, position=None, recorded=recorded, found=found)
