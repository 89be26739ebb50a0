"""Dialect of POST /v1/responses. https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

import base64
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from clew.gateway.dialect import Delta, ModelRequest, Refusal, Reply, Stream, Token, ToolCall, pieces, typed_event
from clew.gateway.fields import LARGEST, Fields, IgnoresUnknown, SampledBody, read, set_values
from clew.gateway.openai_chat import KEEP_ALIVE, NamedSchema, PlainFormat, logprob_of, refuse, response_format_of
from clew.gateway.responses_input import Items, messages_of
from clew.gateway.tool_choice import Function, allowed_functions, effort_variables, notes_on_strict, refuse_choice
from clew.gateway.turns import Turn

__all__ = ["KEEP_ALIVE", "ResponsesRequest", "events", "parse", "refuse", "refuse_in_stream", "respond", "with_items"]

Event = tuple[str, dict[str, Any]]
"""The kind of an event, and its fields."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class _Tool(Function):
    type: Literal["function"]


class _Namespace(Fields):
    """A namespace of tools, which are shown to the model as namespace.name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[_Tool]


class _WebSearch(IgnoresUnknown):
    """A built-in tool of the provider, which agents offer by default. The model does not see it; a warning says so."""

    type: Literal["web_search", "web_search_preview"]


class _Choice(Fields):
    type: Literal["auto", "none", "required", "function"]
    name: str | None = None


class _AllowedTool(Fields):
    type: Literal["function"]
    name: str


class _AllowedTools(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[_AllowedTool] = Field(min_length=1)


def _as_choice(choice: Any) -> Any:
    return {"type": choice} if isinstance(choice, str) else choice


class _Schema(NamedSchema):
    type: Literal["json_schema"]


class _TextConfig(Fields):
    format: Annotated[PlainFormat | _Schema, Field(discriminator="type")] = PlainFormat(type="text")
    verbosity: Literal["low", "medium", "high"] = "medium"


_Detail = Literal["auto", "concise", "detailed"]


class _ReasoningConfig(Fields):
    effort: str | None = None
    summary: _Detail | None = None  # no effect: reasoning is sent in full
    generate_summary: _Detail | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class _StreamOptions(Fields):
    include_obfuscation: bool = False


class ResponsesRequest(SampledBody):
    """The body of /v1/responses."""

    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Annotated[_Tool | _Namespace | _WebSearch, Field(discriminator="type")]] = Field(default=[])
    tool_choice: Annotated[
        Annotated[_Choice | _AllowedTools, Field(discriminator="type")], BeforeValidator(_as_choice)
    ] = _Choice(type="auto")
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    top_logprobs: int = Field(default=0, ge=0, le=20)
    include: list[str] = Field(default=[])
    """LOGPROBS and ENCRYPTED are honoured; all others ask for things that no response has."""
    text: _TextConfig = _TextConfig()
    reasoning: _ReasoningConfig = _ReasoningConfig()
    stream_options: _StreamOptions | None = None
    truncation: Literal["disabled", "auto"] = "disabled"
    """Accepted, but the context is never truncated; "auto" gives a warning."""
    background: Literal[False] = False
    metadata: dict[str, str] = Field(default={})
    max_tool_calls: int | None = None
    """Limit on calls of the provider's built-in tools. It has no effect: the gateway never calls them."""
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool = True
    user: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, as vLLM takes them."""


def with_items(body: dict[str, Any], turn: Callable[[str], Turn]) -> dict[str, Any]:
    """Return the request's body with full items in place of those that the client names only by their ID.

    These are item references, and reasoning items without text. `turn` finds the turn by the ID of its response.

    Raises:
        Refusal: There is no such item or response.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return {**body, "input": [_in_full(item, turn) if _is_named(item) else item for item in items]}


def _is_named(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    reasoning = item.get("type") == "reasoning" and not any(map(item.get, ("content", "summary", "encrypted_content")))
    return reasoning or item.get("type") == "item_reference"


def _in_full(item: dict[str, Any], turn: Callable[[str], Turn]) -> dict[str, Any]:
    # IDs of items, as `_output` makes them: rs_RESPONSE, msg_RESPONSE, and fc_RESPONSE.NUMBER for calls.
    kind, _, id = item["id"].partition("_")
    named = turn(id.rpartition(".")[0] if kind == "fc" else id)
    for output in _output(named.request, named.reply):
        if output["id"] == item["id"]:
            return output
    raise Refusal(404, f"Cannot read input: there is no item {item['id']!r} in this session.", param="input")


def parse(body: dict[str, Any]) -> ModelRequest:
    """See `Dialect.parse`. Instructions, if any, are the first message, and replace those of earlier turns."""
    request, notes = read(ResponsesRequest, body)
    choice = request.tool_choice
    functions = _functions(request)
    notes += notes_on_strict(functions)
    for tool in request.tools:
        if isinstance(tool, _WebSearch):
            notes.append(f"the client offers {tool.type}, a built-in tool of the provider: the model does not see it")
    if request.truncation == "auto":
        notes.append("the client asks for truncation: the gateway leaves the context as it is")
    if isinstance(choice, _AllowedTools):
        names = [tool.name for tool in choice.tools]
        functions, tool_choice, note = allowed_functions(functions, names, choice.mode)
        notes.append(note)
    else:
        tool_choice = choice.name or "" if choice.type == "function" else choice.type
    refuse_choice(tool_choice, [function.name for function in functions])
    images: dict[str, bytes] = {}
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return ModelRequest(
        model=request.model,
        notes=notes,
        follows=request.previous_response_id or None,
        messages=[*instructions, *messages_of(request.input, images)],
        images=images,
        tools=[function.for_template() for function in functions],
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=set_values(
            max_new_tokens=request.max_output_tokens, temperature=request.temperature, top_p=request.top_p
        ),
        response_format=response_format_of(request.text.format, "text.format"),
        logprobs=request.top_logprobs if request.top_logprobs or LOGPROBS in request.include else None,
        stream=request.stream,
        template={**request.chat_template_kwargs, **effort_variables(request.reasoning.effort)},
        extras={
            "instructions": request.instructions or None,
            "namespaces": [tool.name for tool in request.tools if isinstance(tool, _Namespace)],
            "encrypted": ENCRYPTED in request.include,
            "echo": _echo(request),
        },
    )


def _functions(request: ResponsesRequest) -> list[Function]:
    functions: list[Function] = []
    for tool in request.tools:
        if isinstance(tool, _Namespace):
            functions += [one.model_copy(update={"name": f"{tool.name}.{one.name}"}) for one in tool.tools]
        elif isinstance(tool, _Tool):
            functions.append(tool)
    return functions


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the request that a response repeats."""
    choice = request.tool_choice
    repeated = request.model_dump(
        include={
            *("background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model"),
            *("parallel_tool_calls", "previous_response_id", "prompt_cache_key", "safety_identifier", "store"),
            *("top_logprobs", "truncation", "user"),
        }
    )
    return {
        **repeated,
        "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": request.text.model_dump(by_alias=True),
        "tool_choice": choice.model_dump() if choice.type in ("function", "allowed_tools") else choice.type,
        "tools": [_shown(tool) for tool in request.tools],
        "top_p": 1.0 if request.top_p is None else request.top_p,
    }


def _shown(tool: _Tool | _Namespace | _WebSearch) -> dict[str, Any]:
    if isinstance(tool, _Namespace):
        return {**tool.model_dump(), "tools": [_shown(one) for one in tool.tools]}
    return {**tool.model_dump(), "strict": False} if isinstance(tool, _Tool) else tool.model_dump()


def respond(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    [reply] = replies
    return _finished(request, _begun(request, reply.id, int(reply.created_at)), reply)


def _begun(request: ModelRequest, id: str, created_at: int) -> dict[str, Any]:
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **request.extras["echo"],
    }


def _finished(request: ModelRequest, begun: dict[str, Any], reply: Reply) -> dict[str, Any]:
    cut = reply.finish_reason == "length"
    return {
        **begun,
        "status": "incomplete" if cut else "completed",
        # In OpenAI's API, only a completed response has this time.
        "completed_at": None if cut else max(begun["created_at"], int(reply.interaction.finished_at)),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(request, reply),
        "usage": {
            "input_tokens": reply.input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
            "total_tokens": reply.input_tokens + reply.output_tokens,
        },
    }


def _output(request: ModelRequest, reply: Reply) -> list[dict[str, Any]]:
    """Return the output items. Their IDs are made of the response's ID."""
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(_reasoning(request, reply.id, reply.reasoning))
    if reply.content or not (reply.reasoning or reply.tool_calls):
        items.append(_message(reply.id, reply.content, reply.tokens))
    if reply.finish_reason == "length" and not reply.tool_calls:
        items[-1]["status"] = "incomplete"
    return items + [_function_call(request, reply.id, number, call) for number, call in enumerate(reply.tool_calls)]


def _reasoning(request: ModelRequest, id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    item: dict[str, Any] = {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content}
    if request.extras.get("encrypted"):  # base64, not encrypted: some clients send back only this field
        item["encrypted_content"] = base64.b64encode(text.encode()).decode()
    return {**item, "status": "completed"}


def _message(id: str, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
    logprobs = [logprob_of(token) for token in tokens]
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "content": content, "status": "completed"}


def _function_call(request: ModelRequest, id: str, number: int, call: ToolCall) -> dict[str, Any]:
    space, _, name = call.name.partition(".")
    named = {"namespace": space, "name": name} if space in request.extras.get("namespaces", ()) else {"name": call.name}
    return {
        "id": f"fc_{id}.{number}",
        "type": "function_call",
        "call_id": call.id,
        **named,
        "arguments": call.arguments,
        "status": "completed",
    }


async def events(request: ModelRequest, stream: Stream) -> AsyncIterator[bytes]:
    """Stream created and in_progress, each item in small parts, and the final response; see `Dialect.events`."""
    numbers = itertools.count()
    [id] = stream.ids

    def event(kind: str, **fields: Any) -> bytes:
        return typed_event({"type": kind, "sequence_number": next(numbers), **fields})

    begun = _begun(request, id, int(stream.created_at))
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    items = _StreamedItems(request, id)
    async for delta in stream.deltas:
        for kind, fields in items.add(delta):
            yield event(kind, **fields)
    [reply] = await stream.replies()
    response = _finished(request, begun, reply)
    for kind, fields in items.end(response["output"]):
        yield event(kind, **fields)
    yield event(f"response.{response['status']}", response=response)


class _StreamedItems:
    """The items of a response while it is streamed. Only the newest one is open: it still grows."""

    def __init__(self, request: ModelRequest, id: str) -> None:
        self._request, self._id = request, id
        self._index, self._calls = -1, 0
        self._open: list[Delta] = []
        self._item = dict[str, Any]()
        """The open item as it was after its first delta; only its ID is used later."""

    def add(self, delta: Delta) -> Iterator[Event]:
        """Yield the events of a delta. Another kind of text, or a call, closes the open item and opens a new one."""
        if not self._open or delta.call is not None or bool(delta.reasoning) != bool(self._open[0].reasoning):
            if self._open:
                yield from _about(self._index, self._item, _end_of(self._item_so_far()))
            self._index, self._open = self._index + 1, [delta]
            self._calls += delta.call is not None
            self._item = self._item_so_far()
            yield from _about(self._index, self._item, _beginning_of(self._item))
        else:
            self._open.append(delta)
        yield from _about(self._index, self._item, _parts_of(delta))

    def end(self, output: list[dict[str, Any]]) -> Iterator[Event]:
        """Yield the events that close the open item, and those of items without any delta (an empty message)."""
        for index, item in enumerate(output):
            if index > self._index:
                yield from _about(index, item, _beginning_of(item))
            if index >= self._index:
                yield from _about(index, item, _end_of(item))

    def _item_so_far(self) -> dict[str, Any]:
        """Return the item that the open deltas make."""
        first = self._open[0]
        if first.call is not None:
            return _function_call(self._request, self._id, self._calls - 1, first.call)
        if first.reasoning:
            return _reasoning(self._request, self._id, "".join(delta.reasoning for delta in self._open))
        tokens = [token for delta in self._open for token in delta.tokens]
        return _message(self._id, "".join(delta.content for delta in self._open), tokens)


def _about(index: int, item: dict[str, Any], events: Iterable[Event]) -> Iterator[Event]:
    """Add to each event the index of its item, and the item's ID unless the event holds the item."""
    for kind, fields in events:
        yield kind, {"output_index": index, **({} if "item" in fields else {"item_id": item["id"]}), **fields}


def _beginning_of(item: dict[str, Any]) -> Iterator[Event]:
    """Yield the kinds and fields of the events that open an item, still empty."""
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    if "encrypted_content" in item:
        empty["encrypted_content"] = ""
    yield "response.output_item.added", {"item": {**item, "status": "in_progress", **empty}}
    if item["type"] == "function_call":
        return
    [part] = item["content"]
    emptied = {**part, "text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    yield "response.content_part.added", {"content_index": 0, "part": emptied}


def _parts_of(delta: Delta) -> Iterator[Event]:
    """Yield the events for some words, or for the arguments of a call."""
    if delta.call is not None:
        for piece in pieces(delta.call.arguments):
            yield "response.function_call_arguments.delta", {"delta": piece}
    elif delta.reasoning:
        yield "response.reasoning_text.delta", {"content_index": 0, "delta": delta.reasoning}
    else:
        logprobs = [logprob_of(token) for token in delta.tokens]
        yield "response.output_text.delta", {"content_index": 0, "delta": delta.content, "logprobs": logprobs}


def _end_of(item: dict[str, Any]) -> Iterator[Event]:
    """Yield the kinds and fields of the events that close an item, with all of its content."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.done", {"arguments": item["arguments"]}
    else:
        [part] = item["content"]
        whole = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield f"response.{part['type']}.done", {"content_index": 0, **whole}
        yield "response.content_part.done", {"content_index": 0, "part": part}
    yield "response.output_item.done", {"item": item}


def refuse_in_stream(refusal: Refusal, place: int) -> bytes:
    error = refuse(refusal)["error"]
    fields = {name: error[name] for name in ("code", "message", "param")}
    # The fields are sent twice: at the top, as documented, and under `error`, where OpenAI's servers actually put
    # them and its clients look.
    return typed_event({"type": "error", "sequence_number": place, **fields, "error": error})
