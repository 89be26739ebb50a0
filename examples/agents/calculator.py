"""An agent with a calculator: it may guess a product, or ask the tool. Trained, it learns to ask."""

from __future__ import annotations

import json
import re
from typing import Any

from openai import AsyncOpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of a product such as 12*34.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
MAX_TURNS = 3


class Calculator:
    """Knows nothing of Clew: it runs against any provider of OpenAI's interface."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == data["answer"])
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = calculate(call.function.arguments) if call.type == "function" else "error"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


def calculate(arguments: str) -> str:
    """The tool."""
    try:
        found = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        found = None
    return str(int(found[1]) * int(found[2])) if found else "error"
