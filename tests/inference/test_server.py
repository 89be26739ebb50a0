"""`clew serve`'s body as a real process on a free port."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from clew.config import Config, load
from clew.errors import EngineError, ImageError
from clew.inference.client import HTTPEngine
from clew.inference.core import Core, Request
from clew.inference.embedded import build_engine
from clew.inference.local import LocalEngine
from clew.inference.protocol import Completion, EngineUnreachable, RequestTooLong, SamplingParams
from clew.inference.resubmit import generate_through_aborts
from clew.inference.server import serve
from clew.models import load_model, load_tokenizer
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef
from clew.trainer.servers import Servers
from clew.vision import load_vision
from tests.forked import Forked
from tests.models import picture, seeing_model, tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, folder: Path, listen: str = "127.0.0.1:0", serve: Callable[[Config], None] = serve) -> None:
        self.serve = serve
        self.config_path = folder / "config.yaml"
        self.config_path.write_text(
            json.dumps(
                {
                    "experiment": "test",
                    "root": str(folder / "runs"),
                    "model": {"path": str(folder / "model")},
                    "data": {"path": "none"},
                    "inference": {"listen": listen, "max_running": 8},
                    "launch": {"threads": 1},
                }
            )
        )
        self.start()

    def start(self) -> None:
        """Returns when it has said that it is launched."""
        self.process = Forked(self.serve, load(self.config_path))
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.communicate()[1])
        self.line = line.rstrip("\n")
        self.address = self.line.rpartition("=")[2]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Raises TimeoutExpired when it takes long: a busy machine may take seconds, a server that waits for somebody
        takes longer."""
        self.process.send_signal(number)
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(folder)
    yield server
    if server.process.poll() is None:
        server.end()


def with_engine(server: ServerProcess, scenario: Any) -> Any:
    """Run `await scenario(engine)` against the server."""

    async def run() -> Any:
        engine = HTTPEngine(server.address)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def post(server: ServerProcess, path: str, body: Any) -> tuple[int, Any]:
    async def run() -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with aiohttp.ClientSession() as session, session.post(f"http://{server.address}{path}", data=data) as got:
            text = await got.text()
            return got.status, json.loads(text) if text[:1] in "[{" and text else text

    return asyncio.run(run())


def test_says_where_it_listens_and_is_in_the_run_directory(server: ServerProcess, folder: Path) -> None:
    assert server.line == f"LLM inference server launched at: CLEW_LLM_SERVER_ADDRS={server.address}"
    run = RunDirectory(folder / "runs" / "test" / "0")
    [entry] = run.servers()
    assert (entry.name, entry.address, entry.ready, entry.pid) == ("server", server.address, True, server.process.pid)
    assert json.loads((run.status / "server.json").read_text())["doing"] == "serving"


def test_equals_the_engine_in_this_process(server: ServerProcess, folder: Path) -> None:
    params = [SamplingParams(max_new_tokens=20, seed=seed, stop=("3",) if seed % 2 else ()) for seed in range(12)]
    path = str(folder / "model")
    core = build_engine(load_model(path, "float32", torch.device("cpu")), load_tokenizer(path))

    async def all_of(engine: Any) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(PROMPT, one, request_id=f"q{one.seed}") for one in params))

    here = asyncio.run(all_of(LocalEngine(core)))
    there = with_engine(server, all_of)
    for one, other in zip(here, there, strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert (one.finish_reason, one.matched) == (other.finish_reason, other.matched)


def test_a_stream_tells_the_same_tokens(server: ServerProcess) -> None:
    told: list[tuple[int, float]] = []
    params = SamplingParams(max_new_tokens=20, seed=4, stop_token_ids=())
    plain = with_engine(server, lambda engine: engine.generate(PROMPT, params))
    streamed = with_engine(
        server, lambda engine: engine.generate(PROMPT, params, on_token=lambda *token: told.append(token))
    )
    assert streamed == plain and told == list(zip(plain.output_ids, plain.logprobs, strict=True))


def test_speaks_sglangs_shapes(server: ServerProcess) -> None:
    sampling = {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3, "temperature": 1, "top_k": -1}
    status, one = post(
        server, "/generate", {"text": "1+2=", "sampling_params": sampling, "return_logprob": True, "rid": "mine"}
    )
    assert status == 200 and len(one["text"]) > 0 and len(one["output_ids"]) == 5
    meta = one["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 5)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == one["output_ids"]
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 5}]
    body = {"input_ids": [PROMPT, [9, 9]], "sampling_params": [sampling, sampling]}
    status, several = post(server, "/generate", body)
    assert status == 200 and len(several) == 2 and "output_token_logprobs" not in several[0]["meta_info"]
    status, copies = post(server, "/generate", {"input_ids": PROMPT, "sampling_params": {**sampling, "n": 3}})
    assert status == 200 and len({tuple(copy["output_ids"]) for copy in copies}) > 1


def test_streams(server: ServerProcess) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}, "stream": True}
    status, text = post(server, "/generate", body)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert [len(part["output_ids"]) for part in parts[:-1]] == [1, 2, 3, 4, 5, 6]
    assert parts[0]["meta_info"]["finish_reason"] is None
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_says_that_a_request_is_too_long(server: ServerProcess) -> None:
    with pytest.raises(RequestTooLong, match=r"refused /generate \(400\): the prompt has 256 tokens"):
        with_engine(server, lambda engine: engine.generate([7] * 256, SamplingParams()))


def test_a_long_text_holds_nobody_up_while_its_tokens_are_made(server: ServerProcess) -> None:
    async def run() -> tuple[float, float]:
        url, text = f"http://{server.address}", "1+2=3 hello " * 25_000
        longest = 0.0
        async with aiohttp.ClientSession() as session:
            began = time.monotonic()
            asked = asyncio.ensure_future(session.post(f"{url}/generate", json={"text": text}))
            while not asked.done():
                before = time.monotonic()
                async with session.get(f"{url}/health") as health:
                    assert health.status == 200
                longest = max(longest, time.monotonic() - before)
            refused = await asked
            assert refused.status == 400 and "the prompt has 300000 tokens" in await refused.text()
        return longest, time.monotonic() - began

    longest, all_of_it = asyncio.run(run())
    assert longest < all_of_it / 2, f"{longest:.2f} s of {all_of_it:.2f} s"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", b"{not json", "not JSON"),
        ("/generate", [], "expected a JSON object"),
        ("/generate", {}, "input_ids"),
        ("/generate", {"input_ids": []}, "empty"),
        ("/generate", {"input_ids": [7] * 256}, "context"),
        ("/generate", {"input_ids": [5000]}, "5000"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"temprature": 1}}, "Did you mean temperature"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p"),
        (
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": "ab", "min_new_tokens": 2}},
            "integers",
        ),
        (
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [5000], "min_new_tokens": 2}},
            "5000",
        ),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": [7]}}, "stop holds 7"),
        ("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": {"top_p": 0}}, "top_p"),
        ("/pause_generation", {"mode": "retract"}, "abort"),
        ("/release_memory_occupation", {"tags": ["weights"]}, "kv_cache"),
        ("/abort_request", {}, "rid"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere"),
        ("/update_weights_from_disk", b"[", "not JSON"),
    ],
)
def test_refuses_with_words(server: ServerProcess, path: str, body: Any, words: str) -> None:
    status, answer = post(server, path, body)
    assert status == 400 and words in json.dumps(answer)
    if "nowhere" in words:
        assert post(server, "/generate", {"input_ids": PROMPT})[0] == 503  # serves nothing until a load succeeds


def serve_broken(config: Config) -> None:
    def matched_stop(self: Core, request: Request, output_ids: list[int]) -> None:
        raise RuntimeError("no such kernel")

    Core.matched_stop = matched_stop  # type: ignore[assignment]
    serve(config)


@pytest.mark.slow
def test_a_failed_step_ends_the_process_and_the_next_one_answers(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    server = ServerProcess(tmp_path, serve=serve_broken)

    async def scenario(engine: HTTPEngine) -> Completion:
        params = SamplingParams(max_new_tokens=5, stop=("no such text",), stop_token_ids=())
        request = asyncio.ensure_future(generate_through_aborts(engine, PROMPT, params))
        error = (await asyncio.to_thread(server.process.communicate, timeout=60))[1]
        assert server.process.returncode == 1
        assert "a step of the inference engine failed" in error and "in matched_stop" in error
        assert "EngineError: the inference engine stopped: a step failed with RuntimeError: no such kernel" in error
        server.__init__(tmp_path, listen=server.address)  # type: ignore[misc]
        return await request

    assert len(with_engine(server, scenario).output_ids) == 5
    server.end()


def test_loads_weights_while_requests_go_on(server: ServerProcess, folder: Path) -> None:
    tiny_model(folder / "next", seed=1)
    ref = WeightRef(version=5, path=str(folder / "next"), digest="")

    async def scenario(engine: HTTPEngine) -> Completion:
        await engine.load_weights(WeightRef(version=4, path=str(folder / "model"), digest=""))
        params = SamplingParams(max_new_tokens=240, stop_token_ids=(), seed=1)
        request = asyncio.ensure_future(generate_through_aborts(engine, PROMPT, params, request_id="long"))
        while not await running(server):
            pass
        await asyncio.sleep(0.02)
        await engine.load_weights(ref)
        assert await engine.version() == 5
        return await request

    async def running(server: ServerProcess) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"http://{server.address}/model_info") as got:
            return (await got.json())["running"]

    completion = with_engine(server, scenario)
    assert len(completion.output_ids) == 240
    assert completion.versions == sorted(completion.versions) and set(completion.versions) <= {4, 5}
    with_engine(server, lambda engine: engine.load_weights(WeightRef(version=0, path=str(folder / "model"), digest="")))


def test_a_pause_is_a_lease(server: ServerProcess) -> None:
    async def scenario(engine: HTTPEngine) -> float:
        await engine.pause(lease_s=0.5)
        began = time.monotonic()
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=3))
        return time.monotonic() - began

    assert 0.3 < with_engine(server, scenario) < 5


def test_memory_is_released_for_as_long_as_the_trainer_says_and_requests_go_on(
    server: ServerProcess, folder: Path
) -> None:
    params = SamplingParams(max_new_tokens=240, seed=11, stop_token_ids=())
    plain = with_engine(server, lambda engine: engine.generate(PROMPT, params))

    def state() -> tuple[bool, bool]:
        info = with_engine(server, lambda engine: engine._request("GET", "/model_info", None))
        assert not (info["released"] and (info["running"] or info["cache_bytes"]))
        return info["released"], info["running"] > 0

    servers = Servers(RunDirectory(folder / "runs" / "test" / "0"), lease_s=0.6)
    with ThreadPoolExecutor() as pool, closing(servers):
        request = pool.submit(with_engine, server, lambda engine: generate_through_aborts(engine, PROMPT, params))
        while not state()[1]:
            pass
        with servers.released():
            until = time.monotonic() + 1.3  # two leases
            while time.monotonic() < until:
                assert state() == (True, False) and not request.done()
        found = request.result(20)
    assert found.output_ids == plain.output_ids and found.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert state() == (False, False)


def test_released_memory_is_a_lease_too(server: ServerProcess) -> None:
    async def scenario(engine: HTTPEngine) -> float:
        await engine.release_memory(lease_s=0.5)
        began = time.monotonic()
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=3))
        return time.monotonic() - began

    assert 0.3 < with_engine(server, scenario) < 5


def test_a_client_that_leaves_aborts_its_request(server: ServerProcess) -> None:
    async def scenario(engine: HTTPEngine) -> None:
        params = SamplingParams(max_new_tokens=250, stop_token_ids=())
        requests = [asyncio.ensure_future(engine.generate(PROMPT, params)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        began = time.monotonic()
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=2))
        assert time.monotonic() - began < 1
        info = await engine._request("GET", "/model_info", None)
        assert (info["running"], info["waiting"]) == (0, 0)

    with_engine(server, scenario)


def test_port_in_use(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    from clew.inference.server import serve

    config = Config.model_validate(
        {
            "experiment": "other",
            "root": str(tmp_path),
            "model": {"path": str(folder / "model")},
            "data": {"path": "-"},
            "inference": {"listen": server.address},
        }
    )
    with pytest.raises(EngineError, match=rf"{server.address}: the port is in use.*inference.listen"):
        serve(config)


def test_killed_and_started_again_the_request_goes_on(server: ServerProcess, folder: Path) -> None:
    params = SamplingParams(max_new_tokens=200, stop_token_ids=(), seed=7)
    expected = with_engine(server, lambda engine: engine.generate(PROMPT, params))

    async def scenario(engine: HTTPEngine) -> Completion:
        request = asyncio.ensure_future(generate_through_aborts(engine, PROMPT, params))
        await asyncio.sleep(0.03)
        server.end(signal.SIGKILL)
        with pytest.raises(EngineUnreachable, match=server.address):
            await engine.version()
        listen = server.address
        configuration = json.loads(server.config_path.read_text())
        configuration["inference"]["listen"] = listen
        server.config_path.write_text(json.dumps(configuration))
        await asyncio.to_thread(server.start)
        assert server.address == listen
        return await request

    assert with_engine(server, scenario).output_ids == expected.output_ids


def test_starts_with_the_newest_weights_and_ends_on_a_signal(server: ServerProcess, folder: Path) -> None:
    run = RunDirectory(folder / "runs" / "test" / "0")
    server.end(signal.SIGTERM)
    assert server.process.returncode == 0 and run.servers() == []
    tiny_model(folder / "newest", seed=2)
    run.announce_weights(WeightRef(version=9, path=str(folder / "newest"), digest=""))
    server.start()
    assert with_engine(server, lambda engine: engine.version()) == 9

    async def ended_in_a_pause(engine: HTTPEngine) -> Completion:
        """With a request that would wait for two minutes."""
        await engine.pause(lease_s=120)
        pending = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams()))
        while not (await engine._request("GET", "/model_info", None))["waiting"]:
            pass
        await asyncio.to_thread(server.end, signal.SIGINT)
        return await pending

    completion = with_engine(server, ended_in_a_pause)
    assert (completion.output_ids, completion.finish_reason) == ([], "abort") and server.process.returncode == 0


def test_one_that_was_taken_out_loads_the_newest_weights_and_comes_back(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    tiny_model(tmp_path / "newer", seed=1)
    server = ServerProcess(tmp_path)
    try:
        run = RunDirectory(tmp_path / "runs" / "test" / "0")
        run.announce_weights(WeightRef(version=4, path=str(tmp_path / "newer"), digest=""))
        run.remove_server("server")
        assert server.process.stdout.readline().rstrip("\n") == server.line
        [entry] = run.servers()
        assert entry.ready and entry.address == server.address
        assert with_engine(server, lambda engine: engine.version()) == 4
    finally:
        server.end()


def test_beyond_loopback_its_administration_wants_a_token(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    server = ServerProcess(tmp_path, listen="0.0.0.0:0")
    server.address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
    try:
        [entry] = RunDirectory(tmp_path / "runs" / "test" / "0").servers()
        assert len(entry.token) > 16
        status, said = post(server, "/update_weights_from_disk", {"model_path": str(tmp_path / "model")})
        assert status == 401 and "Authorization: Bearer TOKEN" in said["error"]["message"]
        status, _ = post(server, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})
        assert status == 200

        async def load() -> None:
            engine = HTTPEngine(server.address, entry.token)
            await engine.load_weights(WeightRef(version=1, path=str(tmp_path / "model"), digest=""))
            await engine.close()

        asyncio.run(load())
        assert with_engine(server, lambda engine: engine.version()) == 1
    finally:
        server.end()


@pytest.mark.slow
def test_images_come_over_http_as_they_would_in_this_process(tmp_path: Path) -> None:
    seeing_model(tmp_path / "model")
    path, red = str(tmp_path / "model"), picture("red")
    tokenizer, vision = load_tokenizer(path), load_vision(path)
    assert vision is not None
    here = LocalEngine(build_engine(load_model(path, "float32", torch.device("cpu")), tokenizer, vision))
    prompt: list[int] = list(tokenizer(vision.expanded("a <image> is", [red]))["input_ids"])
    params = SamplingParams(max_new_tokens=12, seed=3)
    server = ServerProcess(tmp_path)

    async def compare() -> None:
        there, told = HTTPEngine(server.address), []
        expected = await here.generate(prompt, params, images=[red])
        assert await there.generate(prompt, params, images=[red]) == expected
        streamed = await there.generate(
            prompt, params, images=[red], on_token=lambda token, logprob: told.append((token, logprob))
        )
        assert streamed == expected and [token for token, _ in told] == expected.output_ids
        assert (await there.generate(prompt, params, images=[picture("blue")])).logprobs != expected.logprobs
        with pytest.raises(ImageError, match=r"7 bytes are no image that can be read"):
            await there.generate(prompt, params, images=[b"a photo"])
        with pytest.raises(ImageError, match=r"the 0 images take 0"):
            await there.generate(prompt, params)
        async with aiohttp.ClientSession() as client:
            body = {"input_ids": prompt, "image_data": "https://example.com/cat.png"}
            async with client.post(f"http://{server.address}/generate", json=body) as refused:
                assert refused.status == 400 and "None is fetched" in (await refused.json())["error"]["message"]
        await there.close()
        await here.close()

    try:
        asyncio.run(compare())
    finally:
        server.end()
