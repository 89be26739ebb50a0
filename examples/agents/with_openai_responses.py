"""The calculator agent on OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from examples.agents.calculator import MAX_TURNS, TOOLS, calculate


class Calculator:
    """Knows nothing of Clew: it runs against any provider of OpenAI's interface."""

    def __init__(self, *, stream: bool = False) -> None:
        self.stream = stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        items: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(MAX_TURNS):
            response = await self._respond(client, items)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return float(response.output_text.strip() == data["answer"])
            items += response.output
            for call in calls:
                result = calculate(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        return 0.0

    async def _respond(self, client: AsyncOpenAI, items: list[Any]) -> Any:
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        if not self.stream:
            return await client.responses.create(model="policy", input=items, tools=tools)
        async with client.responses.stream(model="policy", input=items, tools=tools) as stream:
            return await stream.get_final_response()
