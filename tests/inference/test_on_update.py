"""inference.on_update: what happens to generations in flight when new weights come."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from clew.config import load
from clew.errors import ConfigError
from clew.inference.app import Application
from clew.inference.client import HTTPEngine
from clew.inference.embedded import build_engine
from clew.inference.local import LocalEngine
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.inference.retries import generate_through_aborts
from clew.inference.serve import serve
from clew.loop.inference_servers import InferenceServers
from clew.models.loading import load_model, load_tokenizer
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef
from tests.forked import Forked
from tests.inference.test_server import write_config
from tests.models import tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]
TOKENS = 40
RUNNING = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 0), ("new", 1)):
        tiny_tokenizer(folder / name)
        tiny_model(folder / name, seed=seed)
    return folder


def make_engine(folder: Path, **options: Any) -> LocalEngine:
    model = load_model(str(folder), "float32", torch.device("cpu"))
    return LocalEngine(build_engine(model, load_tokenizer(str(folder)), max_running=RUNNING), **options)


def request(number: int) -> GenerateRequest:
    return GenerateRequest(
        [*PROMPT, 10 + number], SamplingParams(max_new_tokens=TOKENS, seed=number, stop_token_ids=())
    )


async def made(folder: Path, count: int) -> list[Completion]:
    engine = make_engine(folder)
    completions = await asyncio.gather(*(engine.generate(request(number)) for number in range(count)))
    await engine.close()
    return list(completions)


def logprobs(folder: Path, prompt: list[int], output_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    model = load_model(str(folder), "float32", torch.device("cpu"))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output_ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[range(len(output_ids)), output_ids]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_those_of_transformers_at_any_temperature(tmp_path: Path, temperature: float) -> None:
    """Compare the embedded engine, as tests/engines does vLLM and SGLang."""
    tiny_tokenizer(tmp_path)
    tiny_model(tmp_path, scale=0.2)
    params = SamplingParams(max_new_tokens=200, stop_token_ids=(), temperature=temperature, seed=3)

    async def generate() -> Completion:
        engine = make_engine(tmp_path)
        completion = await engine.generate(GenerateRequest(request(0).input_ids, params))
        await engine.close()
        return completion

    completion = asyncio.run(generate())
    expected = logprobs(tmp_path, request(0).input_ids, completion.output_ids, temperature)
    difference = (expected - torch.tensor(completion.logprobs)).abs().max()
    print(f"|Δlogprob| {difference:.1e} at temperature {temperature}")
    assert len(completion.output_ids) == 200 and difference < 1e-5


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("mode", ["continue", "restart", "wait"])
def test_generations_in_flight_and_in_the_queue_and_those_that_come_during_an_update(
    folder: Path, mode: str, threaded: bool
) -> None:
    """Three are being generated, one is in the queue, and one comes while the update waits."""

    async def scenario() -> list[Completion]:
        engine = make_engine(folder / "model", threaded=threaded, waits=mode == "wait")
        ask = [generate_through_aborts(engine, request(number), restart=mode == "restart") for number in range(5)]
        work = [asyncio.ensure_future(each) for each in ask[:4]]
        while engine.core.running() < RUNNING:  # noqa: ASYNC110 - the engine steps meanwhile
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        update = asyncio.ensure_future(engine.load_weights(WeightRef(version=5, path=str(folder / "new"), digest="")))
        await asyncio.sleep(0)
        work.append(asyncio.ensure_future(ask[4]))
        await update
        completions = await asyncio.gather(*work)
        await engine.close()
        return completions

    completions = asyncio.run(scenario())
    old, new = asyncio.run(made(folder / "model", 5)), asyncio.run(made(folder / "new", 5))
    for number, completion in enumerate(completions):
        versions = completion.versions
        assert len(completion.output_ids) == len(completion.logprobs) == len(versions) == TOKENS
        count = versions.count(0)
        assert versions == [0] * count + [5] * (TOKENS - count)
        for name, part in (("model", slice(0, count)), ("new", slice(count, TOKENS))):
            expected = logprobs(folder / name, request(number).input_ids, completion.output_ids)[part]
            if len(expected):
                assert (expected - torch.tensor(completion.logprobs[part])).abs().max() < 1e-4, "its own version's"
        if number >= RUNNING or mode == "restart":
            assert count == 0 and completion.output_ids == new[number].output_ids
        elif mode == "wait":
            assert count == TOKENS and completion.output_ids == old[number].output_ids
        else:
            assert 0 < count < TOKENS and completion.output_ids[:count] == old[number].output_ids[:count]


def test_a_server_that_waits_is_given_the_time(folder: Path, tmp_path: Path) -> None:
    """The request in flight is by the old weights to its end, and the next ones by the new weights."""
    (tmp_path / "model").symlink_to(folder / "model")
    path = write_config(tmp_path, "waits")
    sections = json.loads(path.read_text())
    sections["inference"]["on_update"] = "wait"
    path.write_text(json.dumps(sections))
    config = load(path)
    run = RunDirectory(config.run_path)
    process = Forked(serve, config, output=tmp_path / "log")
    try:
        while not [server for server in run.servers() if server.ready]:
            assert process.poll() is None, (tmp_path / "log").read_text()
        address = run.servers()[0].address
        tiny_model(run.path / "weights" / "version-000005", seed=1)
        ref = WeightRef(version=5, path=str(run.path / "weights" / "version-000005"), digest="")

        async def ask(tokens: int, begun: asyncio.Event) -> Completion:
            client = HTTPEngine(address)
            try:
                params = SamplingParams(max_new_tokens=tokens, stop_token_ids=())
                asked = GenerateRequest(PROMPT, params, on_token=lambda *_: begun.set())
                return await generate_through_aborts(client, asked)
            finally:
                await client.close()

        def update() -> None:
            with closing(InferenceServers(run, patient=True)) as control:
                control.load(ref)

        async def scenario() -> list[Completion]:
            begun = asyncio.Event()
            long = asyncio.ensure_future(ask(240, begun))
            await begun.wait()
            updating = asyncio.ensure_future(asyncio.to_thread(update))
            short = []
            while not updating.done():  # one of them comes while the update waits, and its stream begins after it
                short.append(await ask(5, begun))
            return [await long, *short, await ask(5, begun)]

        long, *short, next_one = asyncio.run(asyncio.wait_for(scenario(), 60))
        assert long.versions == [0] * 240 and next_one.versions == [5] * 5
        for completion in short:
            name = "model" if completion.versions == [0] * 5 else "new"
            expected = logprobs(folder / name, PROMPT, completion.output_ids)
            assert (expected - torch.tensor(completion.logprobs)).abs().max() < 1e-4, "its own version's"
    finally:
        process.close()


def test_an_update_that_waits_while_the_server_ends_is_answered_as_by_a_dying_one(folder: Path) -> None:
    """uvicorn cancels what is not answered when its time to end is over."""

    async def scenario() -> dict[str, Any]:
        engine = make_engine(folder / "model", waits=True)
        params = SamplingParams(max_new_tokens=240, stop_token_ids=())
        running = asyncio.ensure_future(engine.generate(GenerateRequest(PROMPT, params)))
        while not engine.core.running():  # noqa: ASYNC110 - the engine steps meanwhile
            await asyncio.sleep(0)
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"model_path": str(folder / "new")}).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        path = "/update_weights_from_disk"
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        app = Application(engine, str(folder / "model"), weights_below=[folder])
        updating = asyncio.ensure_future(app(scope, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not updating.done() and not running.done()
        updating.cancel()
        await updating
        await running
        await engine.close()
        return {"status": sent[0]["status"], **json.loads(sent[1]["body"])}

    answer = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert answer["status"] == 503 and "the server is ending" in answer["error"]["message"]


def test_waiting_and_a_shared_device_contradict_one_another(tmp_path: Path) -> None:
    path = write_config(tmp_path, "both")
    with pytest.raises(ConfigError, match=r"launch.colocate interrupts generation.*Use continue or restart"):
        load(path, ["inference.on_update=wait", "launch.colocate=true"])
