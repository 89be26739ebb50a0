"""`clew serve`, and `clew serve --engine URL` in front of it: as a server that takes token ids, and as a provider."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from aiohttp import web

from clew.errors import RecordError
from clew.gateway import openai_chat, standalone
from clew.gateway.dialect import Refusal
from clew.gateway.episode_engine import Resources
from clew.gateway.gateway_thread import ServingThread
from clew.gateway.proxy import PassThrough
from clew.inference.protocol import SamplingParams
from clew.models.loading import load_tokenizer
from clew.record.rows import from_table
from clew.record.run import RunDirectory
from tests.forked import clew
from tests.gateway.chatml import chatml_tokenizer
from tests.gateway.spoken import Spoken, session_on
from tests.models import tiny_model, tiny_tokenizer


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the base URL that `clew serve` prints, and its lines up to there."""
    with clew("serve", *arguments, variables=variables) as server:
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("export OPENAI_BASE_URL="):
                break
        yield lines[-1].split()[1].partition("=")[2], lines
        server.send_signal(signal.SIGTERM)
        server.wait(10)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_model(folder / "model", context=128)
    tiny_tokenizer(folder / "model")
    values = {"experiment": "e", "root": str(folder / "runs"), "data": {"path": "none"}}
    (folder / "config.yaml").write_text(json.dumps({**values, "model": {"path": str(folder / "model")}}))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def behind(config: Path) -> Iterator[str]:
    """Yield the base URL of a server that is up."""
    with serving(str(config), "trial=behind") as (url, _):
        yield url


async def talk(url: str, model: str) -> list[str]:
    """Take one turn in each dialect, and a second in OpenAI's. Return the IDs of the responses."""
    async with openai.AsyncOpenAI(base_url=url, api_key="sk-mine") as client:
        messages: list = [{"role": "user", "content": "hello"}]
        first = await client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}, *messages]
        second = await client.chat.completions.create(model=model, messages=messages, max_tokens=5)
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="sk-other") as client:
        third = await client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": "hello"}])
    return [first.id, second.id, third.id]


def test_a_served_model_records_the_sessions_of_any_key(config: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving(str(config), "--record", str(record)) as (url, lines):
        assert lines[0].startswith("LLM inference server launched at: CLEW_LLM_SERVER_ADDRS=")
        ids = asyncio.run(talk(url, "model"))
        assert ids == ["g000000.e0.i0", "g000000.e0.i1", "g000001.e0.i0"]

        async def wrong_model() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="x") as client:
                await client.completions.create(model="gpt-5", prompt="a")

        with pytest.raises(openai.NotFoundError, match="Cannot find model 'gpt-5': this server has "):
            asyncio.run(wrong_model())
    filed = {name: from_table(table) for name, table in RunDirectory(record).inbox.scan().items()}
    assert sorted(filed) == ["g000000", "g000001"]
    (row,) = filed["g000000"]
    assert [each["id"] for each in row.interactions] == ids[:2] and row.loss_mask.sum() > 5


async def refused_schemas(url: str) -> list[tuple[str, str | None]]:
    """Return the message and param of the error, in each dialect and in a stream."""
    schema: Any = {"type": "object"}
    named: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    flat: Any = {"type": "json_schema", "name": "answer", "schema": schema}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    messages: Any = [{"role": "user", "content": "hello"}]
    found = []
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="x", max_retries=0) as other,
    ):
        for asked in (
            one.chat.completions.create(model="model", messages=messages, response_format=named),
            one.chat.completions.create(model="model", messages=messages, response_format=named, stream=True),
            one.responses.create(model="model", input="hello", text={"format": flat}),
            other.messages.create(model="model", max_tokens=9, messages=messages, output_config=config),
        ):
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
                await asked
            found.append((refused.value.message, getattr(refused.value, "param", None)))
    return found


def test_in_front_of_a_server_that_takes_token_ids(config: Path, behind: str, tmp_path: Path) -> None:
    record = tmp_path / "record"
    with serving(str(config), "--engine", behind, "--record", str(record)) as (url, lines):
        assert lines[0].startswith(f"Gateway in front of clew serve at {behind}")
        assert asyncio.run(talk(url, "model")) == ["g000000.e0.i0", "g000000.e0.i1", "g000001.e0.i0"]
        for asked in (behind, url):  # the embedded engine by itself, and over HTTP
            said = asyncio.run(refused_schemas(asked))
            assert all("cannot hold its output to a JSON schema" in message for message, _ in said)
            assert [param for _, param in said] == ["response_format", "response_format", "text.format", None]
    assert RunDirectory(record).inbox.names() == {"g000000", "g000001"}


def test_in_front_of_a_provider_requests_are_passed_on_and_nothing_is_captured(config: Path, behind: str) -> None:
    # /model_info is what tells `clew serve` from a provider: one level deeper there is none
    provider = behind.removesuffix("/v1") + "/nowhere"
    with serving(str(config), "--engine", provider, OPENAI_API_KEY="sk-theirs") as (url, lines):
        assert lines[0].startswith("Passing requests on to the provider") and "no tokens are captured" in lines[0]

        async def ask() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="sk-mine", max_retries=0) as client:
                await client.models.list()

        with pytest.raises(openai.NotFoundError):
            asyncio.run(ask())


async def see(openai_client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic) -> list[str]:
    """Show an image in each way that the providers know."""
    url = "data:image/png;base64,iVBORw0KGgo="
    said: Any = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    chat = await openai_client.chat.completions.create(model="m", messages=[{"role": "user", "content": [said]}])
    shown: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
    twice: Any = {"include": ["first", "second"]}
    response = await openai_client.responses.create(
        model="m", input=[{"role": "user", "content": [shown]}], extra_query=twice
    )
    source: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [source]}]}
    message = await anthropic_client.messages.create(**asked)
    parts = []
    async for event in await openai_client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": [said]}], stream=True
    ):
        parts.append(event.choices[0].delta.content)
    return [chat.id, response.id, message.id, *parts]


@pytest.mark.parametrize(
    ("base", "openai_s", "anthropic_s"),
    [("/v1", "/v1", ""), ("", "/v1", ""), ("/v1beta/openai/", "/v1beta/openai", "/v1beta/openai")],
)
def test_images_pass_through_to_a_provider_untouched(base: str, openai_s: str, anthropic_s: str) -> None:
    came: list[tuple[str, bytes, str]] = []
    sent: list[bytes] = []
    queries: list[list[tuple[str, str]]] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        key = request.headers["x-api-key"]
        assert request.headers["authorization"] == f"Bearer {key}"
        came.append((request.path, body, key))
        queries.append(sorted(request.query.items()))
        if b'"stream":true' in body:
            chunks = [{"id": "s", "choices": [{"index": 0, "delta": {"content": word}}]} for word in ("a ", "cat")]
            lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            return web.Response(text=lines, content_type="text/event-stream")
        return web.json_response({"id": f"answer-{len(came)}", "choices": [], "output": [], "content": []})

    async def run() -> list[str]:
        application = web.Application()
        application.router.add_post("/{tail:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        passed_on = PassThrough("http://{}:{}".format(*runner.addresses[0][:2]) + base, "sk-theirs")

        async def note(request: httpx2.Request) -> None:
            sent.append(request.content)
            queries.append(sorted(request.url.params.multi_items()))

        transport = httpx2.ASGITransport(app=passed_on)
        http = httpx2.AsyncClient(transport=transport, event_hooks={"request": [note]})
        here: dict[str, Any] = {"api_key": "sk-mine", "max_retries": 0, "http_client": http}
        try:
            return await see(
                openai.AsyncOpenAI(base_url="http://gateway/v1", **here),
                anthropic.AsyncAnthropic(base_url="http://gateway", **here),
            )
        finally:
            await http.aclose()
            await passed_on.close()
            await runner.cleanup()

    assert asyncio.run(run()) == ["answer-1", "answer-2", "answer-3", "a ", "cat"]
    assert [path for path, _, _ in came] == [
        f"{openai_s}/chat/completions",
        f"{openai_s}/responses",
        f"{anthropic_s}/v1/messages",
        f"{openai_s}/chat/completions",
    ]
    assert [body for _, body, _ in came] == sent and all(b"iVBORw0KGgo=" in body for body in sent)
    assert {key for _, _, key in came} == {"sk-theirs"}
    assert queries[::2] == queries[1::2] and max(map(len, queries)) == 2  # one name twice


def test_a_provider_need_not_answer_whom_nobody_waits_for() -> None:
    async def run() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            begun.set()
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
            raise AssertionError

        application = web.Application()
        application.router.add_post("/{tail:.*}", answer)
        runner = web.AppRunner(application, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        passed_on = PassThrough("http://{}:{}/v1".format(*runner.addresses[0][:2]), "sk-theirs")
        thread = ServingThread(passed_on, close=passed_on.close)
        async with httpx2.AsyncClient() as client:
            asking = asyncio.ensure_future(client.post(f"{thread.base_url}/chat/completions", json={}, timeout=None))
            await asyncio.wait_for(begun.wait(), 60)
            asking.cancel()
            await asyncio.wait_for(ended.wait(), 60)
        await asyncio.to_thread(thread.stop)
        await runner.cleanup()

    asyncio.run(run())


def test_a_provider_that_breaks_off_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The client sees it, too, and the log has a line and no traceback."""

    async def run() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"data: {}\n\n")
            await asyncio.sleep(0.1)
            assert request.transport is not None
            request.transport.abort()
            return response

        application = web.Application()
        application.router.add_post("/{tail:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        passed_on = PassThrough("http://{}:{}/v1".format(*runner.addresses[0][:2]), "sk-theirs")
        thread = ServingThread(passed_on, close=passed_on.close)
        async with httpx2.AsyncClient() as client:
            with pytest.raises(httpx2.RemoteProtocolError):
                await client.post(f"{thread.base_url}/chat/completions", json={}, timeout=60)
        await asyncio.to_thread(thread.stop)
        await runner.cleanup()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "broke off its answer" in caplog.text and "Traceback" not in caplog.text


def test_an_agent_whose_conversations_branch(config: Path, behind: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    asked = ["tests.rollout.user_agents.Clock", "--data", str(tmp_path / "rows.jsonl"), "--n", "2"]
    with clew("agent", "run", *asked, "--base-url", behind) as ran:
        shown, errors = ran.communicate(60)
        assert ran.returncode == 0, errors
    assert shown.count("does not continue") == 2
    assert shown.count('message 1 (system) differs at character 7: "It is 0 o\'clock." became "It is 1 o\'clock') == 2
    assert "2 of 2 episodes branched (100%)" in shown


def test_in_front_of_nothing(config: Path) -> None:
    with clew("serve", str(config), "--engine", "http://127.0.0.1:9/v1") as failed:
        assert "nothing that serves a model answers at" in failed.communicate(60)[1] and failed.returncode == 2


def test_a_session_is_rewarded_and_ended_with_its_own_key_and_started_with_the_token(config: Path, behind: str) -> None:
    with serving(str(config), "--engine", behind, CLEW_LLM_SERVER_TOKEN="the-token") as (url, _):
        root = url.removesuffix("/v1")

        def post(path: str, key: str | None, body: Any) -> httpx2.Response:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return httpx2.post(f"{root}{path}", json=body, headers=headers)

        asked = {"model": "model", "prompt": "a", "max_tokens": 2}
        assert [post("/v1/completions", key, asked).status_code for key in (None, "sk-mine")] == [200, 200]
        for path, body in (("/rl/set_reward", {"reward": 1}), ("/rl/end_session", {})):
            assert [post(path, key, body).status_code for key in (None, "sk-other", "sk-mine")] == [401, 401, 200]
        assert [post("/rl/start_session", key, {}).status_code for key in (None, "sk-mine")] == [401, 401]
        started = post("/rl/start_session", "the-token", {"data": {"a": 1}})
        assert started.status_code == 200
        key = started.json()["api_key"]
        assert post("/v1/completions", key, asked).json()["id"].startswith(started.json()["session_id"])
        large = post("/rl/start_session", "the-token", {"data": {"a": "x" * 2**20}})
        assert large.status_code == 413 and "1024 KiB" in large.json()["error"]["message"]


def test_sessions_are_limited_in_number_and_bytes(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "MAX_SESSIONS", 3)
    shared = Resources(
        engine=None,  # type: ignore[arg-type]
        tokenizer=load_tokenizer(str(config.parent / "model")),
        sampling=SamplingParams(),
        seed=0,
        prompt_column="prompt",
        reward=None,
    )
    sessions = standalone.StandaloneGateway(shared, ["model"], key="", record=None)
    first, _, third = (sessions.find(key) for key in "abc")
    with pytest.raises(Refusal, match="3 sessions are open") as refused:
        sessions.find("d")
    assert refused.value.status == 429 and sessions.find("a") is first
    first.last_used -= 61  # a minute ago
    assert sessions.find("d") and not sessions.has_session("a") and first.ended is not None
    third.received_bytes = standalone.MAX_BYTES
    with pytest.raises(Refusal, match="1024 MiB of requests"):
        sessions.find("c")
    third.last_used -= 61
    with pytest.raises(Refusal, match="1024 MiB of requests"):  # nobody's request ends the session that it belongs to
        sessions.find("c")
    assert sessions.find("e") and third.ended is not None


def test_a_session_is_in_use_while_it_waits_for_a_reply_and_unused_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone, "IDLE_S", 0.3)
    monkeypatch.setattr(standalone, "MAX_SESSIONS", 1)

    def hello(prompt: str) -> str:
        monkeypatch.setattr(standalone, "IDLE_S", 6.0)  # a slow machine may need long from here to the next lines
        return "hello<|im_end|>"

    engine = Spoken(chatml_tokenizer(tmp_path), hello, delay_s=0.6)
    sessions = standalone.StandaloneGateway(session_on(engine).resources, ["x"], key="", record=None)

    async def talk() -> None:
        ending = asyncio.ensure_future(sessions.run())
        session = sessions.find("a")
        ask = openai_chat.parse({"model": "x", "messages": [{"role": "user", "content": "hello"}]})
        [reply] = await (await session.submit(ask, b"", retry=False)).answered()
        with pytest.raises(Refusal, match="1 sessions are open"):
            sessions.find("b")
        assert reply.content == "hello" and sessions.find("a") is session
        monkeypatch.setattr(standalone, "IDLE_S", 0.3)
        await asyncio.sleep(0.6)
        assert not sessions.has_session("a") and session.ended is not None
        ending.cancel()

    asyncio.run(talk())


def test_recorded_sessions_get_numbers_that_are_new_to_the_run(config: Path, tmp_path: Path) -> None:
    """Groups that a step has consumed, and rejected ones, count; files that are no groups of Clew's do not."""
    run = RunDirectory(tmp_path)
    (run.inbox.folder / "g000004.arrows").touch()
    (run.inbox.folder / "gnome.arrows").touch()
    (run.rejected / "g000008.parquet").touch()
    shared = session_on(Spoken(chatml_tokenizer(tmp_path), lambda prompt: "")).resources
    sessions = standalone.StandaloneGateway(shared, ["x"], key="", record=tmp_path)
    assert sessions.find("a").id == "g000009.e0"
    arguments = ("serve", str(config), "trial=second", "--record", str(tmp_path))
    with clew(*arguments) as second:
        said = second.communicate(60)[1]
        assert f"(pid {os.getpid()}) already works on {tmp_path}" in said and second.returncode == 2


def test_a_session_that_could_not_be_recorded_can_be_ended_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    shared = session_on(Spoken(chatml_tokenizer(tmp_path), lambda prompt: "hello<|im_end|>")).resources
    sessions = standalone.StandaloneGateway(shared, ["x"], key="", record=run.path)
    inbox = type(run.inbox)

    def full(self: Any, group_id: str, sequences: Any) -> None:
        monkeypatch.undo()  # the next call succeeds
        raise RecordError("Cannot write g000000: No space left on device.")

    async def scenario() -> list[int]:
        headers = {"Authorization": "Bearer sk-a"}
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=sessions.app), base_url="http://gateway", headers=headers
        ) as client:
            asked = await client.post("/v1/completions", json={"model": "x", "prompt": "a"})
            monkeypatch.setattr(inbox, "put", full)
            ended = [await client.post("/rl/end_session") for _ in range(2)]
        assert "No space left on device" in ended[0].text
        return [answer.status_code for answer in (asked, *ended)]

    assert asyncio.run(scenario()) == [200, 500, 200]
    assert run.inbox.names() == {"g000000"} and not sessions.has_session("sk-a")


def test_beyond_this_machine_a_session_wants_a_key(config: Path, behind: str) -> None:
    with serving(str(config), "--engine", behind, "inference.listen=0.0.0.0:0") as (url, lines):
        key = lines[-1].split("OPENAI_API_KEY=")[1].strip()
        assert key != "sk-clew"
        here = url.replace("0.0.0.0", "127.0.0.1")

        async def ask(key: str) -> str:
            async with openai.AsyncOpenAI(base_url=here, api_key=key, max_retries=0) as client:
                said = await client.completions.create(model="model", prompt="a", max_tokens=2)
                return said.id

        assert asyncio.run(ask(key)) == "g000000.e0.i0"
        with pytest.raises(openai.AuthenticationError, match=r"unknown API key.*POST /rl/start_session"):
            asyncio.run(ask("sk-clew"))
    provider = behind.removesuffix("/v1") + "/nowhere"
    with clew("serve", str(config), "--engine", provider, "inference.listen=0.0.0.0:0") as refused:
        assert "would use your API key" in refused.communicate(60)[1] and refused.returncode == 2
