"""POST /v1/completions: text that goes to the model as it is.
https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from pydantic import Field

from clew.rollout.gateway.chat import Ask, Refusal, Reply, pieces
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
    choices = [_choice(ask, index, reply, reply.content) for index, reply in enumerate(replies)]
    return {**_head(ask, replies[0]), "choices": choices, "usage": usage_of(replies)}


def _head(ask: Ask, first: Reply) -> dict[str, Any]:
    return {"id": first.id, "object": "text_completion", "created": int(first.created_at), "model": ask.model}


def _choice(ask: Ask, index: int, reply: Reply, text: str) -> dict[str, Any]:
    logprobs = None
    if ask.logprobs is not None:
        starts = [sum(len(token.text) for token in reply.tokens[:place]) for place in range(len(reply.tokens))]
        logprobs = {
            "tokens": [token.text for token in reply.tokens],
            "token_logprobs": [token.logprob for token in reply.tokens],
            "text_offset": starts,
            "top_logprobs": None,
        }
    reason = "length" if reply.finish_reason == "length" else "stop"
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "interaction_id": reply.id}


async def events(ask: Ask, id: str, replies: Awaitable[Sequence[Reply]]) -> AsyncIterator[bytes]:
    """See the protocol."""
    done = await replies
    usage = {"usage": None} if ask.extras.get("usage") else {}
    for index, reply in enumerate(done):
        parts = [reply.content] if ask.logprobs is not None else pieces(reply.content) or [""]
        for piece in parts[:-1]:
            going_on = _choice(ask, index, reply, piece) | {"finish_reason": None}
            yield event({**_head(ask, done[0]), "choices": [going_on], **usage})
        yield event({**_head(ask, done[0]), "choices": [_choice(ask, index, reply, parts[-1])], **usage})
    if usage:
        yield event({**_head(ask, done[0]), "choices": [], "usage": usage_of(done)})
    yield DONE
