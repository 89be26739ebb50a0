"""What was asked of a provider and what it answered, in words, whichever of the dialects they speak.

IDs are left out: a provider draws them by chance, and they come back in later requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

ASKED = ("instructions", "system", "tools", "messages", "input", "prompt")
"""What the model reads of a request."""

CHANCE = frozenset(("id", "call_id", "tool_call_id", "tool_use_id", "signature", "encrypted_content"))
"""What a provider draws by chance."""

FORM = frozenset(("role", "type", "status", "phase", "index", "stop_reason", "stop_sequence"))
"""What is none of an answer's words."""

SAID = ("message", "delta", "text")
"""What is words of OpenAI's choices; providers add much of their own."""

OPAQUE = 4096
"""So many characters without a space are an image, perhaps, and no text."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a provider said."""

    id: str
    words: str
    error: str
    """Instead of an answer, or in the midst of a stream; empty when there was none."""


def asked(body: bytes) -> str:
    """What the model is to read."""
    request = _object(body)
    if request is None:
        return body.decode(errors="replace")
    return "\n".join(texts({name: request[name] for name in ASKED if name in request}, CHANCE))


def answer(body: bytes) -> Answer:
    """Of a body that came whole."""
    whole = _object(body)
    if whole is None:
        return Answer(id="", words=body.decode(errors="replace"), error="")
    said = _choices(whole) or whole.get("output") or whole.get("content")
    return Answer(id=str(whole.get("id", "")), words="\n".join(texts(said, CHANCE | FORM)), error=_error(whole))


def answer_of_stream(body: bytes) -> Answer:
    """Of as many server-sent events as came: the pieces of a text (a choice's, a block's, a tool call's) are joined."""
    id, error = "", ""
    said: dict[tuple[Any, ...], str] = {}

    def add(path: tuple[Any, ...], piece: Any) -> None:
        if isinstance(piece, str):
            said[path] = said.get(path, "") + piece
        elif isinstance(piece, dict):
            for name, each in piece.items():
                if name not in CHANCE | FORM:
                    add((*path, name), each)
        elif isinstance(piece, list):
            for number, each in enumerate(piece):
                add((*path, each.get("index", number) if isinstance(each, dict) else number), each)

    for event in _events(body):
        about = next((event[name] for name in ("response", "message") if isinstance(event.get(name), dict)), event)
        id, error = id or str(about.get("id", "")), error or _error(about)
        add((), _choices(event))
        place = event.get("output_index"), event.get("content_index"), event.get("index")
        add(place, event.get("content_block"))
        add(place, event.get("delta"))
        if event.get("type") == "response.output_item.added":
            add(place, event.get("item"))
    return Answer(id=id, words="\n".join(filter(None, said.values())), error=error)


def refused(status: int, body: bytes) -> str:
    """What a refusal says."""
    said = _error(_object(body) or {}) or body.decode(errors="replace")[:200].strip()
    return f"HTTP {status}: {said}" if said else f"HTTP {status}"


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = [each for each in answer.get("choices") or () if isinstance(each, dict)]
    return [{name: each[name] for name in ("index", *SAID) if name in each} for each in choices]


def _error(answer: dict[str, Any]) -> str:
    """The message of what may be an error, in each dialect's form."""
    error = answer if answer.get("type") == "error" and "message" in answer else answer.get("error")
    return str(error.get("message") or error) if isinstance(error, dict) else str(error or "")


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.splitlines():
        event = _object(line[5:]) if line.startswith(b"data:") else None
        if event is not None:
            yield event


def texts(value: Any, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """The texts within, in their order. Tools, and what one is called with, are JSON."""
    if isinstance(value, str):
        start = value[:OPAQUE]
        is_text = len(start) < OPAQUE or not start.isascii() or len(start.split(maxsplit=1)) > 1
        yield value if is_text else f"{len(value)} characters: {hashlib.sha256(value.encode()).hexdigest()}"
    elif isinstance(value, list):
        for each in value:
            yield from texts(each, left_out)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name == "tools" or (name in ("input", "arguments") and isinstance(each, dict)):
                yield json.dumps(each, ensure_ascii=False, default=str)
            elif name not in left_out:
                yield from texts(each, left_out)
    elif value is not None:
        yield str(value)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
