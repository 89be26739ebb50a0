"""`clew serve`'s body as a real process on a free port."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from clew.config import Config, load
from clew.errors import EngineError, ImageError
from clew.inference import embedded
from clew.inference import serve as inference_server
from clew.inference.client import HTTPEngine
from clew.inference.embedded import build_engine
from clew.inference.generate_api import parse_call
from clew.inference.local import LocalEngine
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest, RequestTooLong, SamplingParams
from clew.inference.retries import generate_through_aborts
from clew.inference.serve import serve
from clew.loop.inference_servers import InferenceServers
from clew.models.loading import load_model, load_tokenizer
from clew.models.vision import load_vision
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef
from tests.forked import Forked
from tests.models import picture, seeing_model, tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]


def write_config(folder: Path, experiment: str, listen: str = "127.0.0.1:0") -> Path:
    path = folder / f"{experiment}.yaml"
    sections = {
        "experiment": experiment,
        "root": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"path": "none"},
        "inference": {"listen": listen, "max_running": 8},
        "launch": {"threads": 1},
    }
    path.write_text(json.dumps(sections))
    return path


class ServerProcess:
    """A server in a process of its own."""

    def __init__(
        self, folder: Path, listen: str = "127.0.0.1:0", serve: Callable[..., None] = serve, **options: Any
    ) -> None:
        """options: of `serve`; weights are loaded from anywhere in the folder unless they say otherwise."""
        self.serve = functools.partial(serve, **{"allow_weights": [folder], **options})
        self.config_path = write_config(folder, "test", listen)
        self.start()

    def start(self) -> None:
        """Returns when it has said that it is launched."""
        self.process = Forked(self.serve, load(self.config_path))
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.communicate()[1])
        self.line = line.rstrip("\n")
        self.address = self.line.rpartition("=")[2]

    @property
    def token(self) -> str:
        """The run's, as Clew's own processes find it."""
        return RunDirectory(load(self.config_path).run_path).servers()[0].token

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
    """Run `await scenario(engine)` against the server, with its token."""

    async def run() -> Any:
        engine = HTTPEngine(server.address, server.token)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def post(server: ServerProcess, path: str, body: Any, token: str | None = None) -> tuple[int, Any]:
    """token: None takes the server's."""

    async def run() -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        bearer = server.token if token is None else token
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {bearer}"}
        url = f"http://{server.address}{path}"
        async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=data) as got:
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
        return await asyncio.gather(
            *(engine.generate(GenerateRequest(PROMPT, one, id=f"q{one.seed}")) for one in params)
        )

    here = asyncio.run(all_of(LocalEngine(core)))
    there = with_engine(server, all_of)
    for one, other in zip(here, there, strict=True):
        assert one.output_ids == other.output_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert (one.finish_reason, one.matched) == (other.finish_reason, other.matched)


def test_a_stream_tells_the_same_tokens(server: ServerProcess) -> None:
    told: list[tuple[int, float]] = []
    params = SamplingParams(max_new_tokens=20, seed=4, stop_token_ids=())
    plain = with_engine(server, lambda engine: engine.generate(GenerateRequest(PROMPT, params)))
    streamed = with_engine(
        server,
        lambda engine: engine.generate(GenerateRequest(PROMPT, params, on_token=lambda *token: told.append(token))),
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
    assert with_engine(server, lambda engine: engine._request("GET", "/health_generate", None)) == {}


def test_streams(server: ServerProcess) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}, "stream": True}
    status, text = post(server, "/generate", body)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert status == 200 and events[-1] == "[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert [len(part["output_ids"]) for part in parts[:-1]] == [1, 2, 3, 4, 5, 6]
    assert parts[0]["meta_info"]["finish_reason"] is None
    assert len({part["meta_info"]["id"] for part in parts}) == 1, "with it, a client can abort the request"
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("by", ["stop_token_ids", "stop"])
@pytest.mark.parametrize("deltas", [False, True])
def test_only_the_last_event_of_a_stream_has_what_ends_it(server: ServerProcess, by: str, deltas: bool) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 9, "sampling_seed": 1, "ignore_eos": True}
    _, whole = post(server, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    ids, text = whole["output_ids"], whole["text"]
    if by == "stop":
        sampling["stop"] = next(text[-n:] for n in range(1, len(text)) if text.find(text[-n:]) == len(text) - n)
    else:
        end = next(token for token in reversed(ids) if ids.count(token) == 1)
        ids = ids[: ids.index(end) + 1]
        sampling = {"max_new_tokens": 9, "sampling_seed": 1, "stop_token_ids": [end]}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "clew": {"deltas": deltas}}
    _, stream = post(server, "/generate", body)
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line[6:7] == "{"]
    assert last["meta_info"]["finish_reason"]["type"] == "stop" and last["output_ids"] == ids
    sent = [token for part in (parts if deltas else parts[-1:]) for token in part["output_ids"]]
    assert len(parts) > 1 and sent == ids[:-1]
    assert [part["meta_info"]["completion_tokens"] for part in parts] == list(range(1, len(ids)))


def test_says_that_a_request_is_too_long(server: ServerProcess) -> None:
    with pytest.raises(RequestTooLong, match=r"refused /generate \(400\): the prompt has 256 tokens"):
        with_engine(server, lambda engine: engine.generate(GenerateRequest([7] * 256, SamplingParams())))


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
        ("/generate", {"input_ids": PROMPT, "lora_path": "x"}, "lora_path is 'x', and Clew serves only the run's own"),
        ("/generate", {"input_ids": [7] * 256}, "context"),
        ("/generate", {"input_ids": [5000]}, "5000"),
        ("/generate", {"text": "a" * 1_000_001}, "1000001 characters"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"temprature": 1}}, "Did you mean 'temperature'"),
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
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": 5000}}, "more than 4096 sequences"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": 10**9}}, "more than 4096 sequences"),
        ("/generate", {"input_ids": [PROMPT] * 3, "sampling_params": {"n": 2000}}, "more than 4096 sequences"),
        ("/generate", {"input_ids": [PROMPT] * 5000}, "5000 prompts"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": -1}}, "n is -1"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": ["a"] * 65}}, "more than 64 strings"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": "a" * 1025}}, "1024 characters"),
        ("/generate", {"input_ids": PROMPT, "clew": [1]}, "clew is list"),
        ("/pause_generation", {"lease_s": 86400}, "at most 600"),
        ("/pause_generation", {"lease_s": True}, "lease_s is True"),
        ("/update_weights_from_disk", {"model_path": "/tmp", "clew": [1]}, "clew is list"),
        ("/update_weights_from_disk", {"model_path": "/tmp", "clew": {"probe_ids": "ab"}}, "probe_ids"),
        ("/update_weights_from_disk", {"model_path": "/tmp", "clew": {"probe_logprob": []}}, "probe_logprob"),
        ("/update_weights_from_disk", {"model_path": "/tmp", "weight_version": []}, "weight_version"),
        ("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": {"top_p": 0}}, "top_p"),
        ("/generate", {"input_ids": PROMPT, "clew": "x"}, "clew is str, expected an object"),
        ("/generate", {"input_ids": PROMPT, "clew": {"continues": -1}}, "continues is -1"),
        ("/generate", {"input_ids": PROMPT, "rid": 5}, "rid is 5, expected a string"),
        ("/generate", {"input_ids": [PROMPT, PROMPT], "rid": ["a"]}, "rid is ['a'], expected a string, or a list of 2"),
        ("/generate", {"input_ids": PROMPT, "stream": "no"}, "stream is 'no', expected true or false"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1e30}}, "max_new_tokens is 1e+30"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": "5"}}, "max_new_tokens is '5'"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"top_k": 2.5}}, "top_k is 2.5, expected a whole"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"temperature": [1]}}, "temperature is [1]"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"stop": 7}}, "stop is 7, expected a string or a list"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": -2}}, "n is -2"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"json_schema": {}}}, "json_schema is {}, expected"),
        ("/generate", {"input_ids": PROMPT, "temperature": 0}, "Write it into sampling_params"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": 0}}, "n is 0, expected at least 1"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens is 0, expected"),
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


def serve_with_a_small_cache(config: Config, **options: Any) -> None:
    """`clew serve` with room for 128 tokens, which only a request that is submitted can exceed."""
    small = config.inference.model_copy(update={"cache_gib": 4e-5})
    serve(config.model_copy(update={"inference": small}), **options)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("small")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model")
    server = ServerProcess(folder, serve=serve_with_a_small_cache)
    yield server
    server.end()


@pytest.mark.parametrize("stream", [False, True])
def test_says_that_a_request_is_too_long_for_the_cache(small: ServerProcess, stream: bool) -> None:
    request = GenerateRequest([7] * 200, SamplingParams(), on_token=(lambda *_: None) if stream else None)
    with pytest.raises(RequestTooLong, match=r"refused /generate \(400\): a request of up to 256 tokens"):
        with_engine(small, lambda engine: engine.generate(request))


@pytest.mark.parametrize("stream", [False, True])
def test_if_one_prompt_of_a_batch_is_refused_nothing_goes_on_with_the_others(
    small: ServerProcess, stream: bool
) -> None:
    def waiting() -> int:
        return with_engine(small, lambda engine: engine._request("GET", "/model_info", None))["waiting"]

    assert post(small, "/pause_generation", {"lease_s": 60})[0] == 200
    body = {"input_ids": [PROMPT, [7] * 200, PROMPT], "sampling_params": {"max_new_tokens": 50}, "stream": stream}
    status, answer = post(small, "/generate", body)
    assert status == (200 if stream else 400) and "inference.cache_gib" in json.dumps(answer)
    assert waiting() == 0
    assert post(small, "/continue_generation", {})[0] == 200


def serve_broken(config: Config, **options: Any) -> None:
    def matched_stop(request: GenerateRequest, output_ids: list[int], tokenizer: Any) -> None:
        raise RuntimeError("no such kernel")

    embedded.matched_stop = matched_stop
    logging.basicConfig()  # as `clew serve` does: otherwise the traceback of the failed step is in no output
    serve(config, **options)


@pytest.mark.slow
def test_a_failed_step_ends_the_process_and_the_next_one_answers(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    server = ServerProcess(tmp_path, serve=serve_broken)

    async def scenario(engine: HTTPEngine) -> Completion:
        params = SamplingParams(max_new_tokens=5, stop=("no such text",), stop_token_ids=())
        request = asyncio.ensure_future(generate_through_aborts(engine, GenerateRequest(PROMPT, params)))
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
        request = asyncio.ensure_future(generate_through_aborts(engine, GenerateRequest(PROMPT, params, id="long")))
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


def test_weights_that_are_refused_leave_the_old_ones_serving(server: ServerProcess, folder: Path) -> None:
    params = SamplingParams(max_new_tokens=20, seed=3, stop_token_ids=())
    before = with_engine(server, lambda engine: engine.generate(GenerateRequest(PROMPT, params)))
    tiny_model(folder / "other", seed=1)
    halved = folder / "halved"
    halved.mkdir()
    content = (folder / "other" / "model.safetensors").read_bytes()
    (halved / "model.safetensors").write_bytes(content[: len(content) // 2])
    probed = WeightRef(version=7, path=str(folder / "other"), digest="", probe_ids=PROMPT, probe_logprob=1.0)
    for ref, words in [
        (replace(probed, path=str(folder / "nope")), "holds no"),
        (replace(probed, path=str(halved)), "halved"),
        (probed, "the trainer gave it 1.0"),
    ]:
        with pytest.raises(EngineError, match=words):
            with_engine(server, lambda engine, ref=ref: engine.load_weights(ref))
        assert with_engine(server, lambda engine: engine._request("GET", "/health", None)) == {}
        assert with_engine(server, lambda engine: engine.generate(GenerateRequest(PROMPT, params))) == before


def test_the_trainer_ends_with_the_servers_words_when_its_weights_are_refused(
    server: ServerProcess, folder: Path
) -> None:
    refused = pytest.raises(EngineError, match=r"refused /update_weights_from_disk \(400\).*no \*\.safetensors")
    with closing(InferenceServers(RunDirectory(folder / "runs" / "test" / "0"))) as servers, refused:
        servers.load(WeightRef(version=8, path=str(folder / "nope"), digest=""))


def test_weights_load_only_from_the_folders_that_are_allowed(server: ServerProcess, folder: Path) -> None:
    run = RunDirectory(folder / "runs" / "test" / "0")
    outside = folder.parent / f"{folder.name}-outside"
    tiny_model(outside, seed=1)
    linked, files = run.path / "linked", run.path / "files"
    linked.symlink_to(outside)
    files.mkdir()
    (files / "model.safetensors").symlink_to(outside / "model.safetensors")
    for path in (outside, linked, files, folder / ".." / outside.name, Path("/etc")):
        status, answer = post(server, "/update_weights_from_disk", {"model_path": str(path)})
        assert status == 400 and "clew serve --allow-weights" in answer["message"]
    assert post(server, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})[0] == 200


def test_only_its_user_reads_the_token(server: ServerProcess, folder: Path) -> None:
    assert stat.S_IMODE((folder / "runs" / "test" / "0" / "servers.json").stat().st_mode) == 0o600
    assert len(server.token) > 32 and server.token not in server.line
    for path in ("/pause_generation", "/release_memory_occupation", "/abort_request", "/update_weights_from_disk"):
        assert post(server, path, {}, token="None")[0] == 401
        assert asyncio.run(got(server, path)) == 405
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    assert post(server, "/generate", asked, token="None")[0] == 200


async def got(server: ServerProcess, path: str) -> int:
    """The status of a GET, with the token."""
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(headers=headers) as client, client.get(f"http://{server.address}{path}") as answer:
        return answer.status


def test_memory_that_is_released_without_a_pause_comes_back_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "model"
    tiny_tokenizer(path)
    tiny_model(path)

    async def scenario() -> None:
        engine = LocalEngine(build_engine(load_model(str(path), "float32", torch.device("cpu")), None))
        await engine.release_memory(0.2)
        assert len((await engine.generate(GenerateRequest(PROMPT, SamplingParams(max_new_tokens=3)))).output_ids) == 3
        assert not engine.released
        await engine.close()

    asyncio.run(scenario())


def test_a_signal_ends_it_whatever_hangs(tmp_path: Path) -> None:
    """Connections that sent nothing, half a request, or do not read; requests that wait in a pause, and that run."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    server = ServerProcess(tmp_path)
    host, port = server.address.split(":")
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    asked = b'{"input_ids": [7], "stream": true, "sampling_params": {"max_new_tokens": 250, "ignore_eos": true}}'
    clients = [socket.create_connection((host, int(port))) for _ in range(40)]
    for number, client in enumerate(clients):
        client.sendall([b"", head, head + b"999\r\n\r\n{", head + b"%d\r\n\r\n" % len(asked) + asked][number % 4])
    assert post(server, "/pause_generation", {"lease_s": 600})[0] == 200
    began = time.monotonic()
    server.end()
    assert server.process.returncode == 0 and time.monotonic() - began < 30
    for client in clients:
        client.close()


def test_a_pause_is_a_lease(server: ServerProcess) -> None:
    async def scenario(engine: HTTPEngine) -> float:
        await engine.pause(lease_s=0.5)
        began = time.monotonic()
        await engine.generate(GenerateRequest(PROMPT, SamplingParams(max_new_tokens=3)))
        return time.monotonic() - began

    assert 0.3 < with_engine(server, scenario) < 5


def test_memory_is_released_for_as_long_as_the_trainer_says_and_requests_go_on(
    server: ServerProcess, folder: Path
) -> None:
    params = SamplingParams(max_new_tokens=240, seed=11, stop_token_ids=())
    plain = with_engine(server, lambda engine: engine.generate(GenerateRequest(PROMPT, params)))

    def state() -> tuple[bool, bool]:
        info = with_engine(server, lambda engine: engine._request("GET", "/model_info", None))
        assert not (info["released"] and (info["running"] or info["cache_bytes"]))
        return info["released"], info["running"] > 0

    servers = InferenceServers(RunDirectory(folder / "runs" / "test" / "0"), lease_s=0.6)
    with ThreadPoolExecutor() as pool, closing(servers):
        request = pool.submit(
            with_engine, server, lambda engine: generate_through_aborts(engine, GenerateRequest(PROMPT, params))
        )
        while not state()[1]:
            pass
        with servers.released():
            until = time.monotonic() + 1.3  # two leases
            while time.monotonic() < until:
                assert state() == (True, False) and not request.done()
        found = request.result(20)
    assert found.output_ids == plain.output_ids and found.logprobs == pytest.approx(
        plain.logprobs, abs=1e-4
    )  # other batches round otherwise
    assert state() == (False, False)


def serve_once_published(config: Config) -> None:
    """`clew serve`, whose model takes until the file `published` is there to load."""
    quick = inference_server.load_engine

    def load_engine(*arguments: Any, **options: Any) -> LocalEngine:
        while not Path(config.root, "published").exists():
            time.sleep(0.01)
        return quick(*arguments, **options)

    inference_server.load_engine = load_engine
    serve(config)


def test_a_server_that_is_still_starting_is_no_cause_for_alarm(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer publishes while the server loads its model: that is how most runs begin."""
    config = load(write_config(folder, "starting"))
    run = RunDirectory(config.run_path)
    tiny_model(run.path / "weights" / "first", seed=3)
    with Forked(serve_once_published, config) as process, closing(InferenceServers(run)) as servers:
        while not run.servers():
            assert process.poll() is None
            time.sleep(0.01)
        ref = WeightRef(version=4, path=str(run.path / "weights" / "first"), digest="")
        run.announce_weights(ref)
        servers.load(ref)
        assert [server.ready for server in run.servers()] == [False]
        Path(config.root, "published").touch()
        address = process.stdout.readline().rstrip("\n").rpartition("=")[2]
        servers.load(replace(ref, version=5))

        async def version() -> int:
            engine = HTTPEngine(address)
            try:
                return await engine.version()
            finally:
                await engine.close()

        assert asyncio.run(version()) == 5
        assert caplog.text == ""
        process.terminate()


def test_released_memory_is_a_lease_too(server: ServerProcess) -> None:
    async def scenario(engine: HTTPEngine) -> float:
        await engine.release_memory(lease_s=0.5)
        began = time.monotonic()
        await engine.generate(GenerateRequest(PROMPT, SamplingParams(max_new_tokens=3)))
        return time.monotonic() - began

    assert 0.3 < with_engine(server, scenario) < 5


def test_a_client_that_leaves_aborts_its_request(server: ServerProcess) -> None:
    async def scenario(engine: HTTPEngine) -> None:
        params = SamplingParams(max_new_tokens=250, stop_token_ids=())
        requests = [asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, params))) for _ in range(20)]
        await asyncio.sleep(0.05)
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        began = time.monotonic()
        await engine.generate(GenerateRequest(PROMPT, SamplingParams(max_new_tokens=2)))
        assert time.monotonic() - began < 1
        info = await engine._request("GET", "/model_info", None)
        assert (info["running"], info["waiting"]) == (0, 0)

    with_engine(server, scenario)


def test_port_in_use(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    from clew.inference.serve import serve

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
    expected = with_engine(server, lambda engine: engine.generate(GenerateRequest(PROMPT, params)))

    async def scenario(engine: HTTPEngine) -> Completion:
        request = asyncio.ensure_future(generate_through_aborts(engine, GenerateRequest(PROMPT, params)))
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
        """Return the completion of a request that would wait for two minutes."""
        await engine.pause(lease_s=120)
        pending = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, SamplingParams())))
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


def test_beyond_loopback_all_of_it_needs_a_key_and_its_administration_a_token(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    server = ServerProcess(tmp_path, listen="0.0.0.0:0", api_key="sk-mine")
    server.address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
    try:
        [entry] = RunDirectory(tmp_path / "runs" / "test" / "0").servers()
        asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        status, said = post(server, "/generate", asked, token="any")
        assert status == 401 and "unknown API key" in said["error"]["message"]
        assert post(server, "/generate", asked, token="sk-mine")[0] == 200
        status, said = post(server, "/update_weights_from_disk", {"model_path": str(tmp_path / "model")}, "sk-mine")
        assert status == 401 and "Authorization: Bearer TOKEN" in said["error"]["message"]

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
        request = GenerateRequest(prompt, params, (red,))
        expected = await here.generate(request)
        whole = await there.generate(request)
        assert (whole.output_ids, whole.logprobs) == (expected.output_ids, expected.logprobs)
        streamed = await there.generate(replace(request, on_token=lambda token, _: told.append(token)))
        assert streamed == whole and told == whole.output_ids
        blue = await there.generate(replace(request, images=(picture("blue"),)))
        assert blue.logprobs != expected.logprobs
        with pytest.raises(ImageError, match=r"7 bytes cannot be read as an image"):
            await there.generate(GenerateRequest(prompt, params, images=(b"a photo",)))
        with pytest.raises(ImageError, match=r"the 0 images need it 0 times"):
            await there.generate(GenerateRequest(prompt, params))
        async with aiohttp.ClientSession() as client:
            body = {"input_ids": prompt, "image_data": "https://example.com/cat.png"}
            async with client.post(f"http://{server.address}/generate", json=body) as refused:
                assert refused.status == 400 and "Images are not fetched" in (await refused.json())["error"]["message"]
            body["image_data"] = base64.encodebytes(red).decode()  # in lines, as the command base64 writes it
            async with client.post(f"http://{server.address}/generate", json=body) as taken:
                assert taken.status == 200
        await there.close()
        await here.close()

    try:
        asyncio.run(compare())
    finally:
        server.end()


def test_the_text_ends_before_what_stopped_it(tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer(tmp_path)
    ids = tokenizer.encode("abc", add_special_tokens=False)
    end = tokenizer.eos_token_id

    def text(sampling: dict[str, Any], output_ids: list[int], matched: int | str) -> str:
        (sequence,) = parse_call({"input_ids": PROMPT, "sampling_params": sampling}, (end,)).sequences
        said = Completion(output_ids=output_ids, logprobs=[], versions=[], finish_reason="stop", matched=matched)
        return sequence.text_of(said, tokenizer)

    assert text({"stop": "b"}, ids, "b") == "a"
    assert text({"stop": "b", "no_stop_trim": True}, ids, "b") == "abc"
    assert text({"stop_token_ids": [ids[-1]]}, ids, ids[-1]) == "ab"
    assert text({"no_stop_trim": True}, [*ids, end], end) == "abc"
    kept = {"no_stop_trim": True, "skip_special_tokens": False}
    assert text(kept, [*ids, end], end) == f"abc{tokenizer.eos_token}"
