"""The calculator agent on the OpenAI Agents SDK (openai-agents), which speaks the Responses API."""

from __future__ import annotations

import json
from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from examples.agents import calculator


@function_tool
def calculate(expression: str) -> str:
    """The value of a product such as 12*34."""
    return calculator.calculate(json.dumps({"expression": expression}))


class Calculator:
    """Knows nothing of Clew."""

    def __init__(self, *, stream: bool = False, responses: bool = True) -> None:
        """responses: the Responses API, or else chat completions."""
        self.stream = stream
        self.responses = responses

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        provider = OpenAIProvider(openai_client=client, use_responses=self.responses)
        settings = RunConfig(model_provider=provider, tracing_disabled=True)
        agent = Agent(name="calculator", model="policy", tools=[calculate])
        if self.stream:
            result = Runner.run_streamed(agent, data["question"], run_config=settings)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, data["question"], run_config=settings)
        return float(result.final_output.strip() == data["answer"])
