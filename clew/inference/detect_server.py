"""Detection of what listens at an address: a server that takes token IDs, or a provider that does not.

It imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import aiohttp

from clew.errors import EngineError
from clew.inference.backend import Backend
from clew.inference.client import FROZEN_S, HEALTH_S, HTTPEngine
from clew.inference.sglang import SGLangEngine
from clew.inference.vllm import VLLMEngine

log = logging.getLogger("clew.inference")

BACKENDS: dict[str, type[Backend]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
"""Clients of servers that others maintain, by their names in `clew.config_fields.ENGINES`."""

FIND_S = 120.0
"""Seconds within which a server must show what it is. This includes generating its first token."""


@dataclass(frozen=True, kw_only=True)
class FoundEngine:
    """A server that takes token ids."""

    engine: HTTPEngine
    model: str
    """Folder or hub name of the model, which its tokenizer is loaded from."""

    async def fail_when_frozen(self, after_s: float = FROZEN_S) -> None:
        """Watch the server until cancelled. If it stops answering, fail its requests, so that they are sent again."""
        while True:
            await self.engine.frozen(after_s)
            log.warning("%s has not answered for %.0f s: requests wait until it does", self.engine.address, after_s)
            while not await self.engine.answers(after_s / 3):
                await self.engine.close()
                await asyncio.sleep(HEALTH_S)


async def find_engine(base_url: str, api_key: str = "") -> FoundEngine | None:
    """Return the engine at an address: `clew serve` (according to /model_info), or one of `BACKENDS`.

    Returns:
        The engine, or None for a provider, which takes no token IDs.

    Raises:
        EngineError: Nothing answers, or a gateway does.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    address = root.removeprefix("http://")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(path: str) -> Any:
        async with client.get(root + path) as response:
            return await response.json() if response.status == 200 else None

    try:
        async with asyncio.timeout(FIND_S), aiohttp.ClientSession(headers=headers) as client:
            info = await get("/model_info")
            if info is not None and "max_context_length" in info:
                engine = HTTPEngine(address, api_key)
                engine.takes_images = bool(info.get("has_image_understanding"))
                return FoundEngine(engine=engine, model=str(info["tokenizer_path"]))
            models = await get("/v1/models")
            listed = [] if models is None else [dict(model) for model in models["data"]]
            if any(model.get("owned_by") == "clew" for model in listed):
                raise EngineError(
                    f"Cannot use {base_url}: it is a gateway (`clew serve --engine`). Name the server behind it."
                )
            for backend in BACKENDS.values():
                engine = backend(address, token=api_key)
                try:
                    model = await engine.find(info, listed)
                finally:
                    await engine.close()  # it may be used on another event loop
                if model is not None:
                    return FoundEngine(engine=engine, model=model)
            return None
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = str(error) or f"no answer within {FIND_S:g} s"
        raise EngineError(
            f"Cannot find a model: nothing that serves a model answers at {base_url} ({type(error).__name__}: "
            f"{reason}). Start `clew serve CONFIG` in another terminal, and use the base URL that it prints."
        ) from None
