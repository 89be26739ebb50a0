"""Input of /v1/responses, and its conversion to messages."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from clew.gateway.dialect import Message, Refusal, call_entry
from clew.gateway.fields import Fields, text_as
from clew.gateway.images import DataURL, content_of
from clew.gateway.output_parser import arguments_of


class _Text(Fields):
    type: Literal["input_text", "output_text"]
    shown: str = Field(alias="text")
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: Any = None


class _Image(Fields):
    type: Literal["input_image"]
    shown: DataURL = Field(alias="image_url")


_Parts = Annotated[list[Annotated[_Text | _Image, Field(discriminator="type")]], text_as("input_text")]


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
    content: list[_Thought] = Field(default=[])
    summary: list[_Thought] = Field(default=[])
    encrypted_content: str | None = None


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


Items = Annotated[list[Item], Field(min_length=1), BeforeValidator(_as_items)]


def messages_of(items: Sequence[Item], images: dict[str, bytes]) -> list[Message]:
    """Return the messages that the items stand for, and add their images to `images`.

    Consecutive items of the assistant become one message for each reply. A reply has its reasoning first, then one
    text, then its calls. So reasoning, or a second text, begins a new message.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    """Names of the called tools, by the ID of the call."""
    reply: Message | None = None
    """The assistant's message that items are added to."""
    for item in items:
        if isinstance(item, _FunctionCallOutput):
            content = content_of([part.shown for part in item.output], images)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            if name := item.name or names.get(item.call_id):
                messages[-1]["name"] = name
            reply = None
        elif isinstance(item, _Message) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": content_of([part.shown for part in item.content], images)})
            reply = None
        else:
            begins = isinstance(item, _Reasoning) or (isinstance(item, _Message) and reply and reply["content"])
            if reply is None or (begins and reply != _EMPTY_REPLY):
                messages.append(reply := dict(_EMPTY_REPLY))
            if isinstance(item, _Message):
                reply["content"] = content_of([part.shown for part in item.content], images)
            elif isinstance(item, _FunctionCall):
                names[item.call_id] = name = f"{item.namespace}.{item.name}" if item.namespace else item.name
                call = call_entry(item.call_id, name, arguments_of(item.arguments))
                reply.setdefault("tool_calls", []).append(call)
            elif reasoning := _reasoning_of(item):
                reply["reasoning_content"] = reasoning
    return messages


_EMPTY_REPLY: Message = {"role": "assistant", "content": ""}


def _reasoning_of(item: _Reasoning) -> str:
    """Return the text of a reasoning item: its content, else its decoded encrypted_content, else its summary."""
    if item.content or not item.encrypted_content:
        return "".join(thought.text for thought in item.content or item.summary)
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except ValueError:
        message = (
            f"Cannot read input: the encrypted_content of reasoning {item.id!r} is not from this server. Send the item "
            f"back as it was in the response."
        )
        raise Refusal(400, message, param="input") from None
