"""Dialect of POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from clew.gateway.dialect import (
    Message,
    ModelRequest,
    Refusal,
    Reply,
    ResponseFormat,
    Stream,
    Token,
    call_entry,
    encoded,
    pieces,
)
from clew.gateway.fields import LARGEST, Fields, IgnoresUnknown, SampledBody, Texts, read, set_values, text_as
from clew.gateway.images import DataURL, content_of
from clew.gateway.output_parser import arguments_of
from clew.gateway.tool_choice import Function, allowed_functions, effort_variables, notes_on_strict, refuse_choice

KEEP_ALIVE: bytes = b": waiting for the model\n\n"
DONE = b"data: [DONE]\n\n"


class _Text(IgnoresUnknown):
    type: Literal["text"]
    shown: str = Field(alias="text")


class _Refused(Fields):
    type: Literal["refusal"]
    shown: str = Field(alias="refusal")


class _URL(Fields):
    url: DataURL


class _Image(Fields):
    type: Literal["image_url"]
    image_url: _URL

    @property
    def shown(self) -> bytes:
        return self.image_url.url


_Parts = Annotated[list[Annotated[_Text | _Refused | _Image, Field(discriminator="type")]], text_as("text")]


class _CalledFunction(Fields):
    name: str
    arguments: str


class _Call(IgnoresUnknown):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Given(Fields):
    role: Literal["system", "developer", "user", "tool"]
    content: _Parts | None = None
    name: str | None = None
    tool_call_id: str | None = None


class _Said(Fields):
    role: Literal["assistant"]
    content: _Parts | None = None
    name: str | None = None
    tool_calls: list[_Call] = Field(default=[])
    reasoning_content: str | None = None
    reasoning: str | None = None  # OpenRouter's name for reasoning_content
    refusal: str | None = None
    audio: None = None
    function_call: None = None


class _Tool(Fields):
    type: Literal["function"]
    function: Function


class _Name(Fields):
    name: str


class _Choice(Fields):
    type: Literal["function"]
    function: _Name


class _Allowed(Fields):
    mode: Literal["auto", "required"]
    tools: list[_Choice] = Field(min_length=1)


class _AllowedTools(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class PlainFormat(Fields):
    """A format of the reply that needs no schema."""

    type: Literal["text", "json_object"]


class NamedSchema(Fields):
    """A JSON schema and its name. Replies are held to it whether or not `strict` is set."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class _Schema(Fields):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class _StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class SamplingBody(SampledBody):
    """Fields that /v1/chat/completions and /v1/completions share. Some of them are vLLM's and SGLang's."""

    stream_options: _StreamOptions = _StreamOptions()
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST)
    """Number of likeliest tokens to sample from; -1 or 0: all."""
    min_p: float | None = Field(default=None, ge=0, lt=1)
    seed: int | None = Field(default=None, ge=0, lt=2**62)
    stop: Texts = Field(default=[])
    n: int = Field(default=1, ge=1, le=128)
    min_tokens: int = Field(default=0, ge=0, le=LARGEST)
    return_token_ids: bool = False
    """True adds prompt_token_ids and token_ids to the answer."""

    def sampling(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Return the fields of SamplingParams that the client set."""
        return set_values(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            top_k=None if self.top_k is None else max(0, self.top_k),
            stop=tuple(self.stop) or None,
            min_new_tokens=self.min_tokens or None,
        )

    def extras(self) -> dict[str, Any]:
        """Return the settings that shape the response; see `ModelRequest.extras`."""
        return {"usage": self.stream_options.include_usage, "token_ids": self.return_token_ids}


class ChatRequest(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[Annotated[_Given | _Said, Field(discriminator="role")]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[_Tool] = Field(default=[])
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[_Choice | _AllowedTools, Field(discriminator="type")]
    ) = "auto"
    function_call: Literal["auto", "none"] = "auto"
    """Choice among `functions`, which are refused. It has no effect."""
    parallel_tool_calls: bool = True
    response_format: Annotated[PlainFormat | _Schema, Field(discriminator="type")] | None = None
    modalities: list[Literal["text"]] = Field(default=[])
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as enable_thinking."""


def parse(body: dict[str, Any]) -> ModelRequest:
    request, notes = read(ChatRequest, body)
    if request.top_logprobs and not request.logprobs:
        message = "Cannot honour top_logprobs: it needs logprobs=true. Set it, or leave top_logprobs out."
        raise Refusal(400, message, param="top_logprobs")
    functions = [tool.function for tool in request.tools]
    choice, format = request.tool_choice, request.response_format
    notes += notes_on_strict(functions)
    if isinstance(choice, _AllowedTools):
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools]
        functions, tool_choice, note = allowed_functions(functions, names, allowed.mode)
        notes.append(note)
    else:
        tool_choice = choice if isinstance(choice, str) else choice.function.name
    refuse_choice(tool_choice, [function.name for function in functions])
    images: dict[str, bytes] = {}
    return ModelRequest(
        model=request.model,
        messages=[_message_of(message, images) for message in request.messages],
        images=images,
        tools=[function.for_template() for function in functions],
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=request.sampling(request.max_completion_tokens or request.max_tokens),
        response_format=response_format_of(
            format.json_schema if isinstance(format, _Schema) else format, "response_format"
        ),
        n=request.n,
        logprobs=request.top_logprobs if request.logprobs else None,
        stream=request.stream,
        template={**request.chat_template_kwargs, **effort_variables(request.reasoning_effort)},
        notes=notes,
        extras=request.extras(),
    )


def response_format_of(format: PlainFormat | NamedSchema | None, param: str) -> ResponseFormat | None:
    """Return the format that the field `param` asks for."""
    if isinstance(format, NamedSchema):
        return ResponseFormat(schema=format.schema_, param=param)
    return ResponseFormat(schema={"type": "object"}, param=param) if format and format.type == "json_object" else None


def _message_of(message: _Given | _Said, images: dict[str, bytes]) -> Message:
    """Return the message as chat templates take it, and add its images to `images`."""
    content = content_of([part.shown for part in message.content or ()], images)
    result: Message = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name:
        result["name"] = message.name
    if isinstance(message, _Given):
        if message.tool_call_id:
            result["tool_call_id"] = message.tool_call_id
        return result
    if message.content is None and message.refusal:
        result["content"] = message.refusal
    if reasoning := message.reasoning_content or message.reasoning:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            call_entry(call.id, call.function.name, arguments_of(call.function.arguments))
            for call in message.tool_calls
        ]
    return result


def respond(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": _assistant_message(reply),
            "logprobs": _logprobs(reply.tokens) if request.logprobs is not None else None,
            "finish_reason": reply.finish_reason,
            "interaction_id": reply.id,
            **token_ids_of(request, reply),
        }
        for index, reply in enumerate(replies)
    ]
    return {
        **_head(request, replies[0].id, replies[0].created_at, "chat.completion"),
        **prompt_token_ids(request, replies[0].interaction.input_ids),
        "choices": choices,
        "usage": usage_of(replies),
    }


def token_ids_of(request: ModelRequest, reply: Reply) -> dict[str, Any]:
    """Return the field token_ids, if the client asked for it: the exact tokens, special ones included."""
    return {"token_ids": reply.interaction.output_ids} if request.extras["token_ids"] else {}


def prompt_token_ids(request: ModelRequest, input_ids: Sequence[int]) -> dict[str, Any]:
    """Return the field prompt_token_ids, if the client asked for it."""
    return {"prompt_token_ids": list(input_ids)} if request.extras["token_ids"] else {}


def _head(request: ModelRequest, id: str, created_at: float, object: str) -> dict[str, Any]:
    return {
        "id": id,
        "object": object,
        "created": int(created_at),
        "model": request.model,
        "service_tier": "default",
        "system_fingerprint": None,
    }


def _assistant_message(reply: Reply) -> dict[str, Any]:
    content = None if reply.tool_calls and not reply.content else reply.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning  # as vLLM, SGLang and DeepSeek name it
    if reply.tool_calls:
        message["tool_calls"] = [call_entry(call.id, call.name, call.arguments) for call in reply.tool_calls]
    return message


def logprob_of(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [logprob_of(token) for token in tokens], "refusal": None}


def usage_of(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the token counts. The prompt counts once, however many replies there are."""
    prompt, completion = replies[0].input_tokens, sum(reply.output_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": sum(reply.reasoning_tokens for reply in replies),
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_tokens": 0,
        },
    }


async def events(request: ModelRequest, stream: Stream) -> AsyncIterator[bytes]:
    """Stream the replies; see `Dialect.events`.

    A reply's first chunk has its role (and its first call, if no words come before it). Chunks of words, of calls, and
    one with the finish reason follow. The stream ends with the token counts, if asked for, and [DONE].
    """
    head = _head(request, stream.ids[0], stream.created_at, "chat.completion.chunk")
    usage: dict[str, Any] = {"usage": None} if request.extras["usage"] else {}
    first = prompt_token_ids(request, stream.input_ids)  # in the first chunk only

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **fields}
        content = {**head, **first, "choices": [choice], **usage}
        first.clear()
        return event(content)

    calls: dict[int, int] = {}
    """Number of calls so far, by the index of the reply; a reply has an entry once it has begun."""
    async for part in stream.deltas:
        index = part.index
        opens: dict[str, Any] = {}
        if index not in calls:
            calls[index] = 0
            opens = {"role": "assistant", "content": "" if part.call is None else None, "refusal": None}
            if part.call is None:
                yield chunk(index, opens)
        if part.call is not None:
            number = calls[index]
            calls[index] += 1
            opened = {**call_entry(part.call.id, part.call.name, ""), "index": number}
            yield chunk(index, {**opens, "tool_calls": [opened]})
            for piece in pieces(part.call.arguments):
                yield chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
        elif part.reasoning:
            yield chunk(index, {"reasoning_content": part.reasoning})
        else:
            yield chunk(index, {"content": part.content}, logprobs=_logprobs(part.tokens) if part.tokens else None)
    replies = await stream.replies()
    for index, reply in enumerate(replies):
        if index not in calls:
            yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
        yield chunk(index, {}, reply.finish_reason, **token_ids_of(request, reply))
    if usage:
        yield event({**head, "choices": [], "usage": usage_of(replies)})
    yield DONE


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + encoded(content) + b"\n\n"


def model(name: str) -> dict[str, Any]:
    """Return the answer of GET /v1/models/NAME."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "clew"}


def refuse(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    message = str(refusal)
    if refusal.code == "context_length_exceeded":  # frameworks recognise the provider's wording
        message = f"This model's maximum context length is exceeded: {message}"
    return {"error": {"message": message, "type": kind, "param": refusal.param, "code": refusal.code}}


def refuse_in_stream(refusal: Refusal, place: int) -> bytes:
    return event(refuse(refusal))
