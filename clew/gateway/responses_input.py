"""Input of /v1/responses, and its conversion to messages."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from clew.gateway.dialect import Message, Refusal
from clew.gateway.fields import Fields, arguments_of
from clew.gateway.images import Content, DataURL, content_of


class _Text(Fields):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    logprobs: Any = None


class _Image(Fields):
    type: Literal["input_image"]
    image_url: DataURL


def _as_texts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


_Part = Annotated[_Text | _Image, Field(discriminator="type")]
_Parts = Annotated[list[_Part], BeforeValidator(_as_texts, json_schema_input_type=str | list[_Part])]


class _Item(Fields):
    id: str | None = None
    status: str | None = None


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    phase: str | None = None


class _Thought(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Reasoning(_Item):
    type: Literal["reasoning"]
    content: list[_Thought] = Field(default_factory=list)
    summary: list[_Thought] = Field(default_factory=list)
    encrypted_content: str | None = Field(default=None, description="As an earlier response had it.")


class _FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class _FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Parts
    name: str | None = None


def _kind(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else None


Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Reasoning, Tag("reasoning")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


def _as_items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


Items = Annotated[list[Item], Field(min_length=1), BeforeValidator(_as_items, json_schema_input_type=str | list[Item])]
"""Type of the field `input`."""


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Return the messages that the items stand for.

    The items between two of the client's are the assistant's. They become one message, or as many as there were
    replies: a reply has its reasoning first, then one text, then its calls.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    said: Message | None = None
    for item in items:
        if isinstance(item, _FunctionCallOutput):
            result: Message = {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
            if name := item.name or names.get(item.call_id):
                result["name"] = name
            messages.append(result)
            said = None
        elif isinstance(item, _Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _joined(item.content)})
            said = None
        else:
            begins = isinstance(item, _Reasoning) or (isinstance(item, _Message) and said and said["content"])
            if said is None or (begins and said != _SILENT):
                messages.append(said := dict(_SILENT))
            _add(said, item)
            if isinstance(item, _FunctionCall):
                names[item.call_id] = _name_of(item)
    return messages


_SILENT: Message = {"role": "assistant", "content": ""}


def _add(said: Message, item: _Message | _Reasoning | _FunctionCall) -> None:
    """Add an item to the assistant's message."""
    if isinstance(item, _Message):
        said["content"] = _joined(item.content)
    elif isinstance(item, _FunctionCall):
        function = {"name": _name_of(item), "arguments": arguments_of(item.arguments)}
        said.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif reasoning := _reasoning_of(item):
        said["reasoning_content"] = reasoning


def _name_of(call: _FunctionCall) -> str:
    """Return the name of a called tool as the model knows it."""
    return f"{call.namespace}.{call.name}" if call.namespace else call.name


def _joined(parts: Sequence[_Part]) -> Content:
    return content_of([part.text if isinstance(part, _Text) else part.image_url for part in parts])


def images_of(items: Sequence[Item]) -> list[bytes]:
    """Return the images that the items show, in order."""
    parts = [
        part
        for item in items
        for part in (
            item.content if isinstance(item, _Message) else item.output if isinstance(item, _FunctionCallOutput) else ()
        )
    ]
    return [part.image_url for part in parts if isinstance(part, _Image)]


def _reasoning_of(item: _Reasoning) -> str:
    """Return the text of reasoning from its content, or else from encrypted_content, or else from its summary.

    Raises:
        Refusal: encrypted_content cannot be read.
    """
    if item.content or not item.encrypted_content:
        return "".join(thought.text for thought in item.content or item.summary)
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except ValueError:
        message = f"input: the encrypted_content of reasoning {item.id!r} is not from here and cannot be read."
        raise Refusal(400, message, param="input") from None
