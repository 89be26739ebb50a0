"""Types that the dialects share: a request, the model's reply, a refusal.

A dialect translates between these and its provider's JSON. Everything else (sessions, tokens, the engine) knows nothing
of dialects.

::

    body ──► dialect.parse ──► ModelRequest ──► EpisodeEngine ──► Reply ───► dialect.respond ──► JSON
                                               └──► Stream ──► dialect.events ───► server-sent events
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from clew.errors import ClewError
from clew.gateway.interactions import Interaction

Message = dict[str, Any]
"""Message as chat templates take it, with these entries, the last four only where they apply:

role: system, user, assistant or tool.
content: text; with images a list of parts, see `clew.gateway.images`.
reasoning_content: text.
tool_calls: [{"id", "type": "function", "function": {"name", "arguments": dict, or text that is no JSON object}}].
tool_call_id: ID of the call that a tool's result answers.
name: name of the tool or the speaker.
"""


class Refusal(ClewError):
    """Raised for a request that gets an error instead of a reply. The dialect puts it into its provider's format."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Set the HTTP status, the request's field at fault, and the provider's error code, such as model_not_found."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """JSON schema that the whole text of a reply has to match."""

    schema: dict[str, Any]
    param: str
    """Name of the request's field that asks for it, shown in errors."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One request, in the form that all dialects share."""

    model: str
    """Name of the model, as the client sent it."""
    messages: list[Message] = field(default_factory=list)
    images: Mapping[str, bytes] = field(default_factory=dict)
    """Images that the messages show, by their names in the messages."""
    follows: str | None = None
    """ID of an earlier reply that the messages continue, if the client names one."""
    text: str | None = None
    """Text that goes to the model as it is, in place of messages."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools as chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: str = "auto"
    """Choice of tools: auto, none, required, or the name of one of the tools."""
    parallel_tool_calls: bool = True
    """True if a reply may have several tool calls; False: one at most."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the client set; stop is a tuple of strings."""
    response_format: ResponseFormat | None = None
    n: int = 1
    logprobs: int | None = None
    """Number of alternatives asked for beside each token's logprob; above 0 is refused later; None: no logprobs."""
    stream: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as enable_thinking."""
    notes: Sequence[str] = ()
    """Warnings for the client's author, such as that a field of the request has no effect."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Values that the dialect itself needs later, to shape its response."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model sees and may call."""
        return self.tools if self.tool_choice != "none" else []

    @property
    def characters(self) -> int:
        """Return the approximate number of characters that the model reads."""
        said = sum(len(str(value)) for message in self.messages for value in message.values())
        return len(self.text or "") + said + (len(str(self.tools)) if self.tools else 0)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """Arguments as the JSON text of an object."""

    @classmethod
    def of(cls, interaction_id: str, number: int, name: str, arguments: dict[str, Any]) -> ToolCall:
        """Return a call with an ID made of the interaction's ID and the call's number in the interaction."""
        id = f"call_{interaction_id}_{number}".replace(".", "_")
        return cls(id=id, name=name, arguments=json.dumps(arguments))


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Output of the model, split into reasoning, content and tool calls."""

    interaction: Interaction
    """Interaction with the exact tokens; its ID is the response's ID."""
    content: str
    """Text without reasoning, tool calls, special tokens and the stop string."""
    reasoning: str
    tool_calls: Sequence[ToolCall]
    finish_reason: Literal["stop", "length", "tool_calls"]
    reasoning_tokens: int = 0
    """Number of output tokens that are reasoning, counted by tokenizing the reasoning's text."""
    stop_string: str | None = None
    """Stop string that ended the reply; None if none did."""
    tokens: Sequence[Token] = ()
    """Tokens of the content, if ModelRequest.logprobs asked for them."""

    @property
    def id(self) -> str:
        return self.interaction.id

    @property
    def created_at(self) -> float:
        """Start of the request, in seconds since the epoch."""
        return self.interaction.started_at

    @property
    def input_tokens(self) -> int:
        return len(self.interaction.input_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.interaction.output_ids)


def message_of(reply: Reply) -> Message:
    """Return a reply as a message, for the conversation that continues after it."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            call_entry(call.id, call.name, json.loads(call.arguments)) for call in reply.tool_calls
        ]
    return message


def call_entry(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call as OpenAI's API (arguments: text) and chat templates (mostly a dict) have it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a reply's content."""

    text: str
    logprob: float
    """Log-probability in nats; see `Completion.logprobs`."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A piece of a reply's text, or a tool call. Joined, a reply's deltas are its reasoning, content and calls."""

    index: int
    """Index of the reply among the ModelRequest.n replies."""
    reasoning: str = ""
    content: str = ""
    tokens: Sequence[Token] = ()
    """Tokens of the content, if ModelRequest.logprobs asked for them."""
    call: ToolCall | None = None
    """Tool call. A delta has either reasoning, content or a call."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Replies to one request while they are being generated."""

    ids: Sequence[str]
    """IDs of the replies' interactions."""
    created_at: float
    """Start of the request, in seconds since the epoch."""
    input_ids: Sequence[int]
    deltas: AsyncIterator[Delta]
    """Deltas of all replies; they end when the replies are complete."""
    replies: Callable[[], Awaitable[Sequence[Reply]]]
    """Function that waits for the complete replies. Raises Refusal."""


class Dialect(Protocol):
    """JSON format of one endpoint; a module that is a dialect has these names at its top level."""

    KEEP_ALIVE: bytes
    """Bytes that a stream sends when there is nothing else to send."""

    def parse(self, body: dict[str, Any]) -> ModelRequest:
        """Parse the body of a request.

        Raises:
            Refusal: A field is wrong, or asks for something that cannot be done.
        """
        ...

    def respond(self, request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of the response to a request. There are ModelRequest.n replies."""
        ...

    def events(self, request: ModelRequest, stream: Stream) -> AsyncIterator[bytes]:
        """Yield the stream as server-sent events. A Refusal that its replies raise is passed on."""
        ...

    def refuse(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error."""
        ...

    def refuse_in_stream(self, refusal: Refusal, place: int) -> bytes:
        """Return the event that reports an error in a stream, after `place` earlier events."""
        ...


def encoded(content: Any) -> bytes:
    """Return the content as JSON."""
    try:
        return orjson.dumps(content)
    except TypeError:  # tool calls may have integers beyond 64 bits or half surrogate pairs
        return json.dumps(content).encode()


def typed_event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event that is named by the content's type."""
    return b"event: " + content["type"].encode() + b"\ndata: " + encoded(content) + b"\n\n"


def pieces(text: str) -> list[str]:
    """Split a text into the pieces in which a stream sends it: one word each, with the white space before it."""
    return re.findall(r"\s*\S+|\s+", text)
