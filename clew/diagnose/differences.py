"""Where two computations of the same step part first: pure comparison, without torch.

A step is compared stage by stage, in the order in which it was computed; within a stage sequence by sequence, token by
token. What comes after the first difference follows from it, and is only counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clew.record import rows
from clew.record.digest import RowDigest, digest_batch, digest_rows, from_hex

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
"""In the order in which a step computes them; those of `OF_UPDATES` again for each of its updates."""

OF_UPDATES = ("logprobs", "entropies", "loss", "gradients")
"""What an update computes from the rows of its mini-batch, after the weights were changed by those before it."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Values a and b agree when |a - b| <= absolute + relative x |a|. Both zero: bit for bit."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        return not (self.absolute or self.relative)

    def agree(self, recorded: np.ndarray, found: np.ndarray) -> np.ndarray:
        """[...] bool"""
        if self.exact:
            return recorded.view(np.uint32) == found.view(np.uint32)
        both_nan = np.isnan(recorded) & np.isnan(found)
        with np.errstate(invalid="ignore"):
            near = np.abs(recorded - found) <= self.absolute + self.relative * np.abs(recorded)
        return near | both_nan | (recorded == found)

    def __str__(self) -> str:
        return "bit for bit" if self.exact else f"within {self.absolute:g} + {self.relative:g} x |recorded|"


EXACT = Tolerance()

_OF_OPTIMIZER = "the learning rate does, or another setting of the optimizer"

TINY = 1e-4
"""Of logprobs, losses and the like: what rounding may make of them."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place of a stage where two computations part."""

    step: int
    stage: str
    where: str
    """A sequence's ID, a parameter's name, or what was counted."""
    position: int | None
    """Of the token in the sequence."""
    recorded: Any
    found: Any
    more: str = ""
    """How much else differs in this stage."""
    suggests: str = ""
    """What usually makes such a difference; empty where nothing is known."""

    def __str__(self) -> str:
        return self.told("recorded", "here")

    def told(self, recorded: str, found: str) -> str:
        """In a line; recorded, found: what the two sides are called."""
        place = f"{self.where}, token {self.position}" if self.position is not None else self.where
        then, now = (_shown(each) for each in (self.recorded, self.found))
        if then == now:  # in the last digits of a float64
            then, now = (str(each) for each in (self.recorded, self.found))
        values = f"{recorded} {then}, {found} {now}"
        return f"step {self.step}, {self.stage}: {place}: {values}{f' ({self.more})' if self.more else ''}"


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
    """Return the first token of a stage that differs.

    Args:
        step: The step.
        stage: Its stage.
        ids: The IDs of the sequences.
        recorded: [T] float32 for each sequence.
        found: The same of the other side.
        tolerance: Up to which two values agree.
        after_update: The weights were updated earlier in this step, by gradients that agree.
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
    """Return what it suggests that these sequences of all differ.

    Args:
        differing: Their IDs.
        ids: The IDs of all that were compared.
        largest: The largest difference of two values; inf where what differs are not numbers.
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
    """A difference in the advantages or the loss, with what a function of the user's own may have done.

    then, now: `clew.training.custom.source_of`, as recorded and here.
    checked: all that they were computed from agrees; otherwise it is only what the record says.
    chance: what is known of why its results differ from time to time.
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
    """The first sequence whose reward is not what its named rewards add up to."""
    for row in batch:
        total = math.fsum(row.rewards.values())
        if row.rewards and row.reward != total:
            return Difference(step=step, stage="rewards", where=row.id, position=None, recorded=row.reward, found=total)
    return None


ORIGIN = "group, episode, turns, finish reason, rewards by name, data or interactions"
"""What a digest of a sequence's origin covers."""


def in_data(step: int, recorded: Mapping[str, RowDigest], found: Mapping[str, RowDigest]) -> Difference | None:
    """The first sequence whose data has another digest, or which only one side has. Digests by sequence ID."""
    return _in_digests(step, *({name: each.data for name, each in side.items()} for side in (recorded, found)), what="")


def in_origins(step: int, recorded: Mapping[str, RowDigest], found: Mapping[str, RowDigest]) -> Difference | None:
    """The first sequence that comes from elsewhere. Digests by sequence ID; older records have none."""
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
    """Whether two sequences have each other's content."""
    there = a in recorded and b in recorded and a in found and b in found
    return there and recorded[a] == found[b] and recorded[b] == found[a]


def in_tensors(
    step: int, stage: str, names: Sequence[str], recorded: str, found: str, update: str = ""
) -> Difference | None:
    """The first parameter whose digest differs. recorded, found: as `clew.record.digest.to_hex` writes them."""
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
    """What of a batch is not what was trained on: data, rewards, the order of the sequences.

    recorded: the digests of its sequences.   whole: that of all, as the step's JSON has it; None: not committed.
    rewards_add_up: each reward is the sum of its parts, as Clew's own are.
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
    """The first metric that is not, to the last bit, what was recorded, or that only one side has."""
    for name in {**found, **recorded}:
        then, now = recorded.get(name, "absent"), found.get(name, "absent")
        if then != now and not (then != then and now != now):  # two NaNs
            return Difference(step=step, stage="metrics", where=name, position=None, recorded=then, found=now)
    return None


def in_number(
    step: int, stage: str, name: str, recorded: float, found: float, tolerance: Tolerance
) -> Difference | None:
    """A single number, where bits are not promised."""
    if bool(tolerance.agree(np.array([recorded], np.float32), np.array([found], np.float32))[0]):
        return None
    return Difference(step=step, stage=stage, where=name, position=None, recorded=recorded, found=found)
