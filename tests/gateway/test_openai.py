"""Responses and chunks of the chat and completions dialects, as they go over the wire, judged by openai's own types."""

import asyncio
import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from clew.gateway import openai_chat, openai_completions
from clew.gateway.dialect import Stream, Token
from clew.gateway.reply_so_far import deltas_of
from tests.gateway.dialects import ID, made

TOKENS = [Token(text="Let me", logprob=-0.5), Token(text=" see.", logprob=-0.25)]
REPLIES = [
    made("Let me see.", reasoning="Which city?", tool_calls=[("weather", {"city": "Ulm"}), ("time", {})]),
    made("Let me see.", tokens=TOKENS),
    made(tool_calls=[("time", {})]),
    made("", finish_reason="length"),
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
PLAIN = {"model": "m", "prompt": "Hi", "logprobs": 0}


def chunks_of(dialect, ask, reply):
    """Return the chunks of a stream, without the [DONE] at its end."""

    async def deltas():
        for delta in deltas_of(reply):
            yield delta

    async def replies():
        return [reply]

    async def events():
        stream = Stream(ids=[ID], created_at=1e9, input_ids=[1, 2, 3], deltas=deltas(), replies=replies)
        return [event.decode() async for event in dialect.events(ask, stream)]

    *chunks, done = asyncio.run(events())
    assert done == "data: [DONE]\n\n"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}, "return_token_ids": True}])
def test_chat_completions(reply, fields):
    ask = openai_chat.parse({**CHAT, **fields})
    whole = TypeAdapter(ChatCompletion).validate_python(openai_chat.respond(ask, [reply]), strict=True)
    message: Any = whole.choices[0].message
    streamed = {"reasoning_content": "", "content": "", "calls": []}
    chunks = chunks_of(openai_chat, ask, reply)
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
        for delta in [choice["delta"] for choice in chunk["choices"]]:
            for name in ("reasoning_content", "content"):
                streamed[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    streamed["calls"].append([call["function"]["name"], ""])
                streamed["calls"][call["index"]][1] += call["function"]["arguments"]
    assert streamed == {
        "reasoning_content": getattr(message, "reasoning_content", ""),
        "content": message.content or "",
        "calls": [[call.function.name, call.function.arguments] for call in message.tool_calls or ()],
    }
    assert bool(chunks[-1].get("usage")) == bool(fields)


@pytest.mark.parametrize("reply", [REPLIES[1], REPLIES[3]])
def test_plain_completions(reply):
    ask = openai_completions.parse({**PLAIN, "stream_options": {"include_usage": True}})
    whole = TypeAdapter(Completion).validate_python(openai_completions.respond(ask, [reply]), strict=True)
    chunks = chunks_of(openai_completions, ask, reply)
    for chunk in chunks:
        for choice in chunk["choices"]:  # null until the last chunk, although the type says otherwise
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        TypeAdapter(Completion).validate_python(chunk, strict=True)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole.choices[0].text
