"""Real frameworks, as their users have them, against the gateway: examples/agents/ unchanged, and more_agents.py.

Each is told to ask the calculator and then to answer, so an episode is two turns. The tokens of both are to be one
sequence, in which exactly those are trained on that were generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from clew.gateway.agent_session import Limits
from clew.gateway.episode_engine import EpisodeEngine
from clew.gateway.gateway_thread import GatewayThread
from clew.gateway.sequences import aligned, assemble
from clew.rollout.agents import AgentWorkflow, load_agent
from tests.gateway.chatml import CHATML, THINKING, chatml_tokenizer
from tests.gateway.spoken import Spoken, session_on

PROBLEM = {"question": "12*34", "answer": "408"}
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>'
SAID = {
    "a call": CALL,
    "a call that the template spaces otherwise": CALL.replace(": ", ":").replace("\n", ""),
    "words, and a call": f"The calculator says:\n{CALL}",
    "two calls": f"{CALL}\n{CALL.replace('12*34', '5*6')}",
}

AGENTS_SDK = "examples.agents.with_openai_agents.Calculator"
MORE = "tests.gateway.more_agents"
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai, chat": ("examples.agents.calculator.Calculator", {}),
    "openai, responses": ("examples.agents.with_openai_responses.Calculator", {"stream": False}),
    "openai, responses, streamed": ("examples.agents.with_openai_responses.Calculator", {"stream": True}),
    "anthropic": ("examples.agents.with_anthropic.Calculator", {"stream": False}),
    "anthropic, streamed": ("examples.agents.with_anthropic.Calculator", {"stream": True}),
    "openai-agents": (AGENTS_SDK, {"stream": False}),
    "openai-agents, streamed": (AGENTS_SDK, {"stream": True}),
    "openai-agents, chat": (AGENTS_SDK, {"responses": False}),
    "openai-agents, chat, streamed": (AGENTS_SDK, {"responses": False, "stream": True}),
    "langchain": ("examples.agents.with_langchain.Calculator", {"stream": False}),
    "langchain, streamed": ("examples.agents.with_langchain.Calculator", {"stream": True}),
    "langchain, anthropic": (f"{MORE}.LangChain", {"dialect": "messages"}),
    "langchain, anthropic, streamed": (f"{MORE}.LangChain", {"dialect": "messages", "stream": True}),
    "langchain, responses": (f"{MORE}.LangChain", {"dialect": "responses"}),
    "langchain, responses, streamed": (f"{MORE}.LangChain", {"dialect": "responses", "stream": True}),
    "pydantic-ai": ("examples.agents.with_pydantic_ai.Calculator", {"stream": False}),
    "pydantic-ai, streamed": ("examples.agents.with_pydantic_ai.Calculator", {"stream": True}),
    "pydantic-ai, anthropic": (f"{MORE}.PydanticAI", {"dialect": "messages"}),
    "pydantic-ai, anthropic, streamed": (f"{MORE}.PydanticAI", {"dialect": "messages", "stream": True}),
    "pydantic-ai, responses": (f"{MORE}.PydanticAI", {"dialect": "responses"}),
    "pydantic-ai, responses, streamed": (f"{MORE}.PydanticAI", {"dialect": "responses", "stream": True}),
    "litellm": ("examples.agents.with_litellm.Calculator", {"stream": False}),
    "litellm, streamed": ("examples.agents.with_litellm.Calculator", {"stream": True}),
}  # fmt: skip

IGNORED = pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")
"""LiteLLM reads pydantic's fields of each chunk in a way that pydantic is to drop."""

NAMES = [pytest.param(name, marks=IGNORED if name.startswith("litellm") else ()) for name in AGENTS]

NO_REASONING_BACK = ("langchain", "langchain, streamed", "openai-agents, chat", "openai-agents, chat, streamed")
"""Over chat completions these keep nothing but the words and the calls of a message: the model's reasoning is not sent
back, so a template that would render it starts a new sequence."""


class Running:
    """A gateway, and an engine with a template."""

    def __init__(self, folder: Path, template: str) -> None:
        self.engine = Spoken(chatml_tokenizer(folder, template), lambda prompt: "")
        self.gateway = GatewayThread(Limits())

    def episode(
        self, name: str, arguments: dict[str, Any], first: str, then: str = "408"
    ) -> tuple[float, EpisodeEngine]:
        """Its reward, and its session."""
        agent = load_agent(name, arguments)
        self.engine.script = lambda prompt: f"{then if 'tool_response' in prompt else first}<|im_end|>"

        async def run() -> tuple[Any, EpisodeEngine]:
            workflow = AgentWorkflow(agent, self.gateway)
            session = session_on(self.engine)
            try:
                return await workflow.run_episode(session, dict(PROBLEM)), session
            finally:
                await workflow.close()

        return asyncio.run(run())


@pytest.fixture(scope="module", params=[CHATML], ids=["chatml"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = Running(tmp_path_factory.mktemp("tokenizer"), request.param)
    yield made
    made.gateway.stop()


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    """LiteLLM would ask the internet for its list of prices when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield


def trained_and_generated(session: EpisodeEngine) -> tuple[list[int], list[int]]:
    columns = [aligned(sequence) for sequence in assemble(session.interactions)]
    trained = [id for each in columns for id in each["input_ids"][each["loss_mask"]].tolist()]
    return trained, [id for each in session.interactions for id in each.output_ids]


def warnings_of(session: EpisodeEngine) -> list[str]:
    """But for tools that are to be held to their schema: some frameworks ask for that by themselves."""
    return [warning for warning in session.warnings if "the client sets strict for" not in warning]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", NAMES)
def test_two_turns_are_one_sequence_of_the_tokens_that_were_generated(running: Running, name: str, said: str) -> None:
    reward, session = running.episode(*AGENTS[name], SAID[said])
    assert reward == 1.0
    assert len(session.interactions) == 2 and len(assemble(session.interactions)) == 1
    trained, generated = trained_and_generated(session)
    assert trained == generated
    assert warnings_of(session) == []


@pytest.mark.parametrize("running", [THINKING], ids=["thinking"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_a_framework_sends_back_is_kept(running: Running, name: str) -> None:
    reward, session = running.episode(
        *AGENTS[name], f"<think>\nhello\n</think>\n\n{CALL}", "<think>\nI\n</think>\n\n408"
    )
    assert reward == 1.0
    assert len(session.interactions) == 2
    trained, generated = trained_and_generated(session)
    assert trained == generated
    lost = name in NO_REASONING_BACK
    assert len(assemble(session.interactions)) == (2 if lost else 1)
    assert len(warnings_of(session)) == lost
    assert all("the client sends no reasoning back" in warning for warning in warnings_of(session))


def test_reasoning_that_is_named_by_an_id_which_is_unknown_here(running: Running) -> None:
    key, session = running.gateway.open(session_on(running.engine))

    async def ask() -> None:
        items: Any = [{"role": "user", "content": "hello"}, {"type": "reasoning", "id": "rs_1", "summary": []}]
        async with openai.AsyncOpenAI(base_url=running.gateway.base_url, api_key=key) as client:
            with pytest.raises(openai.NotFoundError, match="no response '1' in this session"):
                await client.responses.create(model="policy", input=items)

    asyncio.run(ask())
    assert session.engine.interactions == []


def test_run_stream_of_pydantic_ai_takes_the_first_words_for_the_answer(running: Running) -> None:
    reward, session = running.episode(f"{MORE}.RunStream", {}, CALL)
    assert reward == 1.0 and len(assemble(session.interactions)) == 1
    reward, session = running.episode(f"{MORE}.RunStream", {}, SAID["words, and a call"])
    assert reward == 0.0
    trained, generated = trained_and_generated(session)
    assert len(session.interactions) == 1 and trained == generated
