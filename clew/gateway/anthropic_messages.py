"""Dialect of POST /v1/messages and /v1/messages/count_tokens: see https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from clew.gateway.dialect import (
    Message,
    ModelRequest,
    Refusal,
    Reply,
    ResponseFormat,
    Stream,
    ToolCall,
    call_entry,
    pieces,
    typed_event,
)
from clew.gateway.fields import LARGEST, Body, Fields, IgnoresUnknown, SampledBody, read, set_values, text_as
from clew.gateway.images import Base64, Content, content_of
from clew.gateway.tool_choice import Function, notes_on_strict, refuse_choice

KEEP_ALIVE: bytes = b'event: ping\ndata: {"type":"ping"}\n\n'

ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Error types by HTTP status; others are invalid_request_error below 500 and api_error from 500 on."""

BILLING = "x-anthropic-billing-header:"
"""Prefix of a block that Claude Code puts before its system prompt, meant for the provider's accounting only."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Text(Fields):
    type: Literal["text"]
    shown: str = Field(alias="text")
    citations: list[Any] = Field(default=[], max_length=0)


class _Source(Fields):
    type: Literal["base64"]  # no "url": the gateway fetches nothing
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Base64


class _Image(Fields):
    type: Literal["image"]
    source: _Source

    @property
    def shown(self) -> bytes:
        return self.source.data


class _ToolReference(Fields):
    """Reference to a tool that a search has found. In its place, the model reads the tool's definition as JSON."""

    type: Literal["tool_reference"]
    tool_name: str


class _Thinking(Fields):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _ToolUse(Fields):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Fields):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Annotated[_Text | _Image | _ToolReference, Field(discriminator="type")]], text_as("text")
    ] = Field(default=[])
    is_error: bool = False


_Texts = Annotated[list[_Text], text_as("text")]


class _System(Fields):
    role: Literal["system"]
    content: _Texts


class _User(Fields):
    role: Literal["user"]
    content: Annotated[list[Annotated[_Text | _Image | _ToolResult, Field(discriminator="type")]], text_as("text")]


class _Assistant(Fields):
    role: Literal["assistant"]
    content: Annotated[list[Annotated[_Text | _Thinking | _ToolUse, Field(discriminator="type")]], text_as("text")]


class _Tool(Function):
    type: Literal["custom"] = "custom"
    parameters: dict[str, Any] | None = Field(alias="input_schema")
    defer_loading: bool = False
    """True leaves the tool out of the prompt. The model sees its definition only if a tool_reference names it."""
    allowed_callers: list[Literal["direct"]] = Field(default=[])


class _ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _ThinkingConfig(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)  # ignored: only max_tokens is a limit
    display: str | None = None  # ignored: thinking is always sent in full


class _Schema(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Fields):
    format: _Schema | None = None
    effort: str | None = None


class _Thread(Fields):
    type: Literal["create"]


class _ContinuedThread(Fields):
    type: Literal["continue"]
    previous_message_id: str


class _Edit(IgnoresUnknown):
    type: str
    keep: Any = None  # "all": the edit would remove nothing


class _ContextManagement(Fields):
    edits: list[_Edit] = Field(default=[])
    """Edits of the context. The gateway makes no edits; a warning names those that could have changed something."""


class CountRequest(Body):
    """The body of /v1/messages/count_tokens."""

    messages: list[Annotated[_System | _User | _Assistant, Field(discriminator="role")]] = Field(min_length=1)
    system: _Texts = Field(default=[])
    tools: list[_Tool] = Field(default=[])
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig = _OutputConfig()
    thread: Annotated[_Thread | _ContinuedThread, Field(discriminator="type")] | None = None
    context_management: _ContextManagement | None = None


class MessagesRequest(CountRequest, SampledBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, le=LARGEST)
    top_k: int | None = Field(default=None, ge=0, le=LARGEST)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default=[])


def parse(body: dict[str, Any]) -> ModelRequest:
    request, notes = read(MessagesRequest, body)
    sampling = set_values(
        max_new_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences) or None,
    )
    return _model_request(request, notes, sampling=sampling, stream=request.stream)


def parse_count(body: dict[str, Any]) -> ModelRequest:
    """Parse the body of /v1/messages/count_tokens, whose answer is {"input_tokens": n}."""
    return _model_request(*read(CountRequest, body))


def _model_request(request: CountRequest, notes: list[str], **more: Any) -> ModelRequest:
    choice, form, thread = request.tool_choice, request.output_config.format, request.thread
    follows = thread.previous_message_id if isinstance(thread, _ContinuedThread) else None
    tool_choice = {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)
    if follows is None:  # otherwise the tools are the thread's: `clew.gateway.app` adds them, and checks the choice
        refuse_choice(tool_choice, [tool.name for tool in request.tools])
    elif request.tools or request.system:
        message = "Cannot continue the thread: it already has its tools and system prompt. Send neither of them."
        raise Refusal(400, message, param="thread")
    if request.messages[-1].role == "assistant":
        message = "Cannot continue messages that end with an assistant's: there is no prefilling. Add a user message."
        raise Refusal(400, message, param="messages")
    images: dict[str, bytes] = {}
    return ModelRequest(
        model=request.model,
        messages=_messages(request, images),
        images=images,
        follows=follows,
        tools=[tool.for_template() for tool in request.tools if not tool.defer_loading],
        tool_choice=tool_choice,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=ResponseFormat(schema=form.schema_, param="output_config.format") if form is not None else None,
        template=_variables(request),
        notes=[*notes_on_strict(request.tools), *_notes(request), *notes],
        extras={"thread": follows is not None, "edits": request.context_management is not None},
        **more,
    )


def _variables(request: CountRequest) -> dict[str, Any]:
    thinking, effort = request.thinking, request.output_config.effort
    variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}
    if effort not in (None, "high"):  # high is what a request without effort gets
        variables["reasoning_effort"] = effort
    return variables


def _notes(request: CountRequest) -> list[str]:
    edits = request.context_management.edits if request.context_management else []
    asked = [edit.type for edit in edits if edit.keep != "all"]
    return [f"the client asks for {', '.join(asked)}: the gateway leaves the context as it is"] if asked else []


def _messages(request: CountRequest, images: dict[str, bytes]) -> list[Message]:
    """Return the messages as chat templates take them, and add their images to `images`."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    """Names of the called tools, by the ID of the call."""
    tools = {tool.name: tool.for_template() for tool in request.tools}
    system = [block for block in request.system if not block.shown.startswith(BILLING)]
    if content := _joined(system, images):
        messages.append({"role": "system", "content": content})
    for message in request.messages:
        if isinstance(message, _System):
            messages.append({"role": "system", "content": _joined(message.content, images)})
        elif isinstance(message, _User):
            messages += _of_user(message, names, tools, images)
        else:
            messages.append(_of_assistant(message))
            names.update((block.id, block.name) for block in message.content if isinstance(block, _ToolUse))
    return messages


def _joined(blocks: Sequence[Fields], images: dict[str, bytes]) -> Content:
    """Return the texts and images among these blocks as the content of a message."""
    return content_of([block.shown for block in blocks if isinstance(block, _Text | _Image)], images)


def _of_user(
    message: _User, names: dict[str, str], tools: dict[str, dict[str, Any]], images: dict[str, bytes]
) -> list[Message]:
    """Return a message for each tool's result, then one for the user's words."""
    results: list[Message] = []
    for block in message.content:
        if not isinstance(block, _ToolResult):
            continue
        parts = [_definition(part, tools) if isinstance(part, _ToolReference) else part.shown for part in block.content]
        result: Message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content_of(parts, images)}
        if block.tool_use_id in names:
            result["name"] = names[block.tool_use_id]
        if block.is_error:
            result["is_error"] = True
        results.append(result)
    words = _joined(message.content, images)
    return [*results, {"role": "user", "content": words}] if words or not results else results


def _definition(reference: _ToolReference, tools: dict[str, dict[str, Any]]) -> str:
    """Return the definition of a tool that a search found, as the text that the model reads."""
    if reference.tool_name not in tools:
        message = f"Cannot read messages: tool_reference names {reference.tool_name!r}, which is not among the tools."
        raise Refusal(400, message, param="messages")
    return json.dumps(tools[reference.tool_name], ensure_ascii=False) + "\n"


def _of_assistant(message: _Assistant) -> Message:
    result: Message = {"role": "assistant", "content": _joined(message.content, {})}
    if reasoning := "".join(block.thinking for block in message.content if isinstance(block, _Thinking)):
        result["reasoning_content"] = reasoning
    if calls := [block for block in message.content if isinstance(block, _ToolUse)]:
        result["tool_calls"] = [call_entry(call.id, call.name, call.input) for call in calls]
    return result


def respond(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    [reply] = replies
    return {
        **_begun(request, reply.id, reply.input_tokens),
        "content": _blocks(reply),
        **_ending(reply),
        **_edited(request),
        "usage": {**_usage(reply.input_tokens, reply), **SERVING},
    }


def _begun(request: ModelRequest, id: str, input_tokens: int) -> dict[str, Any]:
    """Return the message as it is before its content is known."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": {**_usage(input_tokens), **SERVING},
    }


def _ending(reply: Reply) -> dict[str, Any]:
    stopped = reply.finish_reason == "stop" and reply.stop_string is not None
    return {
        "stop_reason": "stop_sequence" if stopped else STOP_REASONS[reply.finish_reason],
        "stop_sequence": reply.stop_string if stopped else None,
        "stop_details": None,
    }


def _edited(request: ModelRequest) -> dict[str, Any]:
    """Return the list of edits made to the context, if the client asked for edits. It is always empty."""
    return {"context_management": {"applied_edits": []}} if request.extras["edits"] else {}


def _usage(input_tokens: int, reply: Reply | None = None) -> dict[str, Any]:
    """Return the token counts. `reply` is None until the model has answered."""
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": reply.output_tokens if reply is not None else 0,
        "output_tokens_details": {"thinking_tokens": reply.reasoning_tokens if reply is not None else 0},
        "server_tool_use": None,
    }


SERVING = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "inference_geo": None,
    "service_tier": "standard",
}
"""Fields in the usage of a whole message, which the event message_delta does not have."""


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:  # clients send back only signed thinking; the reply's ID serves as the signature
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.id})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    return blocks + [_tool_use(call) for call in reply.tool_calls]


def _tool_use(call: ToolCall) -> dict[str, Any]:
    input = json.loads(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input, "caller": {"type": "direct"}}


EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
"""Content blocks as they begin, by type."""


async def events(request: ModelRequest, stream: Stream) -> AsyncIterator[bytes]:
    """Stream a block for the thinking, one for the text, and one for each call of a tool; see `Dialect.events`."""
    [id] = stream.ids
    start = typed_event({"type": "message_start", "message": _begun(request, id, len(stream.input_ids))})
    started, index, open = False, -1, ""
    async for part in stream.deltas:
        if not started:
            started = True
            yield start
        kind, words = ("thinking", part.reasoning) if part.reasoning else ("text", part.content)
        if part.call is not None:
            kind = "tool_use"
        if kind != open or part.call is not None:  # each call is a block of its own
            for event in _closing(index, open, id):
                yield event
            index, open = index + 1, kind
            yield _opening(index, EMPTY[kind] if part.call is None else {**_tool_use(part.call), "input": {}})
        if part.call is None:
            yield _delta(index, {"type": f"{kind}_delta", kind: words})
            continue
        for text in ["", *pieces(_json_of(json.loads(part.call.arguments)))]:  # the provider sends an empty one first
            yield _delta(index, {"type": "input_json_delta", "partial_json": text})
    [reply] = await stream.replies()
    if not started:
        yield start
    for event in _closing(index, open, id):
        yield event
    usage = _usage(reply.input_tokens, reply)
    yield typed_event({"type": "message_delta", "delta": _ending(reply), "usage": usage, **_edited(request)})
    yield typed_event({"type": "message_stop"})


def _opening(index: int, block: dict[str, Any]) -> bytes:
    opened = typed_event({"type": "content_block_start", "index": index, "content_block": block})
    return opened + KEEP_ALIVE if index == 0 else opened  # the provider sends a ping there, too


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return typed_event({"type": "content_block_delta", "index": index, "delta": delta})


def _closing(index: int, kind: str, id: str) -> Iterator[bytes]:
    """Yield the events that end a block, if one is open."""
    if kind == "thinking":
        yield _delta(index, {"type": "signature_delta", "signature": id})
    if kind:
        yield typed_event({"type": "content_block_stop", "index": index})


def _json_of(input: dict[str, Any]) -> str:
    """Return JSON as the provider writes it; in ASCII if it has half a surrogate pair, which UTF-8 cannot hold."""
    text = json.dumps(input, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(input)
    return text


def refuse(refusal: Refusal) -> dict[str, Any]:
    kind = ERRORS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": str(refusal)}
    if refusal.code == "context_length_exceeded":  # agents look for these words, then shorten their context
        error["message"] = f"prompt is too long: {refusal}"
    if refusal.code == "previous_response_not_found":  # clients then send the whole conversation
        error["details"] = {"error_code": "thread_not_found"}
    return {"type": "error", "error": error}


def refuse_in_stream(refusal: Refusal, place: int) -> bytes:
    return typed_event(refuse(refusal))


def models(names: Sequence[str]) -> dict[str, Any]:
    """Return the answer of GET /v1/models."""
    return {"data": [model(name) for name in names], "has_more": False, "first_id": names[0], "last_id": names[-1]}


def model(name: str) -> dict[str, Any]:
    """Return the answer of GET /v1/models/NAME."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
