"""Reading of a request's body so that nothing in it is ignored: an unknown field is refused by name."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from clew.gateway.dialect import Refusal

LARGEST = 2**31 - 1
"""Maximum of the counts that a client may send."""

NOT_HONOURED = "not_honoured"
"""Error type for fields that the gateway knows, but with a value that it cannot honour."""

NOT_SERVED = {
    "input_audio": "the model takes text alone",
    "file": "the model takes text alone",
}
"""Reason why a `type` is not served; for other types, the error lists the ones that are."""


class Strict(BaseModel):
    """A JSON object that may have only its own fields. A null counts as a field that is not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


S = TypeVar("S", bound=Strict)


def read(model: type[S], body: dict[str, Any]) -> S:
    """Return the body as a model.

    Raises:
        Refusal: A field is unknown or wrong; the first one is named.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    param = _path(body, first["loc"])
    why = first["msg"]
    kind = first.get("ctx", {}).get("tag") or (first["input"] if first["loc"][-1:] == ("type",) else None)
    if first["type"] == "extra_forbidden":
        raise Refusal(
            400,
            f"Cannot honour {param}: no such field is served here. Leave it out.",
            param=param,
            code="unknown_parameter",
        )
    if first["type"] == NOT_HONOURED:
        value = f"={first['input']}" if isinstance(first["input"], int | float) else ""
        raise Refusal(400, f"Cannot honour {param}{value}: {why.replace('{name}', param)}.", param=param)
    if isinstance(kind, str):
        served = first.get("ctx", {}).get("expected_tags") or first.get("ctx", {}).get("expected")
        why = NOT_SERVED.get(kind) or f"{kind!r} is not served here, only {served}"
    elif first["type"] != "missing":
        why += f", found {str(first['input'])[:200]!r}"
    raise Refusal(400, f"{param}: {why}.", param=param)


def _path(body: Any, location: tuple[int | str, ...]) -> str:
    """Return the path of an error in the body, without the names of the union members that pydantic tried."""
    path: list[str] = []
    value: Any = body
    tagged: Any = None
    for place, part in enumerate(location):
        last = place == len(location) - 1
        known: dict[Any, Any] = {}
        if isinstance(value, dict | list):
            known = value if isinstance(value, dict) else dict(enumerate(value))
        if part in known and (last or known.get("type") != part or known is tagged):
            value = known[part]
        elif not last:
            tagged = known  # a member's tag, which may be a field's name too
            continue
        path.append(str(part))
    return ".".join(path)


def arguments_of(text: str) -> dict[str, Any] | str:
    """Return a tool call's arguments as chat templates take them: an object, or the text itself if it is not one."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
