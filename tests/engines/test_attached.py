"""A real vLLM that somebody else has started, and starts again while Clew is attached to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clew.config import Config
from clew.inference.protocol import EngineUnreachable, GenerateRequest, SamplingParams
from clew.inference.remote import RemoteCore, RemoteEngine
from clew.inference.vllm import VLLMEngine
from clew.processes import free_port
from clew.waits import Reporter
from tests.engines.test_vllm import START_S, exact, make_model, published, write_config

PYTHON = os.environ.get("CLEW_VLLM_PYTHON")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(PYTHON is None, reason="CLEW_VLLM_PYTHON names no Python with vLLM; see make test-engines"),
]
ASKED = GenerateRequest([7, 8, 9, 10, 11], SamplingParams(max_new_tokens=16, stop_token_ids=()))


@contextmanager
def started(config: Config, port: int, folder: Path) -> Iterator[None]:
    """Start a vLLM whose answers do not name its weights, and kill it after the block."""
    launch = VLLMEngine.launch(config, port, folder / "scratch")
    environment = {**os.environ, **launch.environment}
    with (folder / "vllm.log").open("ab") as log:
        process = subprocess.Popen(launch.command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_is_restarted_quickly_does_not_pass_for_the_one_before(tmp_path: Path) -> None:
    """The new process has the weights of its start, and answers before the old one would count as frozen."""
    make_model(tmp_path / "model")
    model = make_model(tmp_path / "newer", seed=5)
    ref = published(tmp_path / "version-5", model, 5)
    file = write_config(tmp_path, "attached")
    config = Config.model_validate_json(file.read_text())
    config.inference.args["enable-scale-out"] = False
    port = free_port()
    client = VLLMEngine.client(config, f"127.0.0.1:{port}")
    engine = RemoteEngine(config, RemoteCore(config), client, frozen_s=START_S)

    async def scenario() -> None:
        reporter = Reporter(tmp_path / "status", "server")
        try:
            with started(config, port, tmp_path):
                await engine.start(reporter)
                await engine.load_weights(ref)
                completion = await engine.generate(ASKED)
                assert completion.versions == [5] * 16 and not completion.sampled_by
                assert exact(completion, model, 1.0) < 1e-5
            with started(config, port, tmp_path):
                while await engine._silence() and engine.failure is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                with pytest.raises(EngineUnreachable, match="is another process than before, and has lost version 5"):
                    await engine.generate(ASKED)
                await engine.restart(reporter)
                await engine.load_weights(ref)
                assert exact(await engine.generate(ASKED), model, 1.0) < 1e-5
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 2 * START_S))
