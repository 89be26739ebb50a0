"""Schema of a step's JSON, as in docs/record.md, and the check of a file against it. Other keys are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import Field, ValidationError, with_config
from typing_extensions import TypedDict

from clew import reading
from clew.errors import RecordError
from clew.reading import RESTORE, STRICT, Count, Moment
from clew.record.chain import SINCE, is_unknown
from clew.record.rows import FORMAT, check_format

if TYPE_CHECKING:
    from clew.config import Algorithm, Training

Digests = Annotated[str, Field(pattern="^([0-9a-f]{16})*$")]
"""Digests, as `clew.record.batch_digest.to_hex` writes them."""
AtLeastOne = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Plan = list[list[list[Count]]]

EMPTY_SUMMARY = {
    "tensors": {},
    "metrics": {},
    "evaluation": None,
    "plan": [],
    "environment": {},
    "config": {},
    "code": {},
    "committed_at": None,
    "timings": {},
}
"""Defaults for the fields of a step's JSON that its index line does not have, where they are not known."""


@with_config(STRICT)
class Committed(TypedDict):
    """Fields of a step's JSON that any trainer writes."""

    clew_format: int
    groups: list[str]
    step: Count
    versions: Annotated[list[int], Field(min_length=2, max_length=2)]
    digests: dict[str, Any]
    chain: NotRequired[dict[str, Annotated[str, Field(pattern="^[0-9a-f]{32}$")]]]
    supervised: NotRequired[bool]
    metrics: NotRequired[dict[str, float]]
    plan: NotRequired[Plan]
    timings: NotRequired[dict[str, float]]
    committed_at: NotRequired[Moment | None]
    evaluation: NotRequired[dict[str, Any] | None]
    environment: NotRequired[dict[str, Any]]
    code: NotRequired[dict[str, Any]]
    config: NotRequired[dict[str, Any]]
    tensors: NotRequired[dict[str, Any]]


@with_config(STRICT)
class Tensors(TypedDict):
    gradients: list[Digests]
    weights: Digests


class Whole(TypedDict):
    data: Any
    gradients: Any
    weights: Any


@with_config(STRICT)
class Metrics(TypedDict):
    loss: float
    grad_norm: float


@with_config(STRICT)
class Rounding(TypedDict):
    """Properties of a machine, as text, that decide how floats are rounded, besides packages and threads."""

    formulas: AtLeastOne
    processor: NotRequired[str]
    instructions: NotRequired[str]
    variables: NotRequired[str]


@with_config(STRICT)
class Environment(TypedDict):
    ranks: AtLeastOne
    tp: NotRequired[AtLeastOne]
    threads: AtLeastOne
    device: str
    packages: dict[str, str]
    rounding: NotRequired[Rounding]


class Sections(TypedDict):
    training: dict[str, Any]
    algorithm: dict[str, Any]
    seed: NotRequired[Annotated[int, Field(strict=True)]]


@with_config(STRICT)
class Trained(TypedDict):
    """Additional fields of a step that Clew itself trained."""

    digests: Whole
    tensors: Tensors
    metrics: Metrics
    plan: Plan
    environment: Environment
    code: NotRequired[dict[str, str]]
    config: Sections


def check(path: Path, step: int, summary: Any, *, by_clew: bool) -> None:
    """Raise RecordError if a step's JSON lacks fields, has invalid values, or is of a newer format or another step.

    Args:
        by_clew: True if Clew itself trained the step. Another trainer need not know all fields, and a bundle does not
            have them for the steps before its first one.
    """
    found = summary if isinstance(summary, dict) else {}
    by_clew = by_clew and not is_unknown(found)
    check_format(path, found.get("clew_format", FORMAT))
    for kind in (Committed, Trained) if by_clew else (Committed,):
        reading.check(path, summary, kind)
    if found["step"] != step:
        raise reading.altered(path, f"step is {found['step']}; expected {step}")
    if "chain" not in found and found["clew_format"] >= SINCE and not is_unknown(found):
        raise reading.altered(path, "the field chain is missing")


def configured(path: Path, summary: dict[str, Any]) -> tuple[Training, Algorithm]:
    """Return the configuration that Clew trained a step with, given the file of the step's JSON and its content.

    Raises:
        RecordError: The configuration was altered, or is of another version of Clew.
    """
    from clew.config import Algorithm, Training

    sections = summary["config"]
    try:
        return Training(**sections["training"]), Algorithm(**sections["algorithm"])
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        why = "this Clew has no such field" if first["type"] == "extra_forbidden" else first["msg"]
        where = ".".join(["config", error.title.lower(), *map(str, first["loc"])])
        raise RecordError(
            f"{path} says {where}: {first['input']!r:.60} ({why}): it was altered after it was written, or another "
            f"version of Clew wrote it. {RESTORE.capitalize()}."
        ) from None


def environment_of(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of a committed step. In older records, `tp` defaults to 1 and `rounding` to {}."""
    return {"tp": 1, "rounding": {}, **recorded["environment"]}


def rounding_doubt(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return why two otherwise equal environments may round differently; empty if they cannot.

    The same package computes the last bit of a sum differently with different instruction sets. Its libraries choose
    these by the processor and by environment variables.
    """
    before, after = then.get("rounding", {}), now.get("rounding", {})
    if not before or not after:
        return (
            "the record does not say which CPU instruction sets it was computed with; an older Clew wrote it, whose k3 "
            "divergence was rounded differently"
        )
    differing = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return "; ".join(
        f"{name} {before.get(name) or 'none'} recorded, {after.get(name) or 'none'} here" for name in differing
    )


def spent(timings: dict[str, float], what: str) -> float:
    """Return the seconds of a part of a step, such as publish, with those of its own parts, such as publish/load."""
    return sum(value for name, value in timings.items() if name.partition("/")[0] == what)
