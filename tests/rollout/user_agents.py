"""Agents of all kinds; they know nothing of Clew but what `run` is given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
from typing import Any

import numpy as np
from openai import AsyncOpenAI, OpenAI

LEFT: list[asyncio.Task[None]] = []
HELD = threading.Event()


def asked(data: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": data["prompt"]}]


class Once:
    """Asks once; `give` says what it returns."""

    def __init__(self, give: str = "number") -> None:
        self.give = give

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        async with AsyncOpenAI(**extra_kwargs) as client:
            answer = await client.chat.completions.create(model="policy", messages=asked(data))
            data["prompt"] = "changed: its own copy"
            if self.give == "raise":
                raise RuntimeError("planted")
            if self.give == "never":
                await asyncio.sleep(1000)
            if self.give == "leave":
                LEFT.append(asyncio.create_task(self.later(AsyncOpenAI(**extra_kwargs, max_retries=0))))
        returned: dict[str, Any] = {
            "number": 0.5,
            "bool": True,
            "numpy": np.float32(0.25),
            "by id": {answer.id: 2},
            "by unknown id": {"i7": 2},
            "nothing by id": {},
            "none": None,
            "text": "good",
            "array": np.zeros(3),
            "nan": float("nan"),
            "leave": 1,
        }
        return returned[self.give]

    async def later(self, client: AsyncOpenAI) -> None:
        await asyncio.sleep(0.2)
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "too late"}])


def decorated(run: Any) -> Any:
    """Decorator as in many tracing packages: a plain function around an asynchronous one."""
    return lambda *given, **named: run(*given, **named)


class Decorated:
    @decorated
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        async with AsyncOpenAI(**extra_kwargs) as client:
            await client.chat.completions.create(model="policy", messages=asked(data))
        return 1.0


class Stubborn:
    """Catches its own cancellation, and goes on forever."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await AsyncOpenAI(**extra_kwargs).chat.completions.create(model="policy", messages=asked(data))
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)


class PlainNever:
    """A plain `def run` that outlasts its episode."""

    def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        assert threading.current_thread().daemon, "it would keep the process from ending"
        HELD.wait(20)
        return 1.0


class Plain:
    """A plain `def run`, with the synchronous client; it takes just what it needs."""

    def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=asked(data))
        return 1.0


class Blocking:
    """Blocks its event loop with a synchronous request: slow, but no deadlock."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
        body = json.dumps({"model": "x", "messages": asked(data)}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:  # noqa: ASYNC210 - the fault that it has
            return float(len(json.load(response)["choices"]))


class Rude:
    """Begins as Turns does, and then says something else."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        answer = await client.chat.completions.create(model="policy", messages=asked(data))
        more = [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "No!"}]
        await client.chat.completions.create(model="policy", messages=[*asked(data), *more])
        return 1.0


class Asking:
    """Two requests, the second as the arguments say."""

    def __init__(self, said: str = "and now?", about: str = "adds two numbers", **request: Any) -> None:
        self.said, self.about = said, about
        self.request: dict[str, Any] = {"model": "policy", **request}

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        first = await client.chat.completions.create(model="policy", messages=asked(data))
        answer: Any = {"role": "assistant", "content": first.choices[0].message.content}
        properties = {"type": "object", "properties": {"a": {"type": "integer"}}}
        tool = {"name": "add", "description": self.about, "parameters": properties}
        tools: Any = [{"type": "function", "function": tool}]
        await client.chat.completions.create(
            messages=[*asked(data), answer, {"role": "user", "content": self.said}],
            tools=tools,
            **self.request,
        )
        return 1.0


class Clock:
    """Has a clock in its system prompt, and so starts a new sequence at each turn; it sends neutral fields, too."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        messages = asked(data)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for turn in range(2):
                system: Any = {"role": "system", "content": f"It is {turn} o'clock."}
                answer = await client.chat.completions.create(
                    model="model", messages=[system, *messages], max_tokens=4, frequency_penalty=0
                )
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *asked(data)]
        return 1.0


class Turns:
    """Several turns, a reward for each, and one for the episode by a call."""

    rewards = (0.0, 0.0, 1.0)

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> dict[str, float]:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages, rewards = asked(data), {}
        for turn in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            rewards[answer.id] = self.rewards[turn]
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *asked(data)]
        return rewards


class RewardsItsFirstTurn(Turns):
    """The same, with a reward for the first turn, too."""

    rewards = (0.5, 0.0, 1.0)
