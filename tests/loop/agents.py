"""Agents of whole runs."""

from __future__ import annotations

import asyncio
import base64
import random
from typing import Any

from openai import AsyncOpenAI

from tests.models import picture


class AtItsOwnPace:
    """Asks twice, and takes whatever time it takes: no two runs have their requests in the same order."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        said, messages = "", [{"role": "user", "content": data["prompt"]}]
        for _ in range(2):
            await asyncio.sleep(0.02 * random.random())
            answer = await client.chat.completions.create(model="x", messages=messages)  # pyright: ignore
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        return sum(letter.isdigit() for letter in said) / 10


class Dawdles:
    """A workflow that asks twice, and waits for something of its own before."""

    async def run_episode(self, engine: Any, data: dict[str, Any]) -> float:
        first = await engine.generate(engine.tokenizer(data["prompt"])["input_ids"])
        await asyncio.sleep(0.02 * random.random())
        again = await engine.generate(first.all_ids + engine.tokenizer(" again")["input_ids"])
        return sum(letter.isdigit() for letter in again.text) / 10


async def slow_reward(completion: str, data: dict[str, Any]) -> float:
    """Waits for something of its own, as a judge on the network does."""
    await asyncio.sleep(0.02 * random.random())
    return sum(letter.isdigit() for letter in completion) / 10


class Looks:
    """Shows an image, then another one; likes answers with digits."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        said, messages = "", []
        for color, width in ((data["color"], 24), ("green", 48)):
            url = f"data:image/png;base64,{base64.b64encode(picture(color, width)).decode()}"
            parts = [{"type": "text", "text": data["prompt"]}, {"type": "image_url", "image_url": {"url": url}}]
            messages.append({"role": "user", "content": parts})
            answer = await client.chat.completions.create(model="x", messages=messages)  # pyright: ignore
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
        return sum(letter.isdigit() for letter in said) / 10
