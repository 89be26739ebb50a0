"""Reading of files that someone else may have altered: a file without the expected content raises a RecordError.

The error says which file and field, what was expected and what was found. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from clew.errors import RecordError

RESTORE = "restore it from a copy of the run directory"

DEEPEST = 100
"""Maximum depth of nested objects and lists. A deeper value could hit Python's recursion limit wherever it is used."""

PLAIN = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "fields with values",
}
"""Plain words for what pydantic expects."""

STRICT = ConfigDict(strict=True)
"""Configuration for TypedDicts: no conversion between text and numbers. The types below are strict in themselves."""
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
"""Number of a step, a version or a process, as used in file names and columns."""
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True)]
"""A number that may be NaN."""
Flag = Annotated[bool, Field(strict=True)]
Moment = Annotated[float, Field(strict=True, ge=0, lt=1e11)]
"""Seconds since the epoch."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class FileMissing(RecordError, FileNotFoundError):
    """Raised when a file does not exist."""


def read_bytes(path: Path | str, remedy: str = RESTORE) -> bytes:
    """Read a regular file. It never waits, as reading a named pipe or a device would.

    Raises:
        FileMissing: The file does not exist.
        RecordError: `path` is not a regular file, or may not be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileMissing(f"Cannot read {path}: it is missing. {_sentence(remedy)}.") from None
    except OSError as error:
        remedy = "Give this user the right to read it" if isinstance(error, PermissionError) else _sentence(remedy)
        raise RecordError(f"Cannot read {path}: {error.strerror}. {remedy}.") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise RecordError(f"Cannot read {path}: expected a file, found {found}. {_sentence(remedy)}.")
        # One call reads almost every file. A file object takes twice as long, and there may be ten thousand files.
        content = os.read(handle, status.st_size + 1)
        if len(content) == status.st_size:
            return content
        with open(handle, "rb", closefd=False) as file:  # it grew meanwhile, or is too large for one call
            return content + file.read()
    finally:
        os.close(handle)


def _sentence(remedy: str) -> str:
    return remedy[:1].upper() + remedy[1:]


def read_text(path: Path, remedy: str = RESTORE) -> str:
    """Read a file of UTF-8 text. Raises RecordError, as `read_bytes` does, or if it is not UTF-8."""
    try:
        return read_bytes(path, remedy).decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"Cannot read {path}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x} at position "
            f"{error.start}. {_sentence(remedy)}."
        ) from None


def read_json(path: Path, kind: Any = None) -> Any:
    """Read one JSON document.

    Args:
        kind: The expected type, as pydantic can check it (a TypedDict, a dataclass, dict[str, int]); None: anything.

    Raises:
        FileMissing: The file does not exist.
        RecordError: The file is not JSON, or not of this type.
    """
    try:
        found = parse_json(read_bytes(path))
    except ValueError as error:
        wrong = f"expected JSON, found {path.stat().st_size} bytes that are not JSON ({error})"
        raise altered(path, wrong) from None
    return found if kind is None else check(path, found, kind)


def altered(path: Path, wrong: str, remedy: str = RESTORE) -> RecordError:
    """Return the error for a file that Clew wrote with other content."""
    return RecordError(f"Cannot read {path}: {wrong}. It was altered after it was written: {remedy}.")


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ValueError if it is not JSON, repeats a key, or has more than `DEEPEST` levels."""
    with suppress(RecursionError):
        found = json.loads(text, object_pairs_hook=_object)
        if not is_deep(found):
            return found
    raise ValueError(f"more than {DEEPEST} objects and lists within one another")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} occurs twice in one object")
    return found


def is_deep(value: Any) -> bool:
    """Return whether objects and lists are nested to more than `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for whole in level
            if isinstance(whole, (dict, list))
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return False
    return True


def check(path: Path, found: Any, kind: Any, remedy: str = RESTORE) -> Any:
    """Check what was read from `path`. Return it unchanged if `kind` is a TypedDict, otherwise as pydantic converts it.

    Raises:
        RecordError: A field is not as expected. The message names the first one.
    """
    try:
        checked = _adapter(kind).validate_python(found)
        return found if is_typeddict(kind) else checked
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_context=False)
        raise altered(path, wrong_field(first), remedy) from None


def wrong_field(error: Any) -> str:
    """Return one of pydantic's errors in plain words: the field, what was found and what was expected."""
    where = ".".join(str(part)[:60] for part in error["loc"])
    if error["type"] == "missing":
        return f"the field {where} is missing"
    words = error["msg"].removeprefix("Value error, ")
    if words.startswith("Input should be "):
        words = re.split(", unable to |, got | or instance of ", words.removeprefix("Input should be "))[0]
    words = PLAIN.get(words, f"a number {words}" if words.startswith(("greater ", "less ")) else words)
    return f"{where or 'the document'} is {error['input']!r:.60}; expected {words[:1].lower()}{words[1:]}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check_yaml(text: str) -> None:
    """Raise an error if a YAML text is dangerous or not YAML.

    Raises:
        ValueError: It has more than `DEEPEST` levels (with too many, libyaml ends the whole process); or it repeats
            something that itself repeats something (`*name` within `&name`), which can fill any memory.
        yaml.YAMLError: It is not YAML.
    """
    import yaml

    anchored: list[bool] = []  # for each level that is open, whether it can be repeated
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            anchored.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored.pop()
        elif isinstance(event, yaml.AliasEvent) and any(anchored):
            raise ValueError(
                f"alias *{event.anchor} is inside a block with an anchor (&…): it could expand without limit"
            )
        if len(anchored) > DEEPEST:
            raise ValueError(f"more than {DEEPEST} mappings and lists within one another")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration as an unchecked mapping. Raises RecordError if it is not YAML of plain values."""
    import yaml

    text = read_text(path)
    try:
        check_yaml(text)
        found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml's, in a tenth of the time
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"Cannot read {path}: expected YAML ({' '.join(str(error).split())[:300]}). {_sentence(RESTORE)}."
        ) from None
    if not isinstance(found, dict) or any(not isinstance(name, str) for name in found):
        kind = type(found).__name__ if not isinstance(found, dict) else "a key that is not text"
        raise RecordError(f"Cannot read {path}: expected sections by name, found {kind}. {_sentence(RESTORE)}.")
    return found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted names."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            named |= flat(value, f"{prefix}{name}.")
        else:
            named[f"{prefix}{name}"] = value
    return named
