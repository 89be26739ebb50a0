"""A real vLLM behind `clew serve`: exact tokens and logprobs, updates that are checked, and a training run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clew.errors import EngineError
from clew.inference.client import HTTPEngine
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest, OnToken, SamplingParams
from clew.inference.remote import RemoteCore, RemoteEngine
from clew.inference.retries import generate_through_aborts
from clew.inference.vllm import VLLMEngine
from clew.loop.inference_servers import InferenceServers
from clew.models.tensor_digest import hex_digests
from clew.record.run import RunDirectory
from clew.record.weights import DIGESTS_KEY, WeightRef
from clew.waits import Reporter
from tests.engines.updating import config_of, update_in_flight
from tests.models import tiny_model, tiny_tokenizer

PYTHON = os.environ.get("CLEW_VLLM_PYTHON")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(PYTHON is None, reason="CLEW_VLLM_PYTHON names no Python with vLLM; see make test-engines"),
]

PROMPT = [7, 8, 9, 10, 11]
START_S = 400.0
"""Time limit for a server's start, on a slow and busy machine; it takes 20 s on an idle one."""


LONG = 900
"""Tokens of a request that takes some seconds."""


def make_model(folder: Path, seed: int = 0) -> Any:
    """vLLM's CPU attention takes heads of 32 and more."""
    more = {"num_attention_heads": 2, "num_key_value_heads": 1}
    tiny_tokenizer(folder)
    return tiny_model(folder, hidden=64, seed=seed, scale=0.1, more=more, context=1024)


def write_config(folder: Path, trial: str, **more: Any) -> Path:
    sections: dict[str, Any] = {
        "experiment": "engines",
        "trial": trial,
        "root": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl")},
        "inference": {
            "backend": "vllm",
            "python": PYTHON,
            "max_running": 32,
            "cache_gib": 0.25,
            # On a CPU, vLLM ends when it fills the cache of a seeded request in parts.
            "args": {"enforce-eager": True, "gpu-memory-utilization": 0.2, "no-enable-chunked-prefill": True},
        },
        "launch": {"threads": 1, "restarts": 9},
        **more,
    }
    path = folder / f"{trial}.yaml"
    path.write_text(json.dumps(sections))
    return path


class Serving:
    """`clew serve`, as typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = write_config(folder, "serve")
        self.run = RunDirectory(folder / "runs" / "engines" / "serve")
        self.log = folder / "serve.log"
        command = [sys.executable, "-P", "-m", "clew", "serve", str(config), "--allow-weights", str(folder)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        until(lambda: "launched at" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def ask(self, scenario: Callable[[HTTPEngine], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            server = self.run.servers()[0]
            engine = HTTPEngine(server.address, server.token)
            try:
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(run())

    def generate(self, **params: Any) -> Completion:
        request = GenerateRequest(PROMPT, SamplingParams(**params))
        return self.ask(lambda engine: engine.generate(request))

    def vllm(self) -> psutil.Process:
        """The API server."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "api_server" in " ".join(child.cmdline()))


def until(condition: Callable[[], Any], seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("vllm")
    make_model(folder / "model")
    serving = Serving(folder)
    yield serving
    children = psutil.Process(serving.process.pid).children(recursive=True)
    serving.process.send_signal(signal.SIGTERM)
    serving.process.wait(60)
    assert not psutil.wait_procs(children, timeout=20)[1], "what vLLM has started ends with it"


def published(folder: Path, model: Any, version: int) -> WeightRef:
    """Weights as the trainer publishes them, with the digests and a probe by transformers."""
    folder.mkdir()
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    digests = hex_digests(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", DIGESTS_KEY: json.dumps(digests)})
    probe = [3, 50, 20, 7, 30]
    logprob = logprobs_of(model, probe, 1.0)[-1, probe[-1]]
    return WeightRef(version=version, path=str(folder), digest="", probe_ids=probe, probe_logprob=float(logprob))


def long_requests(engine: HTTPEngine, on_token: OnToken | None = None) -> list[asyncio.Task[Completion]]:
    """Return eight requests that take some seconds; seed and last token of the prompt are their number."""
    tasks = []
    for number in range(8):
        params = SamplingParams(max_new_tokens=LONG, stop_token_ids=(), seed=number)
        request = GenerateRequest([*PROMPT, number], params, on_token=on_token)
        tasks.append(asyncio.create_task(generate_through_aborts(engine, request)))
    return tasks


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int], temperature: float) -> torch.Tensor:
    """The logprobs [T - 1, V] of the tokens after the first."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float() / temperature, -1)


def exact(completion: Completion, model: Any, temperature: float, prompt: list[int] = PROMPT) -> float:
    """The largest difference between the completion's logprobs and transformers'."""
    ids = prompt + completion.output_ids
    expected = logprobs_of(model, ids, temperature)[len(prompt) - 1 :]
    own = expected[range(len(completion.output_ids)), completion.output_ids]
    return float((own - torch.tensor(completion.logprobs)).abs().max())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(serving: Serving, temperature: float) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(serving.folder / "model")
    completion = serving.generate(max_new_tokens=32, temperature=temperature, stop_token_ids=(), seed=3)
    assert len(completion.output_ids) == 32 and completion.finish_reason == "length"
    assert exact(completion, model, temperature) < 1e-5


def test_the_stop_string_is_part_of_the_output(serving: Serving) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(serving.folder / "model")
    whole = serving.generate(max_new_tokens=32, stop_token_ids=(), seed=5)
    stop = tokenizer.decode(whole.output_ids[3])
    completion = serving.generate(max_new_tokens=32, stop_token_ids=(), seed=5, stop=(stop,))
    assert completion.finish_reason == "stop" and completion.matched == stop
    first = next(i for i, token in enumerate(whole.output_ids) if stop in tokenizer.decode(token))
    assert completion.output_ids == whole.output_ids[: first + 1]


def test_what_the_debugging_script_of_the_field_sends(serving: Serving) -> None:
    """input_ids and sampling_params to /generate, without a token."""
    import urllib.request

    address = serving.run.servers()[0].address
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "return_logprob": True}
    request = urllib.request.Request(
        f"http://{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    assert len(answer["output_ids"]) == 4 == len(answer["meta_info"]["output_token_logprobs"])


def test_an_update_interrupts_and_the_rest_is_made_by_the_new_weights(serving: Serving) -> None:
    """The requests are streamed: what waits for the update to end is labelled with the new version."""
    models = [transformers.AutoModelForCausalLM.from_pretrained(serving.folder / "model")]
    mixed = 0
    while not mixed:  # vLLM may pass no token on until all are made, where it has two cores
        assert len(models) < 7, "no request was in flight when the weights came"
        version = len(models)
        models.append(make_model(serving.folder / f"model-{version}", seed=version))
        ref = published(serving.folder / f"version-{version}", models[-1], version)

        async def scenario(engine: HTTPEngine, ref: WeightRef = ref) -> list[Completion]:
            came = asyncio.Event()
            running = long_requests(engine, lambda token, logprob: came.set())
            await asyncio.wait_for(came.wait(), START_S)
            await engine.load_weights(ref)
            assert await engine.version() == ref.version
            return await asyncio.gather(*running)

        for number, completion in enumerate(serving.ask(scenario)):
            versions, ids = completion.versions, [*PROMPT, number, *completion.output_ids]
            assert len(completion.output_ids) == LONG and versions == sorted(versions)
            assert set(versions) <= {version - 1, version}
            change = versions.count(version - 1)
            mixed += 0 < change < LONG
            for model, part in ((models[-2], slice(0, change)), (models[-1], slice(change, LONG))):
                own = logprobs_of(model, ids, 1.0)[len(PROMPT) :][range(LONG), completion.output_ids][part]
                assert torch.allclose(own, torch.tensor(completion.logprobs[part]), rtol=0, atol=1e-4)


def test_another_file_than_the_trainer_wrote_stops_the_update_and_names_the_tensor(serving: Serving) -> None:
    model = make_model(serving.folder / "again", seed=2)
    ref = published(serving.folder / "version-8", model, 8)
    file = serving.folder / "version-8" / "model.safetensors"
    tensors, digests = load_file(file), json.loads(_metadata(file)[DIGESTS_KEY])
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][0, 0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt", DIGESTS_KEY: json.dumps(digests)})
    with pytest.raises(EngineError, match=r"1 tensor differs: model.layers.1.self_attn.k_proj.weight: holds other"):
        serving.ask(lambda engine: engine.load_weights(ref))
    with pytest.raises(EngineUnreachable, match="loading version 8"):
        serving.generate(max_new_tokens=4)
    good = published(serving.folder / "version-9", model, 9)
    serving.ask(lambda engine: engine.load_weights(good))
    completion = serving.generate(max_new_tokens=16, stop_token_ids=())
    assert completion.versions == [9] * 16 and exact(completion, model, 1.0) < 1e-5


def test_weights_that_are_refused_before_they_are_sent_leave_the_old_ones_serving(serving: Serving) -> None:
    (serving.folder / "empty").mkdir()
    ref = WeightRef(version=10, path=str(serving.folder / "empty"), digest="")
    with pytest.raises(EngineError, match="It was not sent"):
        serving.ask(lambda engine: engine.load_weights(ref))
    assert serving.generate(max_new_tokens=4, stop_token_ids=()).versions == [9] * 4


def test_weights_that_are_held_but_computed_otherwise_fail_the_probe(serving: Serving) -> None:
    model = make_model(serving.folder / "probed", seed=3)
    ref = published(serving.folder / "version-10", model, 10)
    wrong = WeightRef(**{**ref.__dict__, "probe_logprob": ref.probe_logprob - 0.1})
    with pytest.raises(EngineError, match=r"it gives the probe the logprob .* \(for example a packed copy of lm_head"):
        serving.ask(lambda engine: engine.load_weights(wrong))
    serving.ask(lambda engine: engine.load_weights(ref))


def test_a_pause_holds_requests_until_its_lease_ends(serving: Serving) -> None:
    async def scenario(engine: HTTPEngine) -> float:
        await engine.pause(lease_s=2.0)
        began = time.monotonic()
        await engine.generate(GenerateRequest(PROMPT, SamplingParams(max_new_tokens=2)))
        return time.monotonic() - began

    assert serving.ask(scenario) > 1.0


def test_a_pause_by_somebody_else_does_not_hold_requests_back(serving: Serving) -> None:
    words = serving.vllm().cmdline()
    address = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/pause?mode=abort", method="POST"), timeout=30)

    async def scenario(engine: HTTPEngine) -> Completion:
        request = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=8, stop_token_ids=()))
        return await asyncio.wait_for(engine.generate(request), 60)

    assert len(serving.ask(scenario).output_ids) == 8
    assert "is paused, and no update needs that: resuming it" in serving.log.read_text()


@pytest.mark.parametrize("fault", ["the server is killed", "its engine process is stopped"])
def test_a_server_that_dies_or_stands_still_is_started_again_and_no_request_is_lost(
    serving: Serving, fault: str
) -> None:
    """The server has version 0 again afterwards."""

    vllm = serving.vllm()
    computes = next(child for child in vllm.children(recursive=True) if "EngineCore" in child.name())

    async def scenario(engine: HTTPEngine) -> list[Completion]:
        running = [each for _ in range(4) for each in long_requests(engine)]  # eight may end in a second
        await asyncio.sleep(0.3)
        if fault == "the server is killed":
            vllm.kill()
        else:  # its HTTP side still answers /health
            computes.suspend()
        return await asyncio.wait_for(asyncio.gather(*running), START_S)

    assert {len(completion.output_ids) for completion in serving.ask(scenario)} == {LONG}
    said = "killed by signal 9" if fault == "the server is killed" else "VLLM::EngineCor"
    assert said in serving.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_in_mid_update_is_named_and_returns_with_the_newest_weights(
    serving: Serving, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    """The process that computes is stopped, and the update hangs; then it is killed, or the whole server stopped."""
    model = make_model(serving.folder / f"interrupted-{number}", seed=10 + number)
    ref = published(serving.folder / f"version-{11 + number}", model, 11 + number)
    until(lambda: serving.run.servers() and serving.run.servers()[0].ready)
    address = serving.run.servers()[0].address
    computes = [child for child in serving.vllm().children(recursive=True) if "EngineCore" in child.name()]
    assert len(computes) == 1
    computes[0].suspend()
    serving.run.announce_weights(ref)
    with closing(InferenceServers(serving.run)) as control, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        updating = pool.submit(control.load, ref)
        time.sleep(2)
        assert not updating.done()
        if number == signal.SIGKILL:
            computes[0].kill()
        else:
            serving.vllm().suspend()
        assert updating.result(100) == {}
        print(f"{number.name}: the update ended after {time.monotonic() - began:.1f} s")
    assert f"server server ({address}) did not load version {ref.version}, and is taken out" in caplog.text
    until(lambda: serving.run.servers() and serving.run.servers()[0].ready)
    until(lambda: serving.ask(lambda engine: engine.answers()) and _version(serving) == ref.version)
    completion = serving.generate(max_new_tokens=16, stop_token_ids=())
    assert completion.versions == [ref.version] * 16 and exact(completion, model, 1.0) < 1e-5


@pytest.mark.parametrize("mode", ["restart", "wait"])
def test_generations_in_flight_restart_or_are_waited_for(serving: Serving, mode: str) -> None:
    """One of the last tests on this server: it loads weights of which `clew serve` in front of it knows nothing."""
    refs = [
        published(
            serving.folder / f"{mode}-{version}", make_model(serving.folder / f"{mode}{version}", version), version
        )
        for version in (20, 21)
    ]
    address = serving.vllm().cmdline()
    port = address[address.index("--port") + 1]
    first, second = update_in_flight(
        serving.folder, serving.folder / "model", "vllm", f"127.0.0.1:{port}", mode, refs, LONG
    )
    assert first.versions == [20 if mode == "wait" else 21] * LONG
    assert second.versions == [21] * LONG
    for completion in (first, second):
        folder = serving.folder / f"{mode}{completion.versions[0]}"
        assert exact(completion, transformers.AutoModelForCausalLM.from_pretrained(folder), 1.0) < 1e-4


class Unforgetting(VLLMEngine):
    """A client of a server that says that it forgot the keys and values of the version before, and did not."""

    async def _request(self, method: str, path: str, body: bytes | None, take: Any = None) -> Any:
        if path.startswith(("/pause", "/reset_prefix_cache")):
            return {"success": True}
        return await super()._request(method, path, body, take)


def test_keys_and_values_that_were_not_forgotten_are_not_used(serving: Serving) -> None:
    """Another that loads weights of which `clew serve` knows nothing. The logprobs were wrong by 3 nats."""
    address = serving.vllm().cmdline()
    port = address[address.index("--port") + 1]
    config = config_of(serving.folder, serving.folder / "model", "vllm")
    prompt = [6 + 7 * place % 90 for place in range(300)]  # a block of the cache has 128 tokens on a CPU

    async def scenario() -> None:
        engine = RemoteEngine(config, RemoteCore(config), Unforgetting.client(config, f"127.0.0.1:{port}"))
        try:
            await engine.start(Reporter(serving.folder / "status", "unforgetting"))
            for version in (30, 31):
                model = make_model(serving.folder / f"kept{version}", version)
                await engine.load_weights(published(serving.folder / f"kept-{version}", model, version))
                for _ in range(2):  # the second is generated from the cache of the first
                    params = SamplingParams(max_new_tokens=16, stop_token_ids=())
                    assert exact(await engine.generate(GenerateRequest(prompt, params)), model, 1.0, prompt) < 1e-4
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), START_S))


def _version(serving: Serving) -> int:
    try:
        return serving.ask(lambda engine: engine.version())
    except EngineUnreachable:
        return -1


def _metadata(file: Path) -> dict[str, str]:
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
