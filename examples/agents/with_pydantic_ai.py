"""The calculator agent on Pydantic AI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.agents import calculator


def calculate(expression: str) -> str:
    """The value of a product such as 12*34."""
    return calculator.calculate(json.dumps({"expression": expression}))


async def read(context: Any, events: AsyncIterable[Any]) -> None:
    """Read events as they come, which makes the agent stream the model's words. (`run_stream` would take the first
    words for the answer, even if a tool call follows them.)"""
    async for _ in events:
        pass


class Calculator:
    """Knows nothing of Clew."""

    def __init__(self, *, stream: bool = False) -> None:
        self.stream = stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        provider = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http_client)
        agent = Agent(OpenAIChatModel("policy", provider=provider), tools=[calculate])
        result = await agent.run(data["question"], event_stream_handler=read if self.stream else None)
        return float(result.output.strip() == data["answer"])
