"""A generation on a real engine that new weights interrupt, behind the engine of `clew serve`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from clew.config import Config
from clew.inference.detect_server import BACKENDS
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from clew.inference.remote import RemoteCore, RemoteEngine
from clew.inference.retries import generate_through_aborts
from clew.record.weights import WeightRef
from clew.waits import Reporter

PROMPT = [7, 8, 9, 10, 11]


def config_of(folder: Path, model: Path, backend: str, mode: str = "continue") -> Config:
    return Config.model_validate(
        {
            "experiment": "updates",
            "root": str(folder / "runs"),
            "model": {"path": str(model)},
            "data": {"path": "none"},
            "inference": {"backend": backend, "on_update": mode},
        }
    )


def update_in_flight(
    folder: Path, model: Path, backend: str, address: str, mode: str, refs: list[WeightRef], tokens: int
) -> list[Completion]:
    """Return a completion that was in flight when the second weights came, and one that came during the update."""
    config = config_of(folder, model, backend, mode)

    async def scenario() -> list[Completion]:
        core = RemoteCore(config)
        client = BACKENDS[backend].client(config, address)
        engine = RemoteEngine(config, core, client)

        def ask(seed: int) -> Any:
            params = SamplingParams(max_new_tokens=tokens, stop_token_ids=(), seed=seed)
            asked = GenerateRequest(PROMPT, params, id=f"g{seed:06d}.e0.i0")
            return asyncio.ensure_future(generate_through_aborts(engine, asked, restart=mode == "restart"))

        try:
            await engine.start(Reporter(folder / "status", f"server-{mode}"))
            await engine.load_weights(refs[0])
            check, first, sent = client.check, [], asyncio.Event()

            async def check_and_ask(ref: WeightRef) -> None:
                await check(ref)  # it reads the files, in which time a whole generation may end
                first.append(ask(1))
                await asyncio.sleep(0.1)
                assert core.active, "it ended before the update began"
                sent.set()

            client.check = check_and_ask
            update = asyncio.ensure_future(engine.load_weights(refs[1]))
            await sent.wait()
            await asyncio.sleep(0.05)
            second = ask(2)
            await update
            return [await first[0], await second]
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(scenario(), 300))
