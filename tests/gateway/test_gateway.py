"""The gateway over real sockets, with the real clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from clew.errors import RecordError
from clew.gateway import agent_session, app
from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.gateway_thread import GatewayThread
from clew.gateway.sequences import assemble
from clew.inference.protocol import Completion, EngineUnreachable, FaultyAnswer, GenerateRequest, RequestTooLong
from tests.gateway.chatml import chatml_tokenizer
from tests.gateway.spoken import Spoken, session_on

USER: Any = {"role": "user", "content": "What is the answer?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Running:
    """A gateway, its engine, and one episode's session."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.engine = Spoken(chatml_tokenizer(folder), lambda prompt: "the answer is right<|im_end|>")
        self.gateway = GatewayThread(limits)
        self.key, self.session = self.open("g000000.e0")

    def open(self, episode_id: str) -> tuple[str, AgentSession]:
        return self.gateway.open(session_on(self.engine, episode_id))

    def client(self, key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=key or self.key, **options)

    async def post(self, path: str, raw: bytes, key: str | None = None, **headers: str) -> tuple[int, Any]:
        given = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json", **headers}
        url = self.gateway.base_url + path
        async with aiohttp.ClientSession() as client, client.post(url, data=raw, headers=given) as response:
            return response.status, await response.json()

    def recorded(self) -> list[str]:
        return [each.id for each in self.session.engine.interactions]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path, Limits())
    yield made
    made.gateway.stop()


def test_chat_completions_are_what_the_openai_package_expects(running: Running) -> None:
    async def both() -> None:
        async with running.client() as client:
            whole = await client.chat.completions.create(model="gpt-5", messages=[USER], logprobs=True)
            TypeAdapter(ChatCompletion).validate_python(whole.model_dump(), strict=True)
            assert (whole.id, whole.model, whole.choices[0].message.content) == (
                "g000000.e0.i0",
                "gpt-5",
                "the answer is right",
            )
            tokens = (whole.choices[0].logprobs or pytest.fail("no logprobs")).content or []
            assert "".join(token.token for token in tokens) == "the answer is right"
            assert whole.usage and whole.usage.completion_tokens == len("the answer is right") + 1
            chunks = []
            options: Any = {"include_usage": True}
            stream = await client.chat.completions.create(
                model="x", messages=[USER], stream=True, stream_options=options
            )
            async for chunk in stream:
                TypeAdapter(ChatCompletionChunk).validate_python(chunk.model_dump(), strict=True)
                chunks.append(chunk)
            said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(said) == "the answer is right" and len(said) == 6
            assert chunks[0].choices[0].delta.role == "assistant"
            assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
            assert chunks[-1].usage and not chunks[-1].choices
            assert {chunk.id for chunk in chunks} == {"g000000.e0.i1"}

    asyncio.run(both())
    assert [each.details["model"] for each in running.session.engine.interactions] == ["gpt-5", "x"]


def test_tools_over_a_stream_and_back(running: Running) -> None:
    running.engine.script = lambda prompt: CALL if "tool_response" not in prompt else "hello<|im_end|>"

    async def both() -> str | None:
        async with running.client() as client:
            async with client.chat.completions.stream(model="x", messages=[USER], tools=[ADD]) as stream:
                first = await stream.get_final_completion()
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls
            call = message.tool_calls[0]
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
            result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            back: Any = message.model_dump(exclude_none=True, exclude={"parsed"})
            back["tool_calls"] = [
                {name: each[name] for name in ("id", "type", "function")} for each in back["tool_calls"]
            ]
            for each in back["tool_calls"]:
                each["function"].pop("parsed_arguments", None)
            second = await client.chat.completions.create(model="x", messages=[USER, back, result], tools=[ADD])
            return second.choices[0].message.content

    assert asyncio.run(both()) == "hello"
    assert len(assemble(running.session.engine.interactions)) == 1


def test_several_choices_are_interactions_of_their_own(running: Running) -> None:
    async def ask() -> ChatCompletion:
        async with running.client() as client:
            return await client.chat.completions.create(model="x", messages=[USER], n=3)

    answer = asyncio.run(ask())
    assert answer.id == "g000000.e0.i0"
    assert running.recorded() == ["g000000.e0.i0", "g000000.e0.i1", "g000000.e0.i2"]
    assert len({params.seed for params in running.engine.params}) == 3


@pytest.mark.parametrize("ended_by", ["a failure", "the end of the session"])
def test_of_several_choices_all_are_recorded_or_none(running: Running, ended_by: str) -> None:
    """The first choice is complete, the second is not yet, and the third may fail."""
    begun, cancelled = itertools.count(), asyncio.Event()
    complete = running.engine.generate

    async def generate(request: GenerateRequest) -> Completion:
        place = next(begun)
        await asyncio.sleep(0.1 * place)
        if place == 2 and ended_by == "a failure":
            raise RequestTooLong("planted")
        try:
            await asyncio.sleep(0 if place == 0 else 0.5)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return await complete(request)

    running.engine.generate = generate

    async def ask() -> None:
        async with running.client(max_retries=0) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(model="x", messages=[USER], n=3))
            if ended_by != "a failure":
                await asyncio.sleep(0.3)
                await running.gateway.close(running.key)
            with pytest.raises(openai.BadRequestError, match="planted" if ended_by == "a failure" else "has ended"):
                await asking

    asyncio.run(ask())
    assert running.recorded() == [] and cancelled.is_set() and not running.session.busy


def test_plain_completions_and_models(running: Running) -> None:
    async def ask() -> tuple[Any, Any, list[str]]:
        async with running.client() as client:
            whole = await client.completions.create(model="x", prompt="hello", max_tokens=5, stop=["is"])
            stream = await client.completions.create(model="x", prompt="hello", max_tokens=30, stream=True)
            return whole, [chunk async for chunk in stream], [model.id async for model in client.models.list()]

    whole, chunks, models = asyncio.run(ask())
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("the a", "length")
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the answer is right"
    assert models == ["any"]


def test_a_stop_string_is_no_part_of_the_content_but_of_the_tokens(running: Running) -> None:
    async def ask() -> ChatCompletion:
        async with running.client() as client:
            return await client.chat.completions.create(model="x", messages=[USER], stop=[" is"])

    answer = asyncio.run(ask())
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the answer", "stop")
    assert running.session.engine.interactions[0].text == "the answer is"


@pytest.mark.parametrize("said_by", ["header", "closed connection"])
def test_a_retry_is_served_once_and_recorded_once(running: Running, said_by: str) -> None:
    running.engine.delay_s = 0.3

    async def ask() -> ChatCompletion:
        if said_by == "header":
            async with running.client(timeout=0.2, max_retries=3) as client:
                return await client.chat.completions.create(model="x", messages=[USER])
        async with running.client(max_retries=0) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(model="x", messages=[USER]), 0.1)
            await asyncio.sleep(0.1)
            return await client.chat.completions.create(model="x", messages=[USER])

    assert asyncio.run(ask()).id == "g000000.e0.i0"
    assert running.recorded() == ["g000000.e0.i0"] and len(running.engine.requests) == 1


def test_a_retry_that_comes_while_a_long_prompt_is_made_gets_the_same_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_session, "LARGE_TEXT", 0)  # all prompts are made in threads
    make = running.session.turns.prompt

    def slowly(*arguments: Any) -> Any:
        time.sleep(1.5)  # the client asks again after its timeout, and a pause of up to half a second
        return make(*arguments)

    monkeypatch.setattr(running.session.turns, "prompt", slowly)

    async def ask() -> ChatCompletion:
        async with running.client(timeout=0.2, max_retries=3) as client:
            return await client.chat.completions.create(model="x", messages=[USER])

    assert asyncio.run(ask()).id == "g000000.e0.i0"
    assert running.recorded() == ["g000000.e0.i0"] and len(running.engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_a_retry_got_counts_although_the_first_connection_breaks_later(
    running: Running, stream: bool
) -> None:
    """The proxy of a client may keep the first connection open, and close it after the retry has come."""
    running.engine.delay_s = 0.5
    body = json.dumps({"model": "x", "messages": [USER], "stream": stream}).encode()
    retry = {"X-Stainless-Retry-Count": "1"}

    async def ask() -> None:
        url, given = running.gateway.base_url + "/chat/completions", {"Authorization": f"Bearer {running.key}"}
        async with aiohttp.ClientSession(headers={**given, "Content-Type": "application/json"}) as client:
            first = asyncio.ensure_future(client.post(url, data=body))
            await asyncio.sleep(0.1)
            second = asyncio.ensure_future(client.post(url, data=body, headers=retry))
            await asyncio.sleep(0.1)
            first.cancel()
            assert "answer" in await (await second).text()
        await running.gateway.close(running.key)

    asyncio.run(ask())
    assert running.recorded() == ["g000000.e0.i0"] and running.session.received_bytes == len(body)


def test_two_equal_requests_side_by_side_are_two_interactions(running: Running) -> None:
    running.engine.delay_s = 0.1

    async def ask() -> set[str]:
        async with running.client() as client:
            both = [client.chat.completions.create(model="x", messages=[USER]) for _ in range(2)]
            return {each.id for each in await asyncio.gather(*both)}

    assert len(asyncio.run(ask())) == 2


def test_a_retry_of_one_of_two_equal_requests_is_of_the_one_whose_client_has_left(running: Running) -> None:
    running.engine.delay_s = 1.0
    known, retry = running.session._submissions, {"X-Stainless-Retry-Count": "1"}

    async def ask() -> list[str]:
        async with running.client(max_retries=0) as client:
            first = asyncio.ensure_future(client.chat.completions.create(model="x", messages=[USER]))
            while not known:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            second = asyncio.ensure_future(client.chat.completions.create(model="x", messages=[USER]))
            while len(known) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            first.cancel()
            while not known[0].abandoned:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            again = client.chat.completions.create(model="x", messages=[USER], extra_headers=retry)
            return [each.id for each in await asyncio.gather(again, second)]

    assert asyncio.run(ask()) == ["g000000.e0.i0", "g000000.e0.i1"]


def test_equal_requests_that_failed_together_stay_two_when_they_are_retried(running: Running) -> None:
    running.engine.failure, running.engine.delay_s = ZeroDivisionError("planted"), 0.1

    async def ask() -> set[str]:
        async with running.client(max_retries=3) as client:
            both = [asyncio.ensure_future(client.chat.completions.create(model="x", messages=[USER])) for _ in range(2)]
            await asyncio.sleep(0.3)  # less than the client waits before it asks again
            running.engine.failure = None
            return {each.id for each in await asyncio.gather(*both)}

    assert len(asyncio.run(ask())) == 2
    assert len(running.recorded()) == 2


def test_what_its_client_did_not_wait_for_is_not_recorded(running: Running) -> None:
    running.engine.delay_s = 0.2

    async def ask() -> None:
        async with running.client(max_retries=0) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(model="x", messages=[USER]), 0.1)
            await asyncio.sleep(0.2)
            await client.chat.completions.create(model="x", messages=[USER, USER])
        await running.gateway.close(running.key)

    asyncio.run(ask())
    assert running.recorded() == ["g000000.e0.i1"]


def test_keys_sessions_and_limits(tmp_path: Path) -> None:
    running = Running(tmp_path, Limits(turns=2, tokens=1000))

    async def ask() -> None:
        async with running.client() as client:
            for _ in range(2):
                await client.chat.completions.create(model="x", messages=[USER])
            with pytest.raises(
                openai.BadRequestError, match=r"has ended, because it has used its 2 requests"
            ) as refused:
                await client.chat.completions.create(model="x", messages=[USER])
            assert refused.value.code == "session_ended"
        async with running.client("sk-nobody") as client:
            with pytest.raises(openai.AuthenticationError, match="no session has the API key 'sk-nobody'"):
                await client.chat.completions.create(model="x", messages=[USER])
        await running.gateway.close(running.key)
        async with running.client() as client:
            with pytest.raises(openai.AuthenticationError, match=r"g000000\.e0 has ended: its episode is over"):
                await client.chat.completions.create(model="x", messages=[USER])

    asyncio.run(ask())
    running.gateway.stop()


def test_rewards_by_call(running: Running) -> None:
    async def ask() -> list[tuple[int, Any]]:
        async with running.client() as client:
            first = await client.chat.completions.create(model="x", messages=[USER])
        said = []
        for body in (
            b'{"reward": 0.5}',
            b'{"reward": 1, "interaction_id": "%s"}' % first.id.encode(),
            b'{"reward": 1, "interaction_id": "no"}',
            b'{"reward": "high"}',
            b'{"reward": 1e999}',
        ):
            said.append(await running.post("/../rl/set_reward", body))
        said.append(await running.post("/../rl/end_session", b'{"data": {}}'))
        said.append(await running.post("/../rl/end_session", b""))
        said.append(await running.post("/chat/completions", b'{"model": "x", "messages": []}'))
        return said

    said = asyncio.run(ask())
    assert [status for status, _ in said] == [200, 200, 404, 400, 400, 400, 200, 400]
    assert running.session.rewards == {"g000000.e0.i0": 1.0}


BAD = [
    (b"{", "not JSON"),
    (b"[1]", "expected a JSON object"),
    (b'{"model": "x", "messages": []}', "messages"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "model"),
    (b'{"model": "x", "messages": [{"role": "robot", "content": "a"}]}', "messages.0: 'robot'"),
    (b'{"model": "x", "messages": [{"role": "user", "content": "a"}], "temperature": -1}', "temperature"),
    (b'{"model": "x", "messages": [{"role": "user", "content": "a"}], "frequency_penalty": 1}', "frequency_penalty"),
    (b'{"model": "x", "messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 3}', "logprob"),
    (
        b'{"model": "x", "messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}',
        "response_format.json_schema",
    ),
    (
        b'{"model": "x", "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}',
        "takes text and images only",
    ),
    (b'{"model": "x", "messages": [{"role": "user", "content": "\\ud800"}]}', ""),
]


@pytest.mark.parametrize(("raw", "named"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(running: Running, raw: bytes, named: str) -> None:
    status, body = asyncio.run(running.post("/chat/completions", raw))
    assert status == 400 and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


IMAGE = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CALLED: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def user(part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/chat/completions",
            user({"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}),
            "messages",
        ),
        (
            "/chat/completions",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                    {
                        "role": "tool",
                        "tool_call_id": "c",
                        "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
                    },
                ]
            },
            "messages",
        ),
        ("/completions", {"prompt": [{"type": "image_url", "image_url": {"url": IMAGE}}]}, "prompt.0"),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE, "detail": "auto"}]}]},
            "messages",
        ),
        (
            "/responses",
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": IMAGE}],
                    },
                ]
            },
            "messages",
        ),
        ("/messages", {"max_tokens": 9, **user({"type": "image", "source": SOURCE})}, "messages"),
        (
            "/messages",
            {
                "max_tokens": 9,
                **user({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": SOURCE}]}),
            },
            "messages",
        ),
    ],
)
def test_images_are_refused_in_each_dialects_form_by_a_model_that_takes_none(
    running: Running, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = asyncio.run(running.post(path, json.dumps({"model": "x", **body}).encode()))
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error" and running.engine.requests == []
    assert len(error["message"]) < 400
    if path == "/completions":  # which knows no parts
        assert error["message"].startswith(f"{param}: ")
    else:
        assert error["message"] == "Cannot read the images: this model takes text only. Send no images."
    assert answer["type"] == "error" if path == "/messages" else error["param"] == param


def test_a_text_that_no_context_holds_is_refused_before_its_tokens_are_made(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_session, "max_text", lambda context: 10_000)
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "a" * 10_001}]}).encode()
    status, answer = asyncio.run(running.post("/chat/completions", body))
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_a_body_of_100_mb(running: Running) -> None:
    port = int(running.gateway.base_url.rpartition(":")[2].partition("/")[0])
    size = 100_000_000

    async def send() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {size}\r\n\r\n"
            writer.write(head.encode())
            answer = asyncio.ensure_future(reader.readline())
            for _ in range(size // 1_000_000):
                if answer.done():
                    break
                writer.write(b"a" * 1_000_000)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
            return await answer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    assert b" 413 " in asyncio.run(send())
    assert asyncio.run(running.post("/chat/completions", b'{"model": "x", "messages": [{"role": "user"}]}'))[0] == 200


def test_an_engine_that_is_away_or_refuses(running: Running) -> None:
    async def ask(stream: bool) -> Exception:
        async with running.client(max_retries=0) as client:
            with pytest.raises(openai.APIError) as raised:
                await client.chat.completions.create(model="x", messages=[USER], stream=stream)  # pyright: ignore
            return raised.value

    running.engine.failure = RequestTooLong("the prompt has 9 tokens, and the context 8.")
    for stream in (False, True):
        refused = asyncio.run(ask(stream))
        assert isinstance(refused, openai.BadRequestError) and refused.code == "context_length_exceeded"
    running.engine.failure = FaultyAnswer("here", "its logprobs are NaN.")
    assert isinstance(faulty := asyncio.run(ask(False)), openai.InternalServerError) and faulty.status_code == 503
    running.engine.failure = EngineUnreachable("here", "killed")

    async def comes_back() -> str | None:
        async with running.client() as client:
            answer = asyncio.ensure_future(client.chat.completions.create(model="x", messages=[USER]))
            await asyncio.sleep(0.4)
            running.engine.failure = None
            return (await answer).choices[0].message.content

    assert asyncio.run(comes_back()) == "the answer is right"
    assert len(running.recorded()) == 1


def test_a_defect_is_an_error_in_the_dialects_form(running: Running) -> None:
    running.engine.failure = ZeroDivisionError("planted")
    status, body = asyncio.run(
        running.post("/chat/completions", b'{"model": "x", "messages": [{"role": "user", "content": "a"}]}')
    )
    assert status == 500 and "planted" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
def test_a_defect_in_a_stream_is_told_in_the_stream(
    running: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.02)
    running.engine.failure, running.engine.delay_s = ZeroDivisionError("planted"), 0.1
    body = {"model": "x", "stream": True, "max_tokens": 9, "messages": [USER]}
    if path == "/responses":
        body = {"model": "x", "stream": True, "input": "hello"}

    async def ask() -> str:
        given = {"Authorization": f"Bearer {running.key}"}
        url = running.gateway.base_url + path
        async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=given) as response:
            assert response.status == 200
            return await response.text()

    assert "ZeroDivisionError: planted" in asyncio.run(ask()).strip().splitlines()[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_is_told_to_the_client_and_is_not_called_a_bug(
    running: Running, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE_S", 0.02)
    full = "Cannot write media/a.png: No space left on device."
    running.engine.failure, running.engine.delay_s = RecordError(full), 0.1

    async def ask() -> openai.APIError:
        async with running.client(max_retries=0) as client:
            with pytest.raises(openai.APIError) as raised:
                answer: Any = client.chat.completions.create(model="x", messages=[USER], stream=stream)
                async for _ in await answer:
                    pass
            return raised.value

    assert asyncio.run(ask()).body["message"] == full  # pyright: ignore
    assert f"failed: {full}" in caplog.text and "a bug in the gateway" not in caplog.text


@pytest.mark.parametrize("colon", [b":", b" : ", b"\t\n :"])
def test_a_body_with_too_many_keys_is_refused_however_it_is_spaced(running: Running, colon: bytes) -> None:
    keys = b",".join(b'""%s1' % colon for _ in range(app.MAX_KEYS))
    body = b'{"model": "x", "messages": [{"role": "user", "content": "a"}], "metadata": {%s}}' % keys
    status, answer = asyncio.run(running.post("/chat/completions", body))
    assert status == 413 and "more than 100000 keys" in answer["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("form", [CALL, '{"name": "add", "parameters": {"a": 1}}<|im_end|>'])
def test_a_call_with_numbers_that_json_does_not_have_stays_text(running: Running, number: str, form: str) -> None:
    running.engine.script = lambda prompt: form.replace("1}", f"{number}}}")

    async def ask() -> ChatCompletion:
        async with running.client() as client:
            return await client.chat.completions.create(model="x", messages=[USER], tools=[ADD])

    [choice] = asyncio.run(ask()).choices
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert number in (choice.message.content or "")


HALF_A_PAIR = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call><|im_end|>'
ENDLESS = '<tool_call>\n{"name": "add", "arguments": {"a": ' + "[" * 5000 + "<|im_end|>"


@pytest.mark.parametrize("said", [HALF_A_PAIR, ENDLESS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "end"), [("chat/completions", "finish_"), ("messages", "stop_"), ("responses", "id")])
def test_arguments_that_utf_8_or_json_cannot_hold(
    running: Running, said: str, stream: bool, path: str, end: str
) -> None:
    running.engine.script = lambda prompt: said
    tools: dict[str, Any] = {
        "chat/completions": ADD,
        "messages": {"name": "add", "input_schema": {"type": "object"}},
        "responses": {"type": "function", "name": "add", "parameters": {"type": "object"}},
    }
    body: dict[str, Any] = {"model": "x", "tools": [tools[path]], "stream": stream}
    body |= {"input": "hello"} if path == "responses" else {"messages": [USER], "max_tokens": 9000}

    async def ask() -> tuple[int, str]:
        given = {"Authorization": f"Bearer {running.key}"}
        url = f"{running.gateway.base_url}/{path}"
        async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=given) as response:
            return response.status, await response.text()

    status, text = asyncio.run(ask())
    assert status == 200 and "add" in text and end in text


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": "\\ud83d"}'])
def test_a_client_sends_such_arguments_back(running: Running, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    body = json.dumps({"model": "x", "messages": [USER, said, result]}).encode()
    assert asyncio.run(running.post("/chat/completions", body))[0] == 200


def test_a_tool_that_must_be_called_and_is_not_there(running: Running) -> None:
    body = json.dumps({"model": "x", "messages": [USER], "tool_choice": "required"}).encode()
    status, answer = asyncio.run(running.post("/chat/completions", body))
    assert status == 400 and answer["error"]["param"] == "tool_choice"


def test_unknown_paths_and_methods(running: Running) -> None:
    async def ask() -> list[int]:
        async with aiohttp.ClientSession() as client:
            root = running.gateway.base_url
            return [
                (await client.get(root + "/nowhere")).status,
                (await client.get(root + "/chat/completions")).status,
                (await client.get(root.removesuffix("/v1") + "/openapi.json")).status,
            ]

    assert asyncio.run(ask()) == [404, 405, 200]


def test_clients_that_leave_in_mid_stream_or_before_cost_nobody_else(running: Running) -> None:
    running.engine.delay_s = 0.05

    async def ask() -> int:
        async with running.client(max_retries=0) as client:
            for number in range(10):
                stream = await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": str(number)}], stream=True
                )
                async for _ in stream:
                    break
                await stream.close()
            return len((await client.chat.completions.create(model="x", messages=[USER])).choices)

    assert asyncio.run(ask()) == 1
    assert len(running.recorded()) == 11


def test_many_sessions_at_once_lose_nothing(running: Running) -> None:
    keys = [running.open(f"g{number:06d}.e0") for number in range(1, 257)]

    async def one(client: aiohttp.ClientSession, key: str) -> int:
        messages: list[Any] = [USER]
        for _ in range(3):
            async with client.post(
                running.gateway.base_url + "/chat/completions",
                json={"model": "x", "messages": messages},
                headers={"Authorization": f"Bearer {key}"},
            ) as response:
                message = (await response.json())["choices"][0]["message"]
            messages += [{"role": "assistant", "content": message["content"]}, USER]
        return len(messages)

    async def all_of_them() -> list[int]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            return await asyncio.gather(*(one(client, key) for key, _ in keys))

    assert asyncio.run(all_of_them()) == [7] * 256
    for _, session in keys:
        assert len(assemble(session.engine.interactions)) == 1 and len(session.engine.interactions) == 3


def test_an_effort_reaches_the_template_that_knows_it_and_else_a_warning_says_so(running: Running) -> None:
    tokenizer = running.engine.tokenizer
    knows = "{% generation %}{% endgeneration %}effort: {{ reasoning_effort }} " + str(tokenizer.chat_template)

    async def ask() -> None:
        async with running.client() as client:
            for template in (tokenizer.chat_template, "{# reasoning_effort #}" + str(tokenizer.chat_template), knows):
                tokenizer.chat_template = template
                session = session_on(running.engine, "g000001.e0")
                key, _ = running.gateway.open(session)
                await client.with_options(api_key=key).chat.completions.create(
                    model="x", messages=[USER], reasoning_effort="low"
                )
                warned.append("reasoning effort 'low'" in str(session.warnings))

    warned: list[bool] = []
    asyncio.run(ask())
    assert warned == [True, True, False]
    prompts = [tokenizer.decode(ids) for ids in running.engine.requests]
    assert ["effort: low" in prompt for prompt in prompts] == [False, False, True]


def test_a_strict_tool_is_served_with_a_warning(running: Running) -> None:
    strict: Any = {"type": "function", "function": {**ADD["function"], "strict": True}}

    async def ask() -> None:
        async with running.client() as client:
            await client.chat.completions.create(model="x", messages=[USER], tools=[ADD])
            assert running.session.warnings == []
            await client.chat.completions.create(model="x", messages=[USER], tools=[strict])

    asyncio.run(ask())
    [warning] = running.session.warnings
    assert warning.startswith("the client sets strict for add: the engine cannot hold arguments to a schema")


def test_a_model_by_its_name(running: Running) -> None:
    async def ask() -> None:
        async with running.client() as client:
            assert (await client.models.retrieve("Qwen/Qwen3-0.6B")).id == "Qwen/Qwen3-0.6B"
        url = running.gateway.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=running.key) as other:
            assert (await other.models.retrieve("claude")).type == "model"
        running.gateway.sessions.models = ["mine", "folder/mine"]  # pyright: ignore[reportAttributeAccessIssue]
        async with running.client(max_retries=0) as client:
            assert (await client.models.retrieve("folder/mine")).owned_by == "clew"
            with pytest.raises(openai.NotFoundError, match="this server has mine, folder/mine") as error:
                await client.models.retrieve("gpt-5")
            assert error.value.code == "model_not_found"

    asyncio.run(ask())
