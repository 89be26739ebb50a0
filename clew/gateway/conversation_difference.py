"""Describes, in words, where a request differs from the conversation that it should continue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clew.gateway.dialect import Message
from clew.printing import around, common_length

AROUND = 24
"""Number of characters shown before and after the first one that differs."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two conversations."""

    index: int
    """Index of the message in the request, from 0."""
    kind: str
    """Kind of the difference; only a few differences of one kind are shown."""
    what: str
    """Description as a clause, such as: message 1 (system) differs at character 9: 'a' became 'b'."""


def key_of(message: Message) -> str:
    """Return a key that is equal for messages with the same role, words and calls; IDs and reasoning do not count."""
    words = message.get("content") or ""
    return json.dumps(
        [message.get("role"), words.strip() if isinstance(words, str) else words, _calls_of(message)], sort_keys=True
    )


def first_difference(recorded: Sequence[Message], sent: Sequence[Message]) -> Difference | None:
    """Return the first difference between a recorded conversation and the beginning of a request.

    Args:
        recorded: The messages of a request, and the model's reply as the last one.
        sent: The messages of a later request.

    Returns:
        None if `sent` begins with all of `recorded`.
    """
    last = len(recorded) - 1
    for index, before in enumerate(recorded):
        if index >= len(sent):
            what = f"the request ends after message {index}, where the recorded conversation goes on"
            return Difference(index=max(0, index - 1), kind="a shorter conversation", what=what)
        after = sent[index]
        field = _differing_field(_as_sent_back(before, after) if index == last else before, after)
        if field is not None:
            kind, what = _missing_or_new(recorded, sent, index) or _changed(before, after, index, field, index == last)
            return Difference(index=index, kind=kind, what=what)
    return None


def stands_for(message: Message, reply: Message) -> bool:
    """Return whether a message that the client sent stands for the model's reply.

    It does if it has the same words and the same tool calls, whose arguments are compared as JSON. The reasoning
    may be missing: only the rendered prompt shows whether the chat template would have kept it.
    """
    return _differing_field(_as_sent_back(reply, message), message) is None


def _as_sent_back(reply: Message, after: Message) -> Message:
    """Return the reply with the harmless differences of `after`: white space around it, and missing reasoning."""
    sent_back = dict(reply)
    words = after.get("content") or ""
    if isinstance(words, str) and words.strip() == reply["content"].strip():
        sent_back["content"] = words
    if (after.get("reasoning_content") or "").strip() in ("", (reply.get("reasoning_content") or "").strip()):
        sent_back["reasoning_content"] = after.get("reasoning_content")
    return sent_back


def _differing_field(before: Message, after: Message) -> str | None:
    """Return the first field that differs and that the model may read (so not the IDs of calls), or None."""
    for field in ("role", "content", "reasoning_content"):
        if (before.get(field) or "") != (after.get(field) or ""):
            return field
    return "tool_calls" if _calls_of(before) != _calls_of(after) else None


def _missing_or_new(recorded: Sequence[Message], sent: Sequence[Message], index: int) -> tuple[str, str] | None:
    """Return the kind and a clause if messages were removed or inserted; None otherwise."""
    before, after = ([key_of(message) for message in messages[index:]] for messages in (recorded, sent))
    removed, inserted = after[0] in before, before[0] in after
    if removed == inserted:  # both True: the keys are equal, and only fields outside them differ
        return None
    count = before.index(after[0]) if removed else after.index(before[0])
    numbers = f"message {index + 1}" if count == 1 else f"messages {index + 1} to {index + count}"
    if removed:
        roles = ", ".join(str(message.get("role")) for message in recorded[index : index + count])
        clause = f"{numbers} ({_short(roles)}) of the recorded conversation {'is' if count == 1 else 'are'} left out"
        return "messages left out", clause
    first = _short(_text(sent[index], "content"))
    clause = f"{numbers} ({sent[index].get('role')}) {'was' if count == 1 else 'were'} inserted: {first!r}"
    return "messages put in", clause


def _changed(before: Message, after: Message, index: int, field: str, is_reply: bool) -> tuple[str, str]:
    """Return the kind and a clause for a message whose `field` differs."""
    role = str(after.get("role"))
    place = f"message {index + 1} ({role})"
    if field == "role" and is_reply:
        words = _short(_text(after, "content"))
        return "a reply left out", f"the model's reply is left out, and {place} is in its place: {words!r}"
    if field == "role":
        return "another role", f"{place} had the role {before.get('role')} before"
    if field == "reasoning_content" and not after.get(field):
        return "no reasoning", f"the client sends no reasoning back in {place}"
    named = "" if field == "content" else f" in {field}"
    said = " is not what the model said: it" if is_reply else ""
    change = excerpt(_text(before, field), _text(after, field))
    return f"{role} message", f"{place}{said} differs{named} {change}"


def excerpt(before: str, after: str) -> str:
    """Return a clause that says where two texts first differ, and quotes both of them around that place."""
    place = common_length(before, after)
    then, now = (around(text, place, AROUND, repr) for text in (before, after))
    return f"at character {place + 1}: {then} became {now}"


def _short(text: str) -> str:
    return around(text, 0, 2 * AROUND)


def _text(message: Message, field: str) -> str:
    """Return a field as text; images appear by their names."""
    value = _calls_of(message) if field == "tool_calls" else message.get(field)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""


def _calls_of(message: Message) -> list[dict[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
