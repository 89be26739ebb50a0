"""Updates that send only LoRA adapters from Clew's trainer to a real vLLM, and how a failed update is detected."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clew.config import Config
from clew.devices import gpus
from clew.errors import EngineError
from clew.inference.protocol import EngineUnreachable, GenerateRequest, SamplingParams
from clew.inference.remote import RemoteCore, RemoteEngine
from clew.inference.server_process import ServerProcess
from clew.inference.vllm import EXTENSION, LOAD_ADAPTER, VLLMEngine
from clew.processes import free_port
from clew.record.weights import WeightRef
from clew.training.engine import TrainEngine
from clew.training.published_weights import write_weights
from clew.waits import Reporter
from tests.engines.test_vllm import PROMPT, START_S, logprobs_of, make_model, until

PYTHON = os.environ.get("CLEW_VLLM_PYTHON")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(PYTHON is None, reason="CLEW_VLLM_PYTHON names no Python with vLLM; see make test-engines"),
    pytest.mark.skipif(bool(gpus()), reason="on a GPU, vLLM takes no adapters in float32"),
]


FORGETFUL = """
from clew.inference import vllm_worker

class Extension(vllm_worker.Extension):
    def forget(self):
        for tensor in self.model_runner.model.parameters():
            tensor.data.zero_()
"""
"""Worker extension that can zero all weights. It stands in for sleep level 2 and waking up, which need a GPU."""


class Served:
    """A vLLM server, and a trainer whose adapters it serves."""

    def __init__(self, folder: Path) -> None:
        make_model(folder / "model")
        self.folder = folder
        self.config = Config.model_validate(
            {
                "experiment": "engines",
                "root": str(folder / "runs"),
                "model": {"path": str(folder / "model"), "device": "cpu"},
                "data": {"path": "none"},
                "training": {"lora_rank": 3, "lora_alpha": 5},
                "inference": {
                    "backend": "vllm",
                    "python": PYTHON,
                    "max_running": 8,
                    "cache_gib": 0.25,
                    "args": {"enforce-eager": True, "gpu-memory-utilization": 0.2},
                },
            }
        )
        self.address = f"127.0.0.1:{free_port()}"
        launch = VLLMEngine.launch(self.config, int(self.address.rpartition(":")[2]), folder / "engine")
        (folder / "engine" / "forgetful.py").write_text(FORGETFUL)  # this folder is on the server's path
        launch = replace(launch, command=["forgetful.Extension" if w == EXTENSION else w for w in launch.command])
        self.process = ServerProcess(launch, folder / "log")
        self.trainer = TrainEngine(self.config)

    def ask(self, scenario: Callable[[VLLMEngine], Awaitable[Any]], kind: type[VLLMEngine] = VLLMEngine) -> Any:
        async def run() -> Any:
            engine = kind.client(self.config, self.address)
            try:
                await engine.prepare()
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(run())

    def ready(self) -> bool:
        assert self.process.ended() is None, self.process.ended()

        async def look() -> bool:
            engine = VLLMEngine.client(self.config, self.address)
            try:
                await engine.ready()
                return True
            except EngineUnreachable:
                return False
            finally:
                await engine.close()

        return asyncio.run(look())

    def published(self, version: int) -> WeightRef:
        """Other adapters than before, as the trainer publishes them."""
        torch.manual_seed(version)
        with torch.no_grad():
            for _, tensor in self.trainer.policy.parameters(trained=True):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
        self.trainer._digests = None
        return write_weights(self.trainer, self.folder / f"version-{version}", version)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("adapters"))
    try:
        until(served.ready, START_S)
        yield served
    finally:
        served.process.end()


async def load(engine: VLLMEngine, ref: WeightRef) -> None:
    await engine.pause()
    try:
        await engine.load(ref)
        await engine.verify(ref)
    finally:
        await engine.resume()


def test_what_is_served_is_the_sum_although_only_adapters_travel(served: Served) -> None:
    first, second = served.published(1), served.published(2)
    files = sorted(path.name for path in Path(first.path).iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    size = (Path(first.path) / "adapter_model.safetensors").stat().st_size
    whole = (served.folder / "model" / "model.safetensors").stat().st_size
    print(f"adapters {size} bytes, whole model {whole} bytes")
    greedy = GenerateRequest(PROMPT, SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=()))

    async def scenario(engine: VLLMEngine) -> None:
        await load(engine, first)
        await engine.generate(greedy)  # its keys and values must not be used under the second
        await load(engine, second)
        shutil.rmtree(second.path)  # what is loaded is loaded: no step reads it again
        completion = await engine.generate(greedy)
        ids = PROMPT + completion.output_ids
        expected = logprobs_of(served.trainer.policy.model, ids, 1.0)[len(PROMPT) - 1 :]
        own = expected[range(24), completion.output_ids]
        assert (own - torch.tensor(completion.logprobs)).abs().max() < 1e-5
        assert abs(await engine.score(second.probe_ids) - second.probe_logprob) < 1e-5
        assert [span["version"] for span in completion.sampled_by] == ["2"]

    served.ask(scenario)


class Swallows(VLLMEngine):
    """Client that never sends the adapters, as if the server answered 200 and loaded nothing."""

    async def _post(self, path: str, body: dict[str, Any], *take: Any) -> Any:
        return {} if path == LOAD_ADAPTER else await super()._post(path, body, *take)


def test_adapters_that_were_never_loaded(served: Served) -> None:
    served.ask(lambda engine: load(engine, served.published(3)))
    with pytest.raises(EngineError, match=r"did not load version 4 .*: holds other values.*they must be loaded"):
        served.ask(lambda engine: load(engine, served.published(4)), Swallows)


def test_adapters_that_were_loaded_by_half(served: Served) -> None:
    """The file lacks the adapter of one projection while the server loads it, and is whole again for the check."""
    ref = served.published(5)
    file = Path(ref.path) / "adapter_model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    whole = load_file(file)
    half = {name: tensor for name, tensor in whole.items() if "layers.1.self_attn.k_proj" not in name}

    class Halves(VLLMEngine):
        async def _post(self, path: str, body: dict[str, Any], *take: Any) -> Any:
            if path == LOAD_ADAPTER:
                save_file(half, file, metadata=metadata)
            answer = await super()._post(path, body, *take)
            if path == LOAD_ADAPTER:
                save_file(whole, file, metadata=metadata)
            return answer

    with pytest.raises(EngineError, match=r"2 tensors differ: \S*layers.1.self_attn.k_proj.lora_A.weight: holds other"):
        served.ask(lambda engine: load(engine, ref), Halves)
    served.ask(lambda engine: load(engine, ref))


def test_a_folder_that_lacks_its_file_is_refused(served: Served) -> None:
    ref = served.published(6)
    (Path(ref.path) / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"no safetensors file. It was not sent"):
        served.ask(lambda engine: load(engine, ref))


def test_a_server_that_slept_and_woke_without_its_weights(served: Served, tmp_path: Path) -> None:
    """Sleep level 2 discards the model, and an update brings only adapters: the probe shows what is missing.

    From here on the server has no weights. Only tests that replace them, or need none, may follow.
    """
    engine = RemoteEngine(served.config, RemoteCore(served.config), VLLMEngine.client(served.config, served.address))

    async def scenario() -> None:
        try:
            await engine.start(Reporter(tmp_path / "status", "server"))
            await engine.load_weights(served.published(8))
            await engine._backend._post("/collective_rpc", {"method": "forget"})
            with pytest.raises(EngineError, match=r"gives the probe the logprob .* sleep"):
                await engine.load_weights(served.published(9))
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), START_S))


def test_adapters_on_other_weights_than_the_model_of_the_server(served: Served) -> None:
    """The last test on this server, whose weights it replaces."""
    whole = shutil.copytree(served.folder / "model", served.folder / "replaced")

    async def replace(engine: VLLMEngine) -> None:
        await engine._post("/collective_rpc", {"method": "clew_load", "args": [str(whole)]})

    served.ask(replace)
    with pytest.raises(EngineError, match=r"0 of .* elements are held.*on the weights that the server began with"):
        served.ask(lambda engine: load(engine, served.published(7)))
