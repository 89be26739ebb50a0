"""Servers that misbehave in one way: what is said about each, and whether the requests are completed elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from clew.errors import EngineError
from clew.inference import detect_server, retries
from clew.inference.client import HTTPEngine
from clew.inference.detect_server import find_engine
from clew.inference.protocol import Completion, EngineUnreachable, FaultyAnswer, GenerateRequest, SamplingParams
from clew.inference.retries import TRIES, generate_through_aborts
from clew.inference.sglang import SGLangEngine
from clew.inference.vllm import VLLMEngine
from clew.loop.inference_servers import InferenceServers
from clew.record.run import RunDirectory, Server
from clew.record.weights import WeightRef
from clew.rollout.server_pool import ServerPool
from tests.inference.test_server import ServerProcess
from tests.models import VOCAB, tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]
TOKENS = 24
JSON = {"Content-Type": "application/json"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Yield the address of a server that answers everything with `handler`, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def spoilt(change: Callable[[Any], Any]) -> Callable[[bytes], web.Response]:
    """Return the fault of a server whose answers are changed so; it returns the new answer."""

    def spoil(content: bytes) -> web.Response:
        return web.Response(text=json.dumps(change(json.loads(content))), content_type="application/json")

    return spoil


def first_pair(logprob: Any = None, token: Any = None) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        pair = answer["meta_info"]["output_token_logprobs"][0]
        pair[0] = pair[0] if logprob is None else logprob
        if token is not None:
            pair[1] = answer["output_ids"][0] = token
        return answer

    return change


def without_last_logprob(answer: Any) -> Any:
    answer["meta_info"]["output_token_logprobs"].pop()
    return answer


def unknown_end(answer: Any) -> Any:
    answer["meta_info"]["finish_reason"] = {"type": "error"}
    return answer


def longer(answer: Any) -> Any:
    answer["meta_info"]["output_token_logprobs"] *= 2
    answer["output_ids"] *= 2
    answer["meta_info"]["completion_tokens"] *= 2
    answer["meta_info"]["weight_versions"][0]["end"] *= 2
    return answer


def with_fields(**fields: Any) -> Callable[[Any], Any]:
    """Return a change of what an answer tells about itself."""

    def change(answer: Any) -> Any:
        answer["meta_info"] |= fields
        return answer

    return change


OVERLAPPING = [{"version": "0", "start": 0, "end": 20}, {"version": "1", "start": 0, "end": TOKENS - 20}]

FAULTS: dict[str, tuple[Callable[[bytes], web.Response], str]] = {
    "html": (
        lambda _: web.Response(text="<html>Welcome to nginx!", content_type="text/html"),
        "<html>Welcome to nginx",
    ),
    "not found": (lambda _: web.Response(status=404, text="<h1>Not Found</h1>"), "it does not serve /generate (404)"),
    "redirect": (
        lambda _: web.Response(status=301, headers={"Location": "https://x/"}),
        "does not serve /generate (301)",
    ),
    "truncated": (lambda content: web.Response(body=content[:-20]), "cannot be read"),
    "empty": (lambda _: web.Response(), "its answer to /generate is empty"),
    "a list": (spoilt(lambda answer: [answer]), "cannot be read"),
    "failing": (lambda _: web.Response(status=500, text="CUDA error: device-side assert"), "device-side assert"),
    "NaN": (spoilt(first_pair(logprob=float("nan"))), "cannot be read"),
    "null": (spoilt(lambda a: first_pair(logprob="null")(a)), "it returned the logprob null"),
    "positive": (spoilt(first_pair(logprob=0.5)), "it returned the logprob 0.5"),
    "vocabulary": (spoilt(first_pair(token=VOCAB)), f"the token ID {VOCAB}, and the model has 0 to {VOCAB - 1}"),
    "negative": (spoilt(first_pair(token=-1)), "it returned the token ID -1"),
    "finish reason": (spoilt(unknown_end), "finish_reason 'error'"),
    "unfinished": (spoilt(with_fields(finish_reason=None)), "finish_reason null"),
    "counts": (spoilt(without_last_logprob), f"{TOKENS} tokens and {TOKENS - 1} logprobs"),
    "another request": (spoilt(with_fields(id="g000099.e9.i0")), "but answered request g000099.e9.i0. Does a proxy"),
    "few masks": (spoilt(with_fields(clew={"sampling_mask": [[7]]})), f"{TOKENS} tokens and 1 sampling masks"),
    "other masks": (spoilt(with_fields(clew={"sampling_mask": [[VOCAB]] * TOKENS})), "the sampling mask of token"),
    "experts": (spoilt(with_fields(clew={"routed_experts": "UEsDBA=="})), "cannot be read"),
    "sampled by": (spoilt(with_fields(clew={"sampled_by": "x"})), "cannot be read"),
    "spans": (spoilt(with_fields(weight_versions=OVERLAPPING)), "its weight_versions do not follow one another"),
    "long span": (
        spoilt(with_fields(weight_versions=[{"version": 1, "start": 0, "end": 2**30}])),
        f"its weight_versions have a span of {2**30} tokens",
    ),
    "version": (spoilt(with_fields(weight_version=str(2**31), weight_versions=None)), f"weight_version {2**31}"),
    "not compressed": (
        lambda content: web.Response(body=content, headers={"Content-Encoding": "gzip"}),
        "is not compressed as its header says",
    ),
    "too many": (spoilt(longer), f"it returned {2 * TOKENS} tokens, and was asked for at most {TOKENS}"),
}
AWAY = {
    "draining": lambda _: web.Response(status=503, text="shutting down"),
    "busy": lambda _: web.Response(status=429, text="too many requests"),
    "gateway": lambda _: web.Response(status=502, text="<h1>Bad Gateway</h1>"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("good")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    server = ServerProcess(folder)
    yield server
    server.end()


def proxy(address: str, fault: Callable[[bytes], web.Response]) -> Handler:
    """Return the handler of a server that passes on what another answers to /generate, after `fault` has had it."""

    async def forward(request: web.Request) -> web.StreamResponse:
        async with aiohttp.ClientSession(headers=JSON) as session:
            url = f"http://{address}{request.path}"
            async with session.request(request.method, url, data=await request.read()) as answer:
                content = await answer.read()
                return fault(content) if request.path == "/generate" else web.Response(body=content)

    return forward


def request(number: int, **more: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=TOKENS, seed=number, stop_token_ids=())
    return GenerateRequest(PROMPT, params, id=f"g{number:06d}.e0.i0", **more)


def complete(run: RunDirectory, count: int) -> list[Completion]:
    async def use() -> list[Completion]:
        pool = ServerPool(run, vocab=VOCAB)
        try:
            work = [generate_through_aborts(pool, request(number)) for number in range(count)]
            return await asyncio.wait_for(asyncio.gather(*work), 60)
        finally:
            await pool.close()

    return asyncio.run(use())


@pytest.mark.parametrize("name", [*FAULTS, *AWAY])
def test_requests_to_a_faulty_server_are_completed_by_the_other(
    good: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.register_server(Server(name="good", address=good.address, pid=1, ready=True))
    fault, said = FAULTS[name] if name in FAULTS else (AWAY[name], "")
    expected = complete(run, 6)
    with serving(proxy(good.address, fault)) as address, caplog.at_level(logging.WARNING):
        run.register_server(Server(name="bad", address=address, pid=2, ready=True))
        completions = complete(run, 6)
    assert [each.output_ids for each in completions] == [each.output_ids for each in expected]
    for one, other in zip(completions, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), "they shared a batch with other requests"
    told = [message for message in caplog.messages if address in message]
    assert told and all(said in message for message in told), "the log names the server, and what is wrong with it"


@pytest.mark.parametrize("name", ["html", "failing", "NaN", "vocabulary"])
def test_a_faulty_server_that_is_alone_fails_the_request_with_its_address(
    good: ServerProcess, tmp_path: Path, name: str
) -> None:
    fault, said = FAULTS[name]
    run = RunDirectory(tmp_path / "run")
    asked: list[bytes] = []

    def count(content: bytes) -> web.Response:
        asked.append(content)
        return fault(content)

    with serving(proxy(good.address, count)) as address:
        run.register_server(Server(name="bad", address=address, pid=2, ready=True))
        with pytest.raises(FaultyAnswer) as raised:
            complete(run, 1)
    assert address in str(raised.value) and said in str(raised.value)
    assert len(asked) == TRIES


@pytest.mark.parametrize("name", AWAY)
def test_a_server_that_is_away_for_a_moment_costs_nothing(good: ServerProcess, tmp_path: Path, name: str) -> None:
    run = RunDirectory(tmp_path / "run")
    asked: list[bytes] = []

    def at_first(content: bytes) -> web.Response:
        asked.append(content)
        return AWAY[name](content) if len(asked) <= TRIES + 1 else web.Response(body=content)

    with serving(proxy(good.address, at_first)) as address:
        run.register_server(Server(name="busy", address=address, pid=2, ready=True))
        [completion] = complete(run, 1)
    assert len(completion.output_ids) == TOKENS


def test_an_answer_that_breaks_off_is_called_so() -> None:
    async def cut(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(http)
        await response.write(b"{")
        assert http.transport is not None
        http.transport.abort()
        return response

    async def use(address: str) -> None:
        engine = HTTPEngine(address)
        try:
            await engine.version()
        finally:
            await engine.close()

    with serving(cut) as address, pytest.raises(EngineUnreachable) as raised:
        asyncio.run(use(address))
    assert str(raised.value) == f"inference server {address}: its answer to /model_info ended in the middle"


@pytest.mark.parametrize("cut", ["html", "connection", "NaN"])
def test_a_stream_that_turns_bad_goes_on_elsewhere_with_the_tokens_so_far(
    good: ServerProcess, tmp_path: Path, cut: str
) -> None:
    """The tokens that were passed on are not passed on again."""

    async def break_after_some(http: web.Request) -> web.StreamResponse:
        async with aiohttp.ClientSession(headers=JSON) as session:
            url = f"http://{good.address}/generate"
            async with session.post(url, data=await http.read()) as answer:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(http)
                lines = 0
                async for line in answer.content:
                    if line.startswith(b"data: ") and (lines := lines + 1) > 5:
                        break
                    await response.write(line)
                if cut == "connection":
                    assert http.transport is not None
                    http.transport.abort()
                elif cut == "html":
                    await response.write(b"data: <html>502\n\n")
                else:
                    await response.write(line.replace(b'"output_token_logprobs":[[-', b'"output_token_logprobs":[[9'))
                return response

    run = RunDirectory(tmp_path / "run")
    streamed: list[int] = []
    with serving(break_after_some) as address:
        run.register_server(Server(name="a", address=address, pid=2, ready=True))

        async def use() -> Completion:
            pool = ServerPool(run, vocab=VOCAB)
            try:
                asked = request(3, on_token=lambda token, logprob: streamed.append(token))
                work = asyncio.ensure_future(generate_through_aborts(pool, asked))
                while len(streamed) < 5:  # noqa: ASYNC110 - the server makes it true
                    await asyncio.sleep(0.01)
                run.register_server(Server(name="good", address=good.address, pid=1, ready=True))
                run.remove_server("a")
                return await asyncio.wait_for(work, 60)
            finally:
                await pool.close()

        completion = asyncio.run(use())
    assert streamed == completion.output_ids and len(streamed) == TOKENS
    run.register_server(Server(name="good", address=good.address, pid=1, ready=True))
    assert completion.output_ids == complete(run, 4)[3].output_ids
    servers = {span["server"]: span["end"] - span["start"] for span in completion.sampled_by}
    assert servers[address] >= 5 and servers[address] + servers[good.address] == TOKENS


VLLM_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"logprobs": {"token_logprobs": [None, -1.0]}}, "it returned the logprob None"),
    "NaN in vLLM 0.32": ({"logprobs": {"token_logprobs": [-9999.0, -1.0]}}, "it returned the logprob -9999.0"),
    "positive": ({"logprobs": {"token_logprobs": [-1.0, 1.0]}}, "it returned the logprob 1.0"),
    "vocabulary": ({"token_ids": [7, VOCAB]}, f"the token ID {VOCAB}"),
    "counts": ({"token_ids": [7, 8, 9]}, "3 tokens, 2 logprobs"),
    "error": ({"finish_reason": "error"}, "finish_reason 'error'"),
    "none": ({"token_ids": [], "logprobs": None}, "it returned no tokens"),
    "few masks": ({"sampling_mask": [[7, 9]]}, "2 tokens and 1 sampling masks"),
    "other masks": ({"sampling_mask": [[7, 9], [9]]}, "the sampling mask of token 8 has it 0 times"),
    "a token twice": ({"sampling_mask": [[7, 7], [8]]}, "the sampling mask of token 7 has it 2 times"),
    "no tokens": ({"sampling_mask": [[7, 10**12], [8]]}, "the sampling mask of token 7 has entries that are no tokens"),
    "too many": ({"token_ids": [7] * 30, "logprobs": {"token_logprobs": [-1.0] * 30}}, "30 tokens, and was asked for"),
    "no IDs": ({"token_ids": None}, "no token_ids"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", VLLM_FAULTS)
def test_vllms_shape_is_checked_too(name: str, stream: bool) -> None:
    change, said = VLLM_FAULTS[name]
    right = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -0.5]}, "finish_reason": "length"}
    text = json.dumps({"choices": [{**right, **change}]})

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=f"data: {text}\n\ndata: [DONE]\n\n" if stream else text)

    async def ask(address: str) -> None:
        client = VLLMEngine(address, "model", 256)
        client.vocab = VOCAB
        try:
            await client.generate(request(0, on_token=(lambda *_: None) if stream else None))
        finally:
            await client.close()

    with serving(answer) as address, pytest.raises(FaultyAnswer) as raised:
        asyncio.run(ask(address))
    assert address in str(raised.value) and said in str(raised.value)


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_vllms_answer_to_another_request_is_refused_unless_a_proxy_gives_requests_other_ids(keeps_ids: bool) -> None:
    async def answer(http: web.Request) -> web.Response:
        asked = await http.json()
        choice: dict[str, Any] = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        if asked["logprobs"]:  # the probe
            choice["logprobs"]["top_logprobs"] = [{"a": -0.1 / asked["temperature"], "b": -2.4 / asked["temperature"]}]
            name = asked["request_id"] if keeps_ids else "of-the-proxy"
        else:
            name = "g000099.e9.i0"
        return web.json_response({"id": f"cmpl-{name}", "choices": [choice]})

    async def ask(address: str) -> Completion:
        client = VLLMEngine(address, "model", 256)
        try:
            await client.probe()
            return await client.generate(request(0))
        finally:
            await client.close()

    with serving(answer) as address:
        if keeps_ids:
            with pytest.raises(FaultyAnswer, match=r"answered request g000099\.e9\.i0\. Does a proxy"):
                asyncio.run(ask(address))
        else:
            assert asyncio.run(ask(address)).output_ids == [7]


def test_an_abort_before_the_first_token_is_not_refused_for_its_missing_masks() -> None:
    """Only top_k with masks can be trained on, and there is nothing yet that masks could belong to."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"token_ids": [], "logprobs": None, "finish_reason": "abort"}]})

    async def ask(address: str) -> Completion:
        client = VLLMEngine(address, "model", 256)
        client.logprobs_mode = "processed"
        try:
            return await client.generate(GenerateRequest(PROMPT, SamplingParams(top_k=5), sampling_mask=True))
        finally:
            await client.close()

    with serving(answer) as address:
        completion = asyncio.run(ask(address))
    assert (completion.finish_reason, completion.wrong_logprobs) == ("abort", "")


@pytest.mark.parametrize("logprob", [None, "NaN?"])
def test_a_probe_without_numbers_is_no_traceback(logprob: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": [{"token_id:7": logprob}]}}]})

    async def probe(address: str) -> None:
        client = VLLMEngine(address, "model", 256)
        try:
            await client.probe()
        finally:
            await client.close()

    with serving(answer) as address, pytest.raises(EngineError, match="Cannot find out which logprobs vLLM at 127"):
        asyncio.run(probe(address))


def test_a_server_that_cuts_tokens_off_unless_it_is_told_not_to_is_probed_for_its_logprobs() -> None:
    """vLLM fills in what a request leaves out from the model's generation_config.json, such as Qwen2.5's top_p of 0.8.

    It then reports -9999 for the tokens that are cut off, at every temperature.
    """

    async def answer(http: web.Request) -> web.Response:
        asked = await http.json()
        plain = {"top_p": 1, "min_p": 0, "top_k": -1, "repetition_penalty": 1, "presence_penalty": 0}
        cut = any(asked.get(name) != value for name, value in plain.items())
        logprobs = {"a": -0.1 / asked["temperature"], "b": -9999.0 if cut else -2.4 / asked["temperature"]}
        return web.json_response({"choices": [{"logprobs": {"top_logprobs": [logprobs]}}]})

    async def probe(address: str) -> str:
        client = VLLMEngine(address, "model", 256)
        try:
            await client.probe()
        finally:
            await client.close()
        return client.logprobs_mode

    with serving(answer) as address:
        assert asyncio.run(probe(address)) == "processed"


@pytest.mark.parametrize("kind", [SGLangEngine, lambda address: VLLMEngine(address, "model", 256)])
def test_no_request_is_sampled_with_penalties_that_the_server_would_add(kind: Callable[[str], Any]) -> None:
    asked: dict[str, Any] = {}

    async def answer(http: web.Request) -> web.Response:
        asked.update(await http.json())
        return web.Response(status=400)

    async def ask(address: str) -> None:
        client = kind(address)
        try:
            await client.generate(request(0))
        finally:
            await client.close()

    with serving(answer) as address, pytest.raises(EngineError):
        asyncio.run(ask(address))
    sampling = asked.get("sampling_params", asked)
    assert [sampling[f"{name}_penalty"] for name in ("repetition", "presence", "frequency")] == [1, 0, 0]


def test_metrics_that_are_no_text_do_not_say_which_process_answers() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"\xff\xfe")

    async def identity(address: str) -> str:
        client = VLLMEngine(address, "model", 256)
        try:
            return await client.identity()
        finally:
            await client.close()

    with serving(answer) as address:
        assert asyncio.run(identity(address)) == ""


@pytest.mark.parametrize("content", ["[]", "[1]"])
def test_an_answer_to_the_trainer_that_is_no_object_is_said_to_be_faulty(content: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=content, content_type="application/json")

    async def load(address: str) -> None:
        client = HTTPEngine(address)
        try:
            await client.load_weights(WeightRef(version=5, path="/nowhere", digest=""))
        finally:
            await client.close()

    with serving(answer) as address, pytest.raises(FaultyAnswer, match=f"{address}.*it is no JSON object"):
        asyncio.run(load(address))


@pytest.mark.parametrize("timings", [None, [1], {"load": "fast"}])
def test_timings_that_cannot_be_read_take_one_server_out_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timings: Any
) -> None:
    run = RunDirectory(tmp_path / "run")
    updated = {"success": True, "weight_version": "5"}

    async def update(_: web.Request) -> web.Response:
        return web.json_response({**updated, "clew": {"load": 0.5}})

    async def update_badly(_: web.Request) -> web.Response:
        return web.json_response({**updated, "clew": timings})

    with serving(update) as good_address, serving(update_badly) as bad_address:
        for name, address in (("good", good_address), ("bad", bad_address)):
            run.register_server(Server(name=name, address=address, pid=1, ready=True))
        control = InferenceServers(run)
        assert control.load(WeightRef(version=5, path="/nowhere", digest="")) == {"load": 0.5}
        control.close()
    assert [server.name for server in run.servers() if server.ready] == ["good"]
    assert f"inference server {bad_address}: its answer to /update_weights_from_disk cannot be read" in caplog.text


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """A server's; its certificate is in certificate.pem."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return tls


FIND = """
import asyncio, sys
from clew.inference.detect_server import find_engine
async def find():
    found = await find_engine(sys.argv[1], "secret")
    print(found.engine.kind or "clew serve", await found.engine.version())
    await found.engine.close()
asyncio.run(find())
"""


def test_an_engine_behind_tls_is_asked_over_tls(tls: ssl.SSLContext, tmp_path: Path) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"max_context_length": 256, "tokenizer_path": "m", "weight_version": "5"})

    with serving(answer, tls) as address:
        found = subprocess.run(
            [sys.executable, "-c", FIND, f"https://{address}/v1"],
            env={**os.environ, "SSL_CERT_FILE": str(tmp_path / "certificate.pem")},
            capture_output=True,
            text=True,
        )
    assert found.stdout == "clew serve 5\n", found.stderr


def test_sglang_behind_the_gateway_is_known_as_sglang() -> None:
    async def answer(_: web.Request) -> web.Response:
        info = {"tokenizer_path": "m", "has_image_understanding": True, "max_req_input_len": 100, "data": []}
        return web.json_response(info)

    with serving(answer) as address:
        found = asyncio.run(find_engine(f"http://{address}/v1"))
    assert found is not None and found.engine.context == 100
    assert isinstance(found.engine, SGLangEngine) and found.engine.takes_images
    assert "min_new_tokens" in found.engine.wrong_logprobs(SamplingParams(min_new_tokens=1))


def test_a_base_url_that_takes_connections_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_server, "FIND_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(EngineError, match=f"answers at {url} .*no answer within 0.5 s"):
            asyncio.run(asyncio.wait_for(find_engine(url), 30))


@pytest.mark.parametrize("listed", [[], {"data": None}, {"data": [7]}, {"data": 7}])
def test_a_list_of_models_of_another_shape(listed: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(listed) if request.path == "/v1/models" else web.Response(status=404)

    with serving(answer) as address, pytest.raises(EngineError, match=f"Cannot find a model.*{address}"):
        asyncio.run(find_engine(f"http://{address}/v1"))


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        ({"success": True}, "is no `clew serve`, so nothing checks that it loaded version 5"),
        ({"success": True, "clew": {}, "weight_version": "5"}, "that it loaded version 5, and serves version 4"),
    ],
)
def test_an_update_that_says_that_it_succeeded_and_did_not(answered: Any, words: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answered if request.method == "POST" else {"weight_version": "4"})

    async def load(address: str) -> None:
        client = HTTPEngine(address)
        try:
            await client.load_weights(WeightRef(version=5, path="/weights", digest=""))
        finally:
            await client.close()

    with serving(answer) as address, pytest.raises(EngineError, match=words):
        asyncio.run(load(address))


def test_tokens_of_a_clew_serve_that_does_not_say_their_version_are_refused() -> None:
    meta = {"finish_reason": {"type": "length"}, "completion_tokens": 1, "output_token_logprobs": [[-1.0, 7, None]]}

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"output_ids": [7], "meta_info": meta})

    async def ask(engine: HTTPEngine) -> Completion:
        try:
            return await engine.generate(request(0))
        finally:
            await engine.close()

    with serving(answer) as address:
        with pytest.raises(FaultyAnswer, match="weight_version None"):
            asyncio.run(ask(HTTPEngine(address)))
        assert asyncio.run(ask(SGLangEngine(address))).output_ids == [7], "its version is known otherwise"


def test_a_request_that_a_server_aborts_forever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRY_S", 1e-9)
    meta = {"finish_reason": {"type": "abort"}, "completion_tokens": 0, "output_token_logprobs": []}
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += request.path == "/generate"
        return web.json_response({"output_ids": [], "meta_info": meta, "weight_version": str(asked // 30)})

    async def ask(address: str) -> None:
        client = HTTPEngine(address)
        try:
            await generate_through_aborts(client, request(0))
        finally:
            await client.close()

    limit = retries.MAX_EMPTY_ABORTS
    with serving(answer) as address, pytest.raises(FaultyAnswer, match=f"aborted {limit} times in a row"):
        asyncio.run(ask(address))
    assert limit < asked <= limit + 2, "the first says which version it is"


def test_empty_aborts_of_a_server_that_does_not_say_its_version_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "MAX_EMPTY_ABORTS", 3)  # later ones are seconds apart

    class Silent:
        async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
            return Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")

        async def version(self) -> int:
            raise EngineUnreachable("", "it does not answer")

    engine: Any = Silent()
    with pytest.raises(FaultyAnswer, match="times in a row"):
        asyncio.run(asyncio.wait_for(generate_through_aborts(engine, request(0)), 30))


def test_a_tls_port_is_told_from_an_inference_server(tls: ssl.SSLContext) -> None:

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    async def ask(address: str) -> None:
        client = HTTPEngine(address)
        try:
            await client.generate(request(0))
        finally:
            await client.close()

    with serving(answer, tls) as address, pytest.raises(EngineUnreachable) as raised:
        asyncio.run(asyncio.wait_for(ask(address), 30))
    assert address in str(raised.value) and "this port expects TLS" in str(raised.value)


def test_a_closed_port_is_waited_for_by_name() -> None:
    async def ask() -> None:
        client = HTTPEngine("127.0.0.1:1")
        try:
            await client.generate(request(0))
        finally:
            await client.close()

    with pytest.raises(EngineUnreachable, match=r"inference server 127.0.0.1:1: Cannot connect"):
        asyncio.run(ask())


def test_no_request_is_sent_over_a_connection_that_the_server_is_about_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Any] = []

    async def close_reused(request: web.Request) -> web.Response:
        assert request.transport is not None
        if request.transport in used:
            request.transport.abort()
        used.append(request.transport)
        return web.json_response({"choices": [{"prompt_logprobs": [None, {"8": {"logprob": -1.5}}]}]})

    async def score_twice(engine: VLLMEngine) -> None:
        try:
            assert await engine.score([7, 8]) == -1.5
            await asyncio.sleep(0.3)
            assert await engine.score([7, 8]) == -1.5
        finally:
            await engine.close()

    assert max(VLLMEngine.idle_s, SGLangEngine.idle_s) < 5, "both servers close idle connections after 5 s"
    monkeypatch.setattr(VLLMEngine, "idle_s", 0.1)
    with serving(close_reused) as address:
        asyncio.run(score_twice(VLLMEngine(address, "model", 100)))
