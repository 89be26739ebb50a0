"""The calculator agent on LangChain."""

from __future__ import annotations

import json
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from examples.agents import calculator


@tool
def calculate(expression: str) -> str:
    """The value of a product such as 12*34."""
    return calculator.calculate(json.dumps({"expression": expression}))


class Calculator:
    """Knows nothing of Clew."""

    def __init__(self, *, stream: bool = False) -> None:
        self.stream = stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        model = ChatOpenAI(
            model="policy",
            base_url=base_url,
            api_key=SecretStr(api_key),
            http_async_client=http_client,
            streaming=self.stream,
        )
        agent = create_agent(model, [calculate])
        state = await agent.ainvoke({"messages": [{"role": "user", "content": data["question"]}]})
        return float(state["messages"][-1].text.strip() == data["answer"])
