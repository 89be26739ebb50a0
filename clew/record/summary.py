"""What a step's JSON says, as docs/record.md has it, and whether a file does. Keys beyond these are left alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from clew.errors import RecordError
from clew.record.rows import FORMAT, RESTORE, check_format

if TYPE_CHECKING:
    from clew.config import Algorithm, Training

Digests = Annotated[str, Field(pattern="^([0-9a-f]{16})*$")]
"""As `clew.record.digest.to_hex` writes them."""
Count = Annotated[int, Field(ge=1)]
Plan = list[list[list[Annotated[int, Field(ge=0)]]]]
STRICT = ConfigDict(strict=True)
"""A text is no number."""


@with_config(STRICT)
class Committed(TypedDict):
    """Of a step of any trainer."""

    clew_format: int
    groups: list[str]
    step: int
    versions: Annotated[list[int], Field(min_length=2, max_length=2)]
    digests: dict[str, Any]
    metrics: NotRequired[dict[str, float]]
    plan: NotRequired[Plan]
    timings: NotRequired[dict[str, float]]


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
class Environment(TypedDict):
    ranks: Count
    tp: NotRequired[Count]
    threads: Count
    device: str
    packages: dict[str, str]


class Sections(TypedDict):
    training: dict[str, Any]
    algorithm: dict[str, Any]


@with_config(STRICT)
class Trained(TypedDict):
    """Of a step that Clew itself trained, besides."""

    digests: Whole
    tensors: Tensors
    metrics: Metrics
    plan: Plan
    environment: Environment
    code: NotRequired[dict[str, str]]
    config: Sections


def check(path: Path, step: int, summary: Any, *, by_clew: bool) -> None:
    """Raise RecordError when a step's JSON lacks what readers need, has what cannot be meant, or is of a newer format
    or another step.

    by_clew: Clew itself trained the step; another trainer need not know all of it, nor does a bundle of the steps
    before those that it holds.
    """
    found = summary if isinstance(summary, dict) else {}
    by_clew = by_clew and found.get("committed_at", 0) is not None
    check_format(path, found.get("clew_format", FORMAT))
    try:
        for kind in (Committed, Trained) if by_clew else (Committed,):
            _adapter(kind).validate_python(found)
        said = f"step: {found['step']}" if found["step"] != step else ""
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        where = ".".join(map(str, first["loc"]))
        said = f"no {where}" if first["type"] == "missing" else f"{where}: {first['input']!r:.60} ({first['msg']})"
    if said:
        raise RecordError(f"{path} says {said}: it was altered after it was written. {RESTORE.capitalize()}.")


def configured(path: Path, summary: dict[str, Any]) -> tuple[Training, Algorithm]:
    """What a step of Clew's was trained with. Raises RecordError: altered, or of another version of Clew.

    path: of the step's JSON."""
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


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
