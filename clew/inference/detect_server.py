"""Detection of what listens at an address: a server that takes token IDs, or a provider that does not.

It imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from clew.errors import EngineError
from clew.inference.client import HTTPEngine
from clew.inference.sglang import SGLangEngine
from clew.inference.vllm import VLLMEngine


@dataclass(frozen=True, kw_only=True)
class FoundEngine:
    """A server that takes token ids."""

    kind: str
    """Kind of the server, in words."""
    engine: HTTPEngine
    model: str
    """Folder or hub name of the model, which its tokenizer is loaded from."""
    takes_images: bool = False
    """True if it takes images beside token IDs."""


async def find_engine(base_url: str, api_key: str = "") -> FoundEngine | None:
    """Return the engine at an address: `clew serve` or SGLang (/model_info), or vLLM (according to /v1/models).

    Returns:
        The engine, or None for a provider, which takes no token IDs.

    Raises:
        EngineError: Nothing answers, or a gateway does.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    address = root.removeprefix("http://")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers) as client:
            async with client.get(f"{root}/model_info") as response:
                info = await response.json() if response.status == 200 else None
            if info is not None and "max_context_length" in info:
                return FoundEngine(
                    kind="clew serve",
                    engine=HTTPEngine(address, api_key),
                    model=str(info["tokenizer_path"]),
                    takes_images=bool(info.get("has_image_understanding")),
                )
            if info is not None:
                async with client.get(f"{root}/server_info") as response:
                    server = await response.json()
                engine, model = SGLangEngine(address, api_key), str(info["tokenizer_path"])
                engine.context = int(server["max_req_input_len"])
                engine.takes_images = bool(info.get("has_image_understanding"))
                try:
                    await engine.find_masks(server)
                finally:
                    await engine.close()  # the engine may be used on another event loop
                return FoundEngine(kind="SGLang", engine=engine, model=model, takes_images=engine.takes_images)
            async with client.get(f"{root}/v1/models") as response:
                listed = [dict(model) for model in (await response.json())["data"]] if response.status == 200 else []
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineError(
            f"Cannot find a model: nothing that serves a model answers at {base_url} ({type(error).__name__}: "
            f"{error}). Start `clew serve CONFIG` in another terminal, and use the base URL that it prints."
        ) from None
    if any(model.get("owned_by") == "clew" for model in listed):
        raise EngineError(f"Cannot use {base_url}: it is a gateway (`clew serve --engine`). Name the server behind it.")
    for model in listed:
        if model.get("owned_by") == "vllm":
            engine = VLLMEngine(address, model["id"], model["max_model_len"], api_key)
            try:
                await engine.probe()
            finally:
                await engine.close()  # the engine may be used on another event loop
            return FoundEngine(kind="vLLM", engine=engine, model=model.get("root") or model["id"])
    return None
