"""POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clew.rollout.gateway.chat import Ask, Message, Refusal, Reply, Stream, Token, ToolCall, encoded, pieces
from clew.rollout.gateway.strict import arguments_of

KEEP_ALIVE = b": waiting for the model\n\n"
DONE = b"data: [DONE]\n\n"

HINTS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
     "prompt_cache_retention", "verbosity")
)  # fmt: skip
"""Fields that change nothing about what comes out; accepted."""

UNCONSTRAINED = "the engine cannot hold its output to a form"
NO_PENALTIES = "the engine samples without it"


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: str


class _Call(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    """Unknown fields are refused, but for those that clients send back because a response had them."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    provider_specific_fields: Any = None


class _ToolFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: _ToolFunction


class _Chosen(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class _Choice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: _Chosen


class _Format(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(BaseModel):
    """What all of OpenAI's endpoints call alike. Extra fields are refused by name in `check`."""

    model_config = ConfigDict(extra="allow")
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, description="As vLLM and SGLang take it; -1 or 0: all.")
    min_p: float | None = Field(default=None, ge=0, lt=1, description="As vLLM and SGLang take it.")
    seed: int | None = Field(default=None, ge=0, lt=2**62)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


R = TypeVar("R", bound=Sampling)


class Request(Sampling):
    """The body."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Format | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="As vLLM and SGLang take them, such as enable_thinking."
    )


def parse(body: dict[str, Any]) -> Ask:
    """See the protocol."""
    request = check(Request, body)
    if request.response_format is not None and request.response_format.type != "text":
        raise Refusal(400, f"response_format: {UNCONSTRAINED}.", param="response_format")
    if request.modalities not in (None, ["text"]):
        raise Refusal(400, "modalities: the model writes text alone.", param="modalities")
    template = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort == "none":
        template["enable_thinking"] = False
    choice = request.tool_choice or "auto"
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools or ()]
    tool_choice = choice if isinstance(choice, str) else choice.function.name
    if not isinstance(choice, str) and tool_choice not in [tool["function"]["name"] for tool in tools]:
        raise Refusal(400, f"tool_choice names {tool_choice!r}, which is not among the tools.", param="tool_choice")
    if choice == "required" and not tools:
        raise Refusal(400, "tool_choice: required wants a tool, and there are none in tools.", param="tool_choice")
    sampling = sampling_of(request)
    if (limit := request.max_completion_tokens or request.max_tokens) is not None:
        sampling["max_new_tokens"] = limit
    return Ask(
        model=request.model,
        messages=[message_of(message, place) for place, message in enumerate(request.messages)],
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        sampling=sampling,
        n=request.n or 1,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        stream=bool(request.stream),
        template=template,
        notes=notes_on_effort(request.reasoning_effort),
        extras={"usage": bool(request.stream_options and request.stream_options.include_usage)},
    )


def notes_on_effort(effort: str | None) -> list[str]:
    """Frameworks set an effort of their own accord for some names of models, so it is no reason to refuse."""
    if effort in (None, "none"):
        return []
    return [f"the client asks for reasoning effort {effort!r}, a setting that the model does not have"]


def check(model: type[R], body: dict[str, Any]) -> R:
    """Raises Refusal, which names the field."""
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        raise Refusal(400, f"{param}: {first['msg']}, found {str(first['input'])[:200]!r}.", param=param) from None
    for name in request.model_extra or ():
        if name not in HINTS and body[name] is not None:
            raise Refusal(400, f"unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(request, name):
            raise Refusal(400, f"{name}: {NO_PENALTIES}.", param=name)
    return request


def sampling_of(request: Sampling) -> dict[str, Any]:
    """Fields of SamplingParams."""
    sampling: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "min_p", "seed")
        if (value := getattr(request, name)) is not None
    }
    if request.top_k is not None:
        sampling["top_k"] = max(0, request.top_k)
    if request.stop:
        sampling["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    return sampling


def message_of(message: _Message, place: int) -> Message:
    """As chat templates take it."""
    made: Message = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = _text_of(message.content, place) if message.content is not None else message.refusal or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name):
            made[name] = getattr(message, name)
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


def _text_of(content: str | list[_Part], place: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in ("text", "refusal"):
            param = f"messages.{place}.content"
            raise Refusal(400, f"{param}: the model takes text alone, found a part of type {part.type!r}.", param=param)
    return "".join(part.text or part.refusal or "" for part in content)


def respond(ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
    """See the protocol."""
    choices = [
        {
            "index": index,
            "message": _said(reply),
            "logprobs": logprobs_of(reply.tokens) if ask.logprobs is not None else None,
            "finish_reason": reply.finish_reason,
            "interaction_id": reply.id,
        }
        for index, reply in enumerate(replies)
    ]
    head = _head(ask, replies[0].id, replies[0].created_at, "chat.completion")
    return {**head, "choices": choices, "usage": usage_of(replies)}


def _head(ask: Ask, id: str, created_at: float, object: str) -> dict[str, Any]:
    return {"id": id, "object": object, "created": int(created_at), "model": ask.model}


def _said(reply: Reply) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
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
    """Of tokens of a reply."""
    return {"content": [_logprob(token) for token in tokens], "refusal": None}


def _logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}


def usage_of(replies: Sequence[Reply]) -> dict[str, Any]:
    """Tokens; the prompt counts once."""
    prompt, completion = replies[0].input_tokens, sum(reply.output_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def events(ask: Ask, stream: Stream) -> AsyncIterator[bytes]:
    """See the protocol: for each reply a chunk with the role, chunks of some words, a chunk with the finish reason;
    then [DONE]."""
    head = _head(ask, stream.ids[0], stream.created_at, "chat.completion.chunk")

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        if ask.extras.get("usage"):
            more = {"usage": None, **more}
        return event({**head, "choices": choices, **more})

    def delta(index: int, reason: str | None = None, logprobs: Any = None, **said: Any) -> bytes:
        choice = {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": reason}
        return chunk([choice])

    begun: set[int] = set()
    async for part in stream.deltas:
        if part.index not in begun:
            begun.add(part.index)
            yield delta(part.index, role="assistant", content="")
        if part.reasoning:
            yield delta(part.index, reasoning_content=part.reasoning)
        else:
            yield delta(part.index, logprobs=logprobs_of(part.tokens) if part.tokens else None, content=part.content)
    done = await stream.replies()
    for index, reply in enumerate(done):
        if index not in begun:
            yield delta(index, role="assistant", content=None if reply.tool_calls else "")
        for number, call in enumerate(reply.tool_calls):
            opened = _call(call) | {"index": number, "function": {"name": call.name, "arguments": ""}}
            yield delta(index, tool_calls=[opened])
            for piece in pieces(call.arguments):
                yield delta(index, tool_calls=[{"index": number, "function": {"arguments": piece}}])
        yield delta(index, reason=reply.finish_reason)
    if ask.extras.get("usage"):
        yield chunk([], usage=usage_of(done))
    yield DONE


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(content) + b"\n\n"


def refuse(refusal: Refusal) -> dict[str, Any]:
    """See the protocol."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


def refuse_in_stream(refusal: Refusal, place: int) -> bytes:
    """See the protocol."""
    return event(refuse(refusal))
