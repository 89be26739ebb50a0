"""What the dialects have in common: a request, the model's reply, a refusal. A dialect translates between these and
its provider's JSON; everything else (sessions, tokens, the engine) knows nothing of dialects.

::

    body ──► dialect.parse ──► Ask ──► Session ──► Reply ───► dialect.respond ──► JSON
                                               └──► Stream ──► dialect.events ───► server-sent events
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from clew.errors import ClewError
from clew.rollout.capture import Interaction

Message = dict[str, Any]
"""As chat templates take them: role (system, user, assistant, tool), content (text; with images a list of parts, see
`clew.rollout.gateway.images`), and where they apply
reasoning_content (text), tool_calls ([{"id", "type": "function", "function": {"name", "arguments": dict}}]),
tool_call_id and name."""


class Refusal(ClewError):
    """A request that gets an error instead of a reply. The dialect gives it its provider's form."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """status: of HTTP. param: the field at fault. code: a provider's short word for it, such as model_not_found."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all of a reply's text is to be."""

    schema: dict[str, Any]
    """JSON Schema."""
    param: str
    """The field that asks for it."""


ANY_OBJECT = {"type": "object"}
"""The schema that json_object stands for."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, whichever dialect it came in."""

    model: str
    """As the client named it."""
    messages: list[Message] = field(default_factory=list)
    images: Mapping[str, bytes] = field(default_factory=dict)
    """What the messages show, by the names that they have there."""
    follows: str | None = None
    """The ID of an earlier reply; messages are what comes after it."""
    text: str | None = None
    """In the place of messages: goes to the model as it is."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """As chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: str = "auto"
    """auto, none, required, or the name of one of the tools."""
    parallel_tool_calls: bool = True
    """False: a reply has one tool call at most."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the client set; stop is a tuple of strings."""
    form: Form | None = None
    n: int = 1
    logprobs: int | None = None
    """How many alternatives to show beside each token's logprob; 0: the token's alone; None: no logprobs."""
    stream: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as enable_thinking."""
    notes: Sequence[str] = ()
    """What its sender should know: a setting that this model does not have, and that changes nothing."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What only the dialect itself needs again, to shape its response."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Those that the model is told of, and may call."""
        return self.tools if self.tool_choice != "none" else []

    @property
    def characters(self) -> int:
        """Of what the model reads, roughly."""
        said = sum(len(str(value)) for message in self.messages for value in message.values())
        return len(self.text or "") + said + (len(str(self.tools)) if self.tools else 0)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON text of an object."""

    @classmethod
    def of(cls, interaction_id: str, number: int, name: str, arguments: dict[str, Any]) -> ToolCall:
        """number: among those of its interaction."""
        id = f"call_{interaction_id}_{number}".replace(".", "_")
        return cls(id=id, name=name, arguments=json.dumps(arguments))


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model said, taken apart."""

    interaction: Interaction
    """Its id is the response's id; the exact tokens are here."""
    content: str
    """Without reasoning, tool calls, special tokens and the stop string."""
    reasoning: str
    tool_calls: Sequence[ToolCall]
    finish_reason: Literal["stop", "length", "tool_calls"]
    reasoning_tokens: int = 0
    """Of the output, counted by tokenizing the reasoning's text."""
    stop_string: str | None = None
    """The stop string that ended it."""
    tokens: Sequence[Token] = ()
    """Of the content, where Ask.logprobs asked for them."""

    @property
    def id(self) -> str:
        return self.interaction.id

    @property
    def created_at(self) -> float:
        """Seconds since the epoch."""
        return self.interaction.started_at

    @property
    def input_tokens(self) -> int:
        return len(self.interaction.input_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.interaction.output_ids)


def message_of(reply: Reply) -> Message:
    """Return a reply as a message of the conversation that goes on from it."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in reply.tool_calls
        ]
    return message


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a reply's content."""

    text: str
    logprob: float
    """Nats, after temperature and before truncation."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Some words of a reply, or a tool call. Joined, those of a reply are its reasoning, its content, its calls."""

    index: int
    """Of the reply, among Ask.n."""
    reasoning: str = ""
    content: str = ""
    tokens: Sequence[Token] = ()
    """Of the content, where Ask.logprobs asked for them."""
    call: ToolCall | None = None
    """One of the three."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The replies to one request, on their way."""

    ids: Sequence[str]
    """Of their interactions."""
    created_at: float
    """Seconds since the epoch."""
    input_ids: Sequence[int]
    deltas: AsyncIterator[Delta]
    """They end when the replies are there."""
    replies: Callable[[], Awaitable[Sequence[Reply]]]
    """Raises Refusal."""


class Dialect(Protocol):
    """One endpoint's JSON; a module has these names at its top."""

    @property
    def KEEP_ALIVE(self) -> bytes:
        """What a stream sends while there is nothing to say."""
        ...

    def parse(self, body: dict[str, Any]) -> Ask:
        """Raises Refusal for a field that is unknown, wrong, or asks for what cannot be done."""
        ...

    def respond(self, ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
        """The response; one reply for each of Ask.n."""
        ...

    def events(self, ask: Ask, stream: Stream) -> AsyncIterator[bytes]:
        """The stream, as server-sent events. A Refusal that its replies raise passes."""
        ...

    def refuse(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an error."""
        ...

    def refuse_in_stream(self, refusal: Refusal, place: int) -> bytes:
        """The event of an error in a stream that has begun: the one after `place` others."""
        ...


def encoded(content: Any) -> bytes:
    """JSON."""
    try:
        return orjson.dumps(content)
    except TypeError:  # in a tool's name or arguments: a number beyond 64 bits, half a surrogate pair
        return json.dumps(content).encode()


def is_utf8(text: str) -> bool:
    """Not where a model escaped half a surrogate pair in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces(text: str) -> list[str]:
    """A text as a stream hands it out: a word at a time, with the spaces before it. Joined they are the text."""
    parts: list[str] = []
    start = 0
    for place in range(1, len(text)):
        if text[place].isspace() and not text[place - 1].isspace():
            parts.append(text[start:place])
            start = place
    return [*parts, text[start:]] if text else []
