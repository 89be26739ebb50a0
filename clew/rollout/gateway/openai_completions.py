"""POST /v1/completions: text that goes to the model as it is.
https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from clew.rollout.gateway.chat import Ask, Refusal, Reply, Stream, Token
from clew.rollout.gateway.openai_chat import (
    DONE,
    KEEP_ALIVE,
    Sampling,
    check,
    event,
    refuse,
    refuse_in_stream,
    sampling_of,
    usage_of,
)

__all__ = ["KEEP_ALIVE", "Request", "events", "parse", "refuse", "refuse_in_stream", "respond"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class Request(Sampling):
    """The body."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


def parse(body: dict[str, Any]) -> Ask:
    """See the protocol."""
    request = check(Request, body)
    prompt = request.prompt[0] if isinstance(request.prompt, list) and len(request.prompt) == 1 else request.prompt
    if not isinstance(prompt, str):
        raise Refusal(400, "prompt: expected one text. /generate takes token ids.", param="prompt")
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise Refusal(400, f"{name} is not supported.", param=name)
    if request.best_of not in (None, 1, request.n):
        raise Refusal(400, "best_of is not supported; take the best of n yourself.", param="best_of")
    return Ask(
        model=request.model,
        text=prompt,
        sampling={"max_new_tokens": request.max_tokens or DEFAULT_MAX_TOKENS, **sampling_of(request)},
        n=request.n or 1,
        logprobs=request.logprobs,
        stream=bool(request.stream),
        extras={"usage": bool(request.stream_options and request.stream_options.include_usage)},
    )


def respond(ask: Ask, replies: Sequence[Reply]) -> dict[str, Any]:
    """See the protocol."""
    choices = [
        _choice(ask, index, reply.id, reply.content, reply.tokens, finish_reason=_reason(reply))
        for index, reply in enumerate(replies)
    ]
    return {**_head(ask, replies[0].id, replies[0].created_at), "choices": choices, "usage": usage_of(replies)}


def _head(ask: Ask, id: str, created_at: float) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(created_at), "model": ask.model}


def _reason(reply: Reply) -> str:
    return "length" if reply.finish_reason == "length" else "stop"


def _choice(
    ask: Ask, index: int, id: str, text: str, tokens: Sequence[Token] = (), *, finish_reason: str | None
) -> dict[str, Any]:
    logprobs = None
    if ask.logprobs is not None:
        ends = list(itertools.accumulate(len(token.text) for token in tokens))
        logprobs = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "text_offset": [0, *ends][: len(tokens)],
            "top_logprobs": None,
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, "interaction_id": id}


async def events(ask: Ask, stream: Stream) -> AsyncIterator[bytes]:
    """See the protocol: chunks of some words, then for each reply one with the finish reason."""
    head = _head(ask, stream.ids[0], stream.created_at)
    usage = {"usage": None} if ask.extras.get("usage") else {}
    async for part in stream.deltas:
        choice = _choice(ask, part.index, stream.ids[part.index], part.content, part.tokens, finish_reason=None)
        yield event({**head, "choices": [choice], **usage})
    done = await stream.replies()
    for index, reply in enumerate(done):
        yield event({**head, "choices": [_choice(ask, index, reply.id, "", finish_reason=_reason(reply))], **usage})
    if usage:
        yield event({**head, "choices": [], "usage": usage_of(done)})
    yield DONE
