"""Search for the first difference between two computations of the same step: pure comparison, without torch.

A step is compared stage by stage, in the order in which it was computed; within a stage, sequence by sequence and token
by token. Whatever differs after the first difference follows from it, and is only counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clew.errors import RecordError
from clew.loop.tolerance import EXACT, Tolerance
from clew.record import rows
from clew.record.batch_digest import RowDigest, digest_batch, digest_rows, from_hex
from clew.record.run import RunDirectory

STAGES = (
    "data",
    "rewards",
    "reference_logprobs",
    "values",
    "bootstrap_values",
    "returns",
    "advantages",
    "proximal_logprobs",
    "logprobs",
    "entropies",
    "rejected",
    "loss",
    "gradients",
    "update",
    "metrics",
)
"""Stages in the order in which a step computes them; those of `OF_UPDATES` again for each of its updates."""

OF_UPDATES = ("logprobs", "entropies", "rejected", "loss", "gradients")
"""Stages that an update computes from the rows of its mini-batch, with the weights that the updates before it left."""

LATER = ("mismatch_k3", "stale_k3")
"""Metrics that records of an earlier Clew lack. They follow from recorded logprobs, which are compared anyway."""

_OF_OPTIMIZER = "the learning rate does, or another setting of the optimizer"

Values = Mapping[str, Mapping[str, np.ndarray]]
"""Values of tokens, [T] float32, by stage and sequence ID."""

TINY = 1e-4
"""Largest difference in logprobs, losses and the like that rounding may cause."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First place in a stage where two computations differ."""

    step: int
    stage: str
    where: str
    """ID of a sequence, name of a parameter or metric, or a description of the place."""
    recorded: Any
    found: Any
    position: int | None = None
    """Index of the token in the sequence; None if the difference is not in a token."""
    more: str = ""
    """Extent of the differences in this stage, in words, and what else is known about them."""
    suggests: str = ""
    """Usual cause of such a difference; empty if none is known."""

    def __str__(self) -> str:
        return self.in_words("recorded", "here")

    def in_words(self, recorded: str, found: str) -> str:
        """Return the difference as one line, in which the two sides have these names."""
        place = f"{self.where}, token {self.position}" if self.position is not None else self.where
        then, now = (_shown(each) for each in (self.recorded, self.found))
        if then == now:  # the two differ only in the last digits of a float64
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


def in_stages(
    step: int,
    ids: Sequence[str],
    *,
    stages: tuple[Values, Values],
    tensors: tuple[Mapping[str, Any], Mapping[str, Any]],
    plan: Sequence[Sequence[Sequence[int]]],
    parameters: Sequence[str],
    tolerance: Tolerance,
    exact: Sequence[str] = (),
) -> Iterator[Difference]:
    """Yield the first difference in each stage that a step computes, in the order of computation.

    Digests of gradients and weights are compared if both sides have them and the tolerance is exact.

    Args:
        ids: IDs of the batch's sequences, in their order.
        stages: What was recorded and what was found.
        tensors: Digests of each parameter, recorded and found: `weights`, and `gradients` of each update.
        plan: Rows of each micro-batch, by update.
        parameters: Names of the parameters, in the order of the digests.
        exact: Stages that must agree bit for bit, whatever the tolerance.
    """
    digests: dict[str, list[Any]] = {kind: [side.get(kind) for side in tensors] for kind in ("gradients", "weights")}
    compared = {kind for kind, sides in digests.items() if tolerance.exact and None not in sides}

    def in_values(name: str, rows: Iterable[int], update: int = 0) -> Iterator[Difference | None]:
        if all(name in side for side in stages):
            of_rows = [ids[row] for row in rows]
            then, now = ([side[name][id] for id in of_rows] for side in stages)
            near = EXACT if name in exact else tolerance
            after_update = update > 0 and tolerance.exact  # else the gradients before it were not compared
            yield in_stage(step, name, of_rows, then, now, near, after_update=after_update)
        elif any(name in side for side in stages):
            yield on_one_side(step, name, "the stage", recorded=name in stages[0])

    def in_order() -> Iterator[Difference | None]:
        others = sorted({*stages[0], *stages[1]} - {*STAGES})  # of another trainer
        for name in [*STAGES, *others]:
            if name not in OF_UPDATES:
                yield from in_values(name, range(len(ids)))
        for update, minibatch in enumerate(plan):
            rows = sorted(row for micro in minibatch for row in micro)
            for name in OF_UPDATES:
                yield from in_values(name, rows, update)
            if "gradients" in compared:
                then, now = (side[update] if update < len(side) else "" for side in digests["gradients"])
                which = f", update {update}" if len(plan) > 1 else ""
                yield in_tensors(step, "gradients", parameters, then, now, which)
        if "weights" in compared:
            yield in_tensors(step, "update", parameters, *digests["weights"])

    return (difference for difference in in_order() if difference is not None)


def on_one_side(step: int, stage: str, where: str, *, recorded: bool) -> Difference:
    """Return the difference for what only one side has: the record, or else what was found."""
    then, now = ("present", "absent") if recorded else ("absent", "present")
    return Difference(step=step, stage=stage, where=where, recorded=then, found=now)


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
        recorded: [T] float32 for each sequence.
        found: The other side, in the same form.
        after_update: Whether the weights were updated earlier in this step, by gradients that agree.
    """
    if list(map(len, recorded)) == list(map(len, found)):
        then, now = (np.concatenate([np.empty(0, np.float32), *side], dtype=np.float32) for side in (recorded, found))
        if tolerance.agree(then, now).all():  # nearly always: all rows at once take a fraction of the time
            return None
    first: Difference | None = None
    tokens, names, largest = 0, [], 0.0
    for name, then, now in zip(ids, recorded, found, strict=True):
        if len(then) != len(now):
            return Difference(step=step, stage=stage, where=name, recorded=f"{len(then)} tokens", found=len(now))
        differs = ~tolerance.agree(np.asarray(then, np.float32), np.asarray(now, np.float32))
        if not differs.any():
            continue
        tokens += int(differs.sum())
        names.append(name)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            by = np.abs(np.subtract(then, now, dtype=np.float64))[differs]
        largest = max(largest, float(np.where(np.isnan(by), np.inf, by).max()))  # max() ignores a NaN
        if first is None:
            at = int(differs.argmax())
            first = Difference(step=step, stage=stage, where=name, position=at, recorded=then[at], found=now[at])
    if first is None:
        return None
    more = f"{tokens} tokens of {len(names)} sequences differ" if tokens > 1 else ""
    return replace(first, more=more, suggests=of_sequences(names, ids, largest, after_update))


def of_sequences(differing: Sequence[str], ids: Sequence[str], largest: float, after_update: bool = False) -> str:
    """Return the likely reason why just these of all sequences differ; empty if none is known.

    Args:
        largest: The largest difference between two values; inf if what differs are not numbers.
        after_update: See `in_stage`.
    """
    groups = {name.partition(".")[0] for name in differing}
    of_groups = [name for name in ids if name.partition(".")[0] in groups]
    if after_update and len(differing) == len(ids):
        return f"the gradients of the update before agree and all sequences differ after it: {_OF_OPTIMIZER}"
    if largest <= TINY and len(differing) > 1:
        return f"no value differs by more than {largest:.1e}: this is rounding, as by another processor or library"
    if len(differing) == 1 and len(ids) > 1:
        return "one sequence differs alone: its row was altered, or what it was computed from"
    if len(groups) == 1 and len(of_groups) == len(differing) < len(ids):
        return f"exactly the sequences of the group {groups.pop()} differ: its prompt does, or a reward"
    return ""


def in_rewards(step: int, batch: Sequence[rows.Sequence]) -> Difference | None:
    """Return the first sequence whose reward is not the sum of its named rewards; None if there is none."""
    for row in batch:
        total = math.fsum(row.rewards.values())
        if row.rewards and row.reward != total:
            return Difference(step=step, stage="rewards", where=row.id, recorded=row.reward, found=total)
    return None


ORIGIN = "group, episode, turns, finish reason, rewards by name, data or interactions"
"""Fields that the digest of a sequence's origin covers, in words."""


def _in_digests(
    step: int, recorded: Mapping[str, int], found: Mapping[str, int], *, what: str = ""
) -> Difference | None:
    """Return the first sequence whose digest differs, or that only one side has. `what` follows its ID in messages."""
    differing = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    if not differing:
        return None
    name = differing[0]
    then, now = (f"digest {side[name]:016x}" if name in side else "absent" for side in (recorded, found))
    more = f"{len(differing)} sequences differ, {differing[1]} next" if len(differing) > 1 else ""
    return Difference(step=step, stage="data", where=f"{name}{what}", recorded=then, found=now, more=more)


def in_tensors(
    step: int, stage: str, names: Sequence[str], recorded: str, found: str, update: str = ""
) -> Difference | None:
    """Return the first parameter whose digest differs.

    Args:
        recorded: Digests as `clew.record.batch_digest.to_hex` writes them.
        found: The other side, in the same form.
        update: Text that follows the parameter's name in the message and says which update it is.
    """
    then, now = from_hex(recorded), from_hex(found)
    count = max(len(then), len(now))
    differing = [i for i in range(count) if then[i : i + 1] != now[i : i + 1]]
    if not differing:
        return None
    i = differing[0]
    name = names[i] if i < len(names) else f"parameter {i}"
    before, after = (_digest_in_words(stage, side[i]) if i < len(side) else "absent" for side in (then, now))
    more = f"{len(differing)} of {count} parameters differ" if len(differing) > 1 else ""
    suggests = ""
    if stage == "update" and len(differing) == count > 1:
        suggests = f"gradients agree and all parameters differ: {_OF_OPTIMIZER}"
    elif stage == "update" and len(differing) == 1:
        suggests = "gradients agree and one parameter differs: its moments in the optimizer do"
    return Difference(
        step=step, stage=stage, where=f"{name}{update}", recorded=before, found=after, more=more, suggests=suggests
    )


def _digest_in_words(stage: str, digest: int) -> str:
    return "no gradient" if stage == "gradients" and not digest else f"digest {digest:016x}"


def in_batch(
    step: int,
    recorded: Mapping[str, RowDigest],
    batch: Sequence[rows.Sequence],
    digest_of_all: str | None = None,
    *,
    rewards_add_up: bool = True,
) -> Difference | None:
    """Return the first place where a batch is not what was trained on: data, rewards, or the order of the sequences.

    Args:
        recorded: The recorded digests of its sequences.
        digest_of_all: The digest of all sequences, from the step's JSON; None if the step was not committed.
        rewards_add_up: Whether each reward must be the sum of its parts, as Clew's own are.
    """
    digests = digest_rows(batch)
    sides = (recorded, digests)
    found = _in_digests(step, *({name: each.data for name, each in side.items()} for side in sides))
    if found is None and rewards_add_up:
        found = in_rewards(step, batch)
    if found is None:
        origins = ({name: each.origin for name, each in side.items()} for side in sides)
        found = _in_digests(step, *origins, what=f", its {ORIGIN}")
    now = digest_batch(digests)
    if found is not None or digest_of_all in (None, now):
        return found
    # Several ranks record their rows in another order than the batch has. So rows were moved only if the digest fits
    # the recorded order.
    exchanged = [(then, row.id) for then, row in zip(recorded, batch, strict=False) if then != row.id]
    in_recorded_order = {name: digests[name] for name in recorded if name in digests}
    if not exchanged or digest_batch(in_recorded_order) != digest_of_all:
        return Difference(step=step, stage="data", where="all, in their order", recorded=digest_of_all, found=now)
    then, here = exchanged[0]
    where = f"the order of the sequences, number {list(recorded).index(then)}"
    more = f"{len(exchanged)} sequences are in other places"
    return Difference(step=step, stage="data", where=where, recorded=then, found=here, more=more)


def differs(recorded: Any, found: Any) -> bool:
    """Return whether two values differ. Two NaNs agree."""
    return recorded != found and (recorded == recorded or found == found)


def in_metrics(step: int, recorded: Mapping[str, Any], found: Mapping[str, float]) -> Difference | None:
    """Return the first metric that is not exactly as recorded. One in `LATER` may be missing on one side."""
    for name in {**found, **recorded}:
        if name in LATER and not (name in found and name in recorded):
            continue
        then, now = recorded.get(name, "absent"), found.get(name, "absent")
        if differs(then, now):
            return Difference(step=step, stage="metrics", where=name, recorded=then, found=now)
    return None
