"""POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from clew.gateway.dialect import (
    ANY_OBJECT,
    Ask,
    Form,
    Message,
    Refusal,
    Reply,
    Stream,
    Token,
    ToolCall,
    encoded,
    pieces,
)
from clew.gateway.fields import LARGEST, Body, Fields, Quiet, arguments_of, read
from clew.gateway.images import DataURL, by_name, content_of

KEEP_ALIVE = b": waiting for the model\n\n"
DONE = b"data: [DONE]\n\n"


class _Text(Quiet):
    type: Literal["text"]
    text: str


class _Refused(Fields):
    type: Literal["refusal"]
    refusal: str


class _URL(Fields):
    url: DataURL


class _Image(Fields):
    type: Literal["image_url"]
    image_url: _URL


_Part = Annotated[_Text | _Refused | _Image, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Parts = Annotated[list[_Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[_Part])]


class _Function(Fields):
    name: str
    arguments: str


class _Call(Quiet):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Given(Fields):
    role: Literal["system", "developer", "user", "tool"]
    content: _Parts | None = None
    name: str | None = None
    tool_call_id: str | None = None


class _Said(Fields):
    role: Literal["assistant"]
    content: _Parts | None = None
    name: str | None = None
    tool_calls: list[_Call] = Field(default_factory=list)
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="As OpenRouter names reasoning_content.")
    refusal: str | None = None
    audio: None = None
    function_call: None = None


_Message = Annotated[_Given | _Said, Field(discriminator="role")]


class _ToolFunction(Fields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(default=False, description="Frameworks set it unasked. It is not enforced; a warning says so.")


class _Tool(Fields):
    type: Literal["function"]
    function: _ToolFunction


class _Chosen(Fields):
    name: str


class _Choice(Fields):
    type: Literal["function"]
    function: _Chosen


class _Allowed(Fields):
    mode: Literal["auto", "required"]
    tools: list[_Choice] = Field(min_length=1)


class _AllowedTools(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class _Plain(Fields):
    type: Literal["text", "json_object"]


class _Named(Fields):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(default=True, description="It is enforced in any case, by engines that can.")


class _Schema(Fields):
    type: Literal["json_schema"]
    json_schema: _Named


class _StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


def _as_texts(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class SamplingBody(Body):
    """Fields that /v1/chat/completions and /v1/completions share."""

    model: str
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST, description="As vLLM and SGLang take it; -1 or 0: all.")
    min_p: float | None = Field(default=None, ge=0, lt=1, description="As vLLM and SGLang take it.")
    seed: int | None = Field(default=None, ge=0, lt=2**62)
    stop: Annotated[list[str], BeforeValidator(_as_texts, json_schema_input_type=str | list[str])] = Field(
        default_factory=list
    )
    n: int = Field(default=1, ge=1, le=128)
    min_tokens: int = Field(default=0, ge=0, le=LARGEST, description="As vLLM takes it.")
    return_token_ids: bool = Field(
        default=False, description="As vLLM takes it: the answer has prompt_token_ids and token_ids."
    )


class ChatRequest(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[_Choice | _AllowedTools, Field(discriminator="type")]
    ) = "auto"
    function_call: Literal["auto", "none"] = Field(default="auto", description="Of functions, which tools replaced.")
    parallel_tool_calls: bool = True
    response_format: Annotated[_Plain | _Schema, Field(discriminator="type")] | None = None
    modalities: list[Literal["text"]] = Field(default_factory=list)
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="As vLLM and SGLang take them, such as enable_thinking."
    )


def parse(body: dict[str, Any]) -> Ask:
    """See `Dialect.parse`."""
    request, notes = read(ChatRequest, body)
    if request.top_logprobs and not request.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs=true. Set it, or leave top_logprobs out.", param="top_logprobs")
    choice = request.tool_choice
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools]
    notes += notes_on_strict([tool.function.name for tool in request.tools if tool.function.strict])
    if isinstance(choice, _AllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        tools, tool_choice, note = allowed_tools(tools, allowed, choice.allowed_tools.mode)
        notes.append(note)
    else:
        tool_choice = choice if isinstance(choice, str) else choice.function.name
        if not isinstance(choice, str) and tool_choice not in [tool["function"]["name"] for tool in tools]:
            raise Refusal(400, f"tool_choice names {tool_choice!r}, which is not among the tools.", param="tool_choice")
    if tool_choice == "required" and not tools:
        raise Refusal(400, "tool_choice: required wants a tool, and there are none in tools.", param="tool_choice")
    sampling = sampling_of(request)
    if (limit := request.max_completion_tokens or request.max_tokens) is not None:
        sampling["max_new_tokens"] = limit
    parts = [part for message in request.messages for part in message.content or ()]
    return Ask(
        model=request.model,
        messages=[message_of(message) for message in request.messages],
        images=by_name([part.image_url.url for part in parts if isinstance(part, _Image)]),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=sampling,
        form=_form(request),
        n=request.n,
        logprobs=request.top_logprobs if request.logprobs else None,
        stream=request.stream,
        template={**request.chat_template_kwargs, **variables_of_effort(request.reasoning_effort)},
        notes=notes,
        extras={"usage": request.stream_options.include_usage, "token_ids": request.return_token_ids},
    )


def _form(request: ChatRequest) -> Form | None:
    asked = request.response_format
    if isinstance(asked, _Schema):
        return Form(schema=asked.json_schema.schema_, param="response_format")
    return Form(schema=ANY_OBJECT, param="response_format") if asked and asked.type == "json_object" else None


def variables_of_effort(effort: str | None) -> dict[str, Any]:
    """Return the variables of the chat template for a reasoning effort."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def notes_on_strict(names: Sequence[str]) -> list[str]:
    """Return a warning if the client sets strict for tools. Frameworks do so by default, so it is not refused.

    Args:
        names: Names of the tools with strict.
    """
    if not names:
        return []
    return [f"the client sets strict for {', '.join(names)}: the engine cannot hold arguments to a schema, check them"]


def allowed_tools(
    tools: Sequence[dict[str, Any]], allowed: Sequence[str], mode: str
) -> tuple[list[dict[str, Any]], str, str]:
    """Apply the tool_choice `allowed_tools`: the model is told only of the allowed tools.

    Args:
        tools: All tools, as chat templates take them.
        allowed: Names.
        mode: auto or required.

    Returns:
        The tools, the tool_choice that remains, and a warning.

    Raises:
        Refusal: A name is not among the tools.
    """
    names = [tool["function"]["name"] for tool in tools]
    for name in allowed:
        if name not in names:
            raise Refusal(400, f"tool_choice allows {name!r}, which is not among the tools.", param="tool_choice")
    kept = [tool for tool in tools if tool["function"]["name"] in allowed]
    if len(kept) == len(tools):
        note = "the client sends tool_choice allowed_tools with all tools: it has no effect and is ignored"
    else:
        note = "the client sends tool_choice allowed_tools: the model is told of the allowed tools alone"
    if mode == "required" and len(kept) == 1:
        return kept, kept[0]["function"]["name"], note
    return kept, mode, note


def sampling_of(request: SamplingBody) -> dict[str, Any]:
    """Return the fields of SamplingParams that the client set."""
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "min_p", "seed")
        if (value := getattr(request, name)) is not None
    }
    if request.top_k is not None:
        sampling["top_k"] = max(0, request.top_k)
    if request.stop:
        sampling["stop"] = tuple(request.stop)
    if request.min_tokens:
        sampling["min_new_tokens"] = request.min_tokens
    return sampling


def message_of(message: _Given | _Said) -> Message:
    """Return the message as chat templates take it."""
    made: Message = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = content_of([_of_part(part) for part in message.content or ()])
    if message.name:
        made["name"] = message.name
    if isinstance(message, _Given):
        return made | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})
    if message.content is None and message.refusal:
        made["content"] = message.refusal
    if reasoning := message.reasoning_content or message.reasoning:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _of_part(part: _Part) -> str | bytes:
    if isinstance(part, _Image):
        return part.image_url.url
    return part.text if isinstance(part, _Text) else part.refusal


def respond(ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
    """See `Dialect.respond`."""
    choices = [
        {
            "index": index,
            "message": _said(reply),
            "logprobs": logprobs_of(reply.tokens) if ask.logprobs is not None else None,
            "finish_reason": reply.finish_reason,
            "interaction_id": reply.id,
            **token_ids_of(ask, reply),
        }
        for index, reply in enumerate(replies)
    ]
    head = _head(ask, replies[0].id, replies[0].created_at, "chat.completion")
    return {
        **head,
        **prompt_token_ids(ask, replies[0].interaction.input_ids),
        "choices": choices,
        "usage": usage_of(replies),
    }


def token_ids_of(ask: Ask, reply: Reply) -> dict[str, Any]:
    """Return the field token_ids, if the client asked for it: the exact tokens, special ones included."""
    return {"token_ids": reply.interaction.output_ids} if ask.extras.get("token_ids") else {}


def prompt_token_ids(ask: Ask, input_ids: Sequence[int]) -> dict[str, Any]:
    """Return the field prompt_token_ids, if the client asked for it."""
    return {"prompt_token_ids": list(input_ids)} if ask.extras.get("token_ids") else {}


def _head(ask: Ask, id: str, created_at: float, object: str) -> dict[str, Any]:
    serving = {"service_tier": "default", "system_fingerprint": None}
    return {"id": id, "object": object, "created": int(created_at), "model": ask.model, **serving}


def _said(reply: Reply) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None, "annotations": []}
    if not reply.tool_calls:
        said["content"] = reply.content
    if reply.reasoning:
        said["reasoning_content"] = reply.reasoning  # as vLLM, SGLang and DeepSeek name it
    if reply.tool_calls:
        said["tool_calls"] = [_call(call) for call in reply.tool_calls]
    return said


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_of(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the field logprobs for these tokens of a reply."""
    return {"content": [_logprob(token) for token in tokens], "refusal": None}


def _logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}


def usage_of(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the token counts; the prompt counts once."""
    prompt, completion = replies[0].input_tokens, sum(reply.output_tokens for reply in replies)
    said = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "audio_tokens": 0}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies), **said},
    }


async def events(ask: Ask, stream: Stream) -> AsyncIterator[bytes]:
    """Stream the replies; see `Dialect.events`.

    For each reply there is a chunk with the role (and the first call, if no words come before it), chunks of some
    words, chunks of calls, and a chunk with the finish reason. The stream ends with [DONE].
    """
    head = _head(ask, stream.ids[0], stream.created_at, "chat.completion.chunk")

    begins = prompt_token_ids(ask, stream.input_ids)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        if ask.extras.get("usage"):
            more = {"usage": None, **more}
        first = dict(begins)
        begins.clear()  # the first chunk alone has them
        return event({**head, **first, "choices": choices, **more})

    def delta(index: int, reason: str | None = None, logprobs: Any = None, **said: Any) -> bytes:
        choice = {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice |= token_ids_of(ask, done[index])
        return chunk([choice])

    calls: dict[int, int] = {}
    async for part in stream.deltas:
        opens: dict[str, Any] = {}
        if part.index not in calls:
            calls[part.index] = 0
            opens = {"role": "assistant", "content": "" if part.call is None else None, "refusal": None}
            if part.call is None:
                yield delta(part.index, **opens)
        if part.call is not None:
            number = calls[part.index]
            calls[part.index] += 1
            opened = _call(part.call) | {"index": number, "function": {"name": part.call.name, "arguments": ""}}
            yield delta(part.index, **opens, tool_calls=[opened])
            for piece in pieces(part.call.arguments):
                yield delta(part.index, tool_calls=[{"index": number, "function": {"arguments": piece}}])
        elif part.reasoning:
            yield delta(part.index, reasoning_content=part.reasoning)
        else:
            yield delta(part.index, logprobs=logprobs_of(part.tokens) if part.tokens else None, content=part.content)
    done = await stream.replies()
    for index, reply in enumerate(done):
        if index not in calls:
            yield delta(index, role="assistant", content="", refusal=None)
        yield delta(index, reason=reply.finish_reason)
    if ask.extras.get("usage"):
        yield chunk([], usage=usage_of(done))
    yield DONE


def event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encoded(content) + b"\n\n"


def model(name: str) -> dict[str, Any]:
    """Return the answer of GET /v1/models/NAME."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "clew"}


def refuse(refusal: Refusal) -> dict[str, Any]:
    """See `Dialect.refuse`."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    message = str(refusal)
    if refusal.code == "context_length_exceeded":  # frameworks look for the provider's words
        message = f"This model's maximum context length is exceeded: {message}"
    return {"error": {"message": message, "type": kind, "param": refusal.param, "code": refusal.code}}


def refuse_in_stream(refusal: Refusal, place: int) -> bytes:
    """See `Dialect.refuse_in_stream`."""
    return event(refuse(refusal))
