"""The calculator agent on LiteLLM."""

from __future__ import annotations

from typing import Any

import litellm
from openai import AsyncOpenAI

from examples.agents.calculator import MAX_TURNS, TOOLS, calculate


class Calculator:
    """Knows nothing of Clew. It gives LiteLLM a client: those that LiteLLM makes, one per API key, are never closed."""

    def __init__(self, *, stream: bool = False) -> None:
        self.stream = stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(MAX_TURNS):
            answer: Any = await litellm.acompletion(
                model="openai/policy",
                messages=messages,
                tools=TOOLS,
                stream=self.stream,
                client=client,
            )
            if self.stream:
                answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
            message = answer.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == data["answer"])
            messages.append(message)
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0
