"""The calculator agent in further ways to use the frameworks of examples/agents/."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_anthropic._client_utils import _get_default_async_httpx_client
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from examples.agents import with_langchain, with_pydantic_ai


class LangChain:
    """dialect: messages or responses."""

    def __init__(self, *, dialect: str, stream: bool = False) -> None:
        self.dialect, self.stream = dialect, stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        asked: Any = {"model": "policy", "base_url": base_url, "api_key": api_key, "streaming": self.stream}
        if self.dialect == "messages":
            model = ChatAnthropic(**asked)
        else:
            model = ChatOpenAI(**asked, use_responses_api=True, http_async_client=http_client)
        agent = create_agent(model, [with_langchain.calculate])
        state = await agent.ainvoke({"messages": [{"role": "user", "content": data["question"]}]})
        if isinstance(model, ChatAnthropic):  # it keeps its connections beyond the event loop that they belong to
            await model._async_client.close()
            _get_default_async_httpx_client.cache_clear()
        return float(state["messages"][-1].text.strip() == data["answer"])


class PydanticAI:
    """dialect: messages or responses."""

    def __init__(self, *, dialect: str, stream: bool = False) -> None:
        self.dialect, self.stream = dialect, stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        asked: Any = {"base_url": base_url, "api_key": api_key, "http_client": http_client}
        if self.dialect == "messages":
            claude = anthropic.AsyncAnthropic(**asked)
            model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=claude))
        else:
            gpt = openai.AsyncOpenAI(**asked)
            model = OpenAIResponsesModel("policy", provider=OpenAIProvider(openai_client=gpt))
        agent = Agent(model, tools=[with_pydantic_ai.calculate])
        read = with_pydantic_ai.read if self.stream else None
        result = await agent.run(data["question"], event_stream_handler=read)
        return float(result.output.strip() == data["answer"])


class RunStream:
    """pydantic-ai's `run_stream`."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        provider = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http_client)
        agent = Agent(OpenAIChatModel("policy", provider=provider), tools=[with_pydantic_ai.calculate])
        async with agent.run_stream(data["question"]) as result:
            return float((await result.get_output()).strip() == data["answer"])
