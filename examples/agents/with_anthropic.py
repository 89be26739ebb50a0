"""The calculator agent on Anthropic's Messages API, which it streams."""

from __future__ import annotations

import json
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import Message

from examples.agents.calculator import MAX_TURNS, TOOLS, calculate


class Calculator:
    """Knows nothing of Clew: it runs against any provider of Anthropic's interface."""

    def __init__(self, *, stream: bool = True) -> None:
        self.stream = stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(MAX_TURNS):
            message = await self._ask(client, messages)
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                said = "".join(block.text for block in message.content if block.type == "text")
                return float(said.strip() == data["answer"])
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": calculate(json.dumps(call.input))}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        return 0.0

    async def _ask(self, client: AsyncAnthropic, messages: list[Any]) -> Message:
        function = TOOLS[0]["function"]
        tool: Any = {name: function[name] for name in ("name", "description")}
        asked: Any = {
            "model": "policy",
            "max_tokens": 1024,
            "messages": messages,
            "tools": [{**tool, "input_schema": function["parameters"]}],
        }
        if not self.stream:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()
