"""The stress of agents whose model is a provider's: a process that takes no token ids, and has a key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from clew.gateway.agent_session import Limits
from clew.gateway.gateway_thread import GatewayThread
from clew.stress.gateway import ProviderGateway, answerer
from clew.stress.report import Report
from clew.stress.requests import Request
from tests.gateway.chatml import THINKING, chatml_tokenizer
from tests.gateway.spoken import Spoken, session_on
from tests.stress import agents_faulty, agents_sound
from tests.stress.judging import judged
from tests.stress.providers import FEW, KEY, providing

LATENCY_S = 0.3


@pytest.fixture(scope="module")
def providers() -> Iterator[str]:
    with providing(LATENCY_S) as address:
        yield address


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def stressed(cls: type, url: str) -> Report:
    gateway = answerer(url, latency_s=0, tokens=1, recorded=None, model=None)
    assert isinstance(gateway, ProviderGateway)
    return judged(cls, gateway)


def certain(report: Report) -> list[tuple[str, str]]:
    return [(verdict.kind, verdict.where) for verdict in report.verdicts if verdict.certain]


@pytest.mark.parametrize(
    ("agent", "answers"),
    [
        pytest.param(agents_sound.PlainAgent, "steady", marks=pytest.mark.slow),
        pytest.param(agents_sound.StreamingAgent, "chance", marks=pytest.mark.slow),
        pytest.param(agents_sound.GatherAgent, "chance", marks=pytest.mark.slow),
    ],
)
def test_a_sound_agent_gets_no_verdict(agent: type, answers: str, providers: str, key: None) -> None:
    report = stressed(agent, f"{providers}/{answers}/v1")
    assert report.verdicts == [] and report.failures == []
    asked = 2 if agent is agents_sound.PlainAgent else 3
    assert report.measured.requests == asked * 8
    latency = report.measured.latency
    assert latency["episode"]["p50"] >= latency["model"]["p50"] >= 0.9 * 2 * LATENCY_S
    differ = [note for note in report.notes if note.startswith("whether the same seeds give the same results")]
    assert len(differ) == (answers == "chance")
    assert report.outcome in (("not judged",) if differ else ("fit", "not judged"))


@pytest.mark.parametrize(
    ("agent", "kind", "where"),
    [
        (agents_faulty.OneClient, "shared", "OneClient.run"),
        pytest.param(agents_faulty.SharedHistory, "shared", "agents_faulty.HISTORY", marks=pytest.mark.slow),
        pytest.param(agents_faulty.BlocksLong, "blocks", "BlocksLong.run", marks=pytest.mark.slow),
        pytest.param(agents_faulty.Random, "differs", "", marks=pytest.mark.slow),
        pytest.param(agents_faulty.LongLock, "serial", "LongLock.run", marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_found(agent: type, kind: str, where: str, providers: str, key: None) -> None:
    report = stressed(agent, f"{providers}/chance/v1")
    assert any(each[0] == kind and where in each[1] for each in certain(report)), (report.verdicts, report.notes)
    if agent is agents_faulty.SharedHistory:
        assert any("answers cross over" in verdict.what for verdict in report.verdicts)
    assert report.outcome == "not fit"


@pytest.mark.slow
def test_what_a_provider_refuses_is_told_by_cause(providers: str, key: None) -> None:
    report = stressed(agents_sound.HttpxAgent, f"{providers}/few/v1")
    assert [kind for kind, _ in certain(report)] == ["fails"]
    (fails,) = report.verdicts
    assert "the provider had refused the last request of" in fails.what
    assert any("429" in line and "Rate limit reached for requests" in line for line in fails.evidence)
    (failure,) = report.failures
    assert "429 Too Many Requests" in failure.error and failure.count > FEW
    assert any("times HTTP 429, such as" in note for note in report.notes)


def test_a_wrong_key_is_told(providers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    report = stressed(agents_sound.OpenAIAgent, f"{providers}/steady/v1")
    (failure,) = report.failures
    assert "AuthenticationError" in failure.error and "Incorrect API key provided" in failure.error
    assert report.outcome == "not fit"


def test_a_key_is_an_episodes_and_ends_with_it(providers: str) -> None:
    gateway = ProviderGateway(f"{providers}/steady/v1", KEY)

    async def ask(key: str) -> list[str]:
        """Return what is refused, in each dialect."""
        messages: Any = [{"role": "user", "content": "hello"}]
        said = []
        async with (
            openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as one,
            anthropic.AsyncAnthropic(base_url=gateway.base_url, api_key=key, max_retries=0) as other,
        ):
            for asked in (
                one.chat.completions.create(model="m", messages=messages),
                other.messages.create(model="m", max_tokens=9, messages=messages),
                one.models.list(),
            ):
                try:
                    await asked
                except (openai.AuthenticationError, anthropic.AuthenticationError) as refused:
                    body: Any = refused.body
                    said.append(body.get("error", body)["message"])
                except openai.NotFoundError:
                    pass  # this provider lists no models
        return said

    async def run() -> None:
        key = gateway.open_episode("g000007.e1")
        assert gateway.sessions.count() == 1
        assert await ask(key) == []
        assert all("no session has the API key 'sk-mine'" in message for message in await ask("sk-mine"))
        await gateway.close(key)
        assert gateway.sessions.count() == 0
        assert await ask(key) == ["session g000007.e1 has ended: its episode is over."] * 3

    asyncio.run(run())
    noted = gateway.requests.take()
    assert [(each.episode, each.asked, each.refused) for each in noted] == [("g000007.e1", "user\nhello", "")] * 2
    gateway.stop()


def test_what_an_episode_does_not_wait_for_is_noted_as_it_stands(providers: str) -> None:
    async def run(gateway: ProviderGateway) -> Request:
        key = gateway.open_episode("e")
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key) as client:
            asked = client.completions.create(model="m", prompt="a word", stream=True)
            with suppress(TimeoutError):
                async with await asyncio.wait_for(asked, 0.5 if gateway is mute else None) as stream:
                    assert (await anext(stream)).choices[0].text
            await gateway.close(key)
        (noted,) = gateway.requests.take()
        return noted

    for gateway in (
        mute := ProviderGateway(f"{providers}/mute/v1", KEY),
        ProviderGateway(f"{providers}/chance/v1", KEY),
    ):
        noted = asyncio.run(run(gateway))
        assert (noted.episode, noted.asked, noted.refused) == ("e", "a word", "")
        assert bool(noted.answered) == (gateway is not mute)
        gateway.stop()


THOUGHT = "<think>\nhm, 1 < 2\n</think>\n\nI ask: the café\n\n<tool_call>\n"
CALLED = '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
USER: Any = {"role": "user", "content": "What is the answer?"}
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def _chat(one: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic, stream: bool) -> Any:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    return await one.chat.completions.create(model="m", messages=[USER], tools=tools, stream=stream)


async def _responses(one: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic, stream: bool) -> Any:
    return await one.responses.create(model="m", input=[USER], tools=[TOOL], stream=stream)


async def _messages(one: openai.AsyncOpenAI, other: anthropic.AsyncAnthropic, stream: bool) -> Any:
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    return await other.messages.create(model="m", max_tokens=150, messages=[USER], tools=tools, stream=stream)


@pytest.mark.parametrize("ask", [_chat, _responses, _messages])
def test_a_streamed_answer_has_the_words_of_a_whole_one(
    ask: Callable[[Any, Any, bool], Awaitable[Any]], tmp_path: Path
) -> None:
    engine = Spoken(chatml_tokenizer(tmp_path, THINKING), lambda prompt: THOUGHT + CALLED)

    async def spoken(number: int) -> None:
        await asyncio.sleep(0)

    engine.speaks = spoken
    behind = GatewayThread(Limits())
    theirs, _ = behind.open(session_on(engine))
    gateway = ProviderGateway(behind.base_url, theirs)

    async def run() -> None:
        key = gateway.open_episode("e")
        async with (
            httpx2.AsyncClient() as http,
            openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, http_client=http) as one,
            anthropic.AsyncAnthropic(base_url=gateway.base_url, api_key=key) as other,
        ):
            await ask(one, other, False)
            async for _ in await ask(one, other, True):
                pass
        await gateway.close(key)

    asyncio.run(run())
    whole, streamed = gateway.requests.take()
    gateway.stop()
    behind.stop()
    assert isinstance(whole, Request) and whole.asked == streamed.asked and "What is the answer?" in whole.asked
    assert whole.id and streamed.id and whole.id != streamed.id
    assert sorted(whole.answered.splitlines()) == sorted(["hm, 1 < 2", "I ask: the café", "add", '{"a": 1}'])
    assert sorted(whole.answered.splitlines()) == sorted(streamed.answered.splitlines())
