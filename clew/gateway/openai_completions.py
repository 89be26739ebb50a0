"""Dialect of POST /v1/completions: text that goes to the model as it is.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field

from clew.gateway.dialect import ModelRequest, Refusal, Reply, Stream, Token
from clew.gateway.fields import LARGEST, Texts, read
from clew.gateway.openai_chat import (
    DONE,
    KEEP_ALIVE,
    SamplingBody,
    event,
    prompt_token_ids,
    refuse,
    refuse_in_stream,
    token_ids_of,
    usage_of,
)

__all__ = ["KEEP_ALIVE", "CompletionRequest", "events", "parse", "refuse", "refuse_in_stream", "respond"]


class CompletionRequest(SamplingBody):
    """The body of /v1/completions."""

    prompt: Texts = Field(min_length=1, max_length=1)
    """Text of the prompt. For token IDs use /generate."""
    max_tokens: int = Field(default=16, ge=1, le=LARGEST)  # OpenAI's default
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: Literal[False] = False
    best_of: int | None = None
    suffix: Literal[""] = ""


def parse(body: dict[str, Any]) -> ModelRequest:
    request, notes = read(CompletionRequest, body)
    if request.best_of not in (None, 1, request.n):
        message = f"Cannot honour best_of={request.best_of}: choose the best of n replies yourself. Leave it out."
        raise Refusal(400, message, param="best_of")
    return ModelRequest(
        model=request.model,
        text=request.prompt[0],
        sampling=request.sampling(request.max_tokens),
        n=request.n,
        logprobs=request.logprobs,
        stream=request.stream,
        notes=notes,
        extras=request.extras(),
    )


def respond(request: ModelRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    choices = [
        _choice(request, index, reply.id, reply.content, reply.tokens, finish_reason=_reason(reply))
        | token_ids_of(request, reply)
        | prompt_token_ids(request, reply.interaction.input_ids)
        for index, reply in enumerate(replies)
    ]
    return {**_head(request, replies[0].id, replies[0].created_at), "choices": choices, "usage": usage_of(replies)}


def _head(request: ModelRequest, id: str, created_at: float) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(created_at), "model": request.model}


def _reason(reply: Reply) -> str:
    return "length" if reply.finish_reason == "length" else "stop"


def _choice(
    request: ModelRequest,
    index: int,
    id: str,
    text: str,
    tokens: Sequence[Token] = (),
    *,
    finish_reason: str | None,
    offset: int = 0,
) -> dict[str, Any]:
    """Return a choice. `offset` is where the tokens begin in the reply, in characters."""
    logprobs = None
    if request.logprobs is not None:
        begins = list(itertools.accumulate((len(token.text) for token in tokens), initial=offset))
        logprobs = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "text_offset": begins[: len(tokens)],
            "top_logprobs": None,
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, "interaction_id": id}


async def events(request: ModelRequest, stream: Stream) -> AsyncIterator[bytes]:
    """Stream chunks of text, then for each reply a chunk with the finish reason; see `Dialect.events`."""
    head = _head(request, stream.ids[0], stream.created_at)
    usage = {"usage": None} if request.extras["usage"] else {}
    offsets = [0] * len(stream.ids)
    prompts = [prompt_token_ids(request, stream.input_ids) for _ in stream.ids]
    """Fields for the first chunk of each choice, and {} once it has been sent."""
    async for part in stream.deltas:
        index = part.index
        offset, offsets[index] = offsets[index], offsets[index] + sum(len(token.text) for token in part.tokens)
        choice = _choice(
            request, index, stream.ids[index], part.content, part.tokens, finish_reason=None, offset=offset
        )
        yield event({**head, "choices": [choice | prompts[index]], **usage})
        prompts[index] = {}
    done = await stream.replies()
    for index, reply in enumerate(done):
        choice = _choice(request, index, reply.id, "", finish_reason=_reason(reply))
        yield event({**head, "choices": [choice | prompts[index] | token_ids_of(request, reply)], **usage})
    if usage:
        yield event({**head, "choices": [], "usage": usage_of(done)})
    yield DONE
