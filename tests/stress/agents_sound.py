"""Agents without a fault, on real clients."""

from __future__ import annotations

import asyncio
import functools
import mmap
import tempfile
import threading
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import anthropic
import httpx2
import openai
import requests

from tests.stress import agents_faulty


def _said(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


class OpenAIAgent:
    """Two turns with the openai package."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message.to_dict(), {"role": "user", "content": "And now?"}]
        return float(len(messages[-2]["content"]))


class SetsItsReward:
    """Tells the gateway its reward, and returns nothing."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> None:
        reward = await OpenAIAgent().run(data, base_url, api_key, http_client)
        await http_client.post(
            f"{base_url.removesuffix('/v1')}/rl/set_reward",
            json={"reward": reward},
            headers={"Authorization": f"Bearer {api_key}"},
        )


class HttpxAgent:
    """The client that is given, and a tool that takes its time."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        text = data["prompt"]
        for _ in range(2):
            response = await http_client.post(
                f"{base_url}/chat/completions",
                json={"model": "policy", "messages": [{"role": "user", "content": text}]},
                headers={"Authorization": f"Bearer {api_key}"},
            )
            text = _said(response.raise_for_status().json())
            await asyncio.sleep(0.02)
        return float(len(text))


class AiohttpAgent:
    """A session of aiohttp's an episode; what it does to itself is guarded by a lock of the episode's own."""

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        lock, total = asyncio.Lock(), 0.0
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def ask(text: str) -> None:
                nonlocal total
                body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
                async with session.post(f"{base_url}/chat/completions", json=body) as response:
                    said = _said(await response.json())
                async with lock:
                    await asyncio.sleep(0.005)
                    total += len(said)

            await asyncio.gather(ask(data["prompt"]), ask("Once more: " + data["prompt"]))
        return total


class GatherAgent(HttpxAgent):
    """Asks for several answers side by side and goes on with the best."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)

        async def ask(text: str) -> str:
            reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
            return reply.choices[0].message.content or ""

        answers = await asyncio.gather(*(ask(f"{data['prompt']} ({way})") for way in ("short", "long")))
        return float(len(await ask(max(answers))))


class StreamingAgent:
    """A turn in each dialect, in streams; rewards by the answers' IDs."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> dict[str, float]:
        given: Any = {"api_key": api_key, "http_client": http_client}
        rewards: dict[str, float] = {}
        text = data["prompt"]
        client = openai.AsyncOpenAI(base_url=base_url, **given)
        said = ""
        async for chunk in await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": text}], stream=True
        ):
            said += chunk.choices[0].delta.content or ""
            rewards[chunk.id] = float(len(said))
        async with client.responses.stream(model="policy", input=f"{text} {said} And now?") as stream:
            response = await stream.get_final_response()
        rewards[response.id] = float(len(response.output_text))
        asked: Any = [{"role": "user", "content": f"{text} {response.output_text} And then?"}]
        async with anthropic.AsyncAnthropic(base_url=base_url, **given).messages.stream(
            model="policy", max_tokens=200, messages=asked
        ) as stream:
            message = await stream.get_final_message()
        rewards[message.id] = 1.0
        return rewards


class CachingAgent:
    """A bounded cache, a counter, and a client of its own that is made once: shared on purpose."""

    def __init__(self) -> None:
        self.calls = 0
        self.parsed: OrderedDict[str, list[str]] = OrderedDict()
        self.client: aiohttp.ClientSession | None = None

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        self.calls += 1
        words = self.parsed.get(data["prompt"])
        if words is None:
            await asyncio.sleep(0.005)
            words = self.parsed[data["prompt"]] = sorted(data["prompt"].split())
            while len(self.parsed) > 3:
                self.parsed.popitem(last=False)
        _normal(data["prompt"])
        response = await http_client.post(
            f"{base_url}/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": " ".join(words)}]},
            headers={"Authorization": f"Bearer {api_key}"},
        )
        return float(len(_said(response.json())))


@functools.lru_cache(maxsize=4)
def _normal(text: str) -> str:
    return text.lower()


class SandboxAgent:
    """A process an episode, started the asynchronous way, a folder of its own, and totals of what was done."""

    totals: ClassVar[dict[str, int]] = {"characters": 0}

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        response = await http_client.post(
            f"{base_url}/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": data["prompt"]}]},
            headers={"Authorization": f"Bearer {api_key}"},
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "said.txt"
            file.write_text(_said(response.json()))
            process = await asyncio.create_subprocess_exec("wc", "-c", file, stdout=asyncio.subprocess.PIPE)
            counted, _ = await process.communicate()
        self.totals["characters"] += int(counted.split()[0])
        return float(counted.split()[0])


class PlainAgent:
    """A plain function, with a blocking client, in its own thread."""

    def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        text: str = data["prompt"]
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {api_key}"
            for _turn in range(2):
                body: Any = {"model": "policy", "messages": [{"role": "user", "content": text}]}
                response = session.post(f"{base_url}/chat/completions", json=body, timeout=30)
                text = _said(response.json())
        return float(len(text))


class TakesTurns(HttpxAgent):
    """Keeps what it works on in an attribute of the instance, and nobody looks at it without the lock."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def run(self, data: dict, **given: Any) -> float:
        async with self.lock:
            self.task = data["prompt"]
            await asyncio.sleep(0)
            text = self.text()
        return await super().run({"prompt": text}, **given)

    def text(self) -> str:
        return f"Please: {self.task}"


class PlainTurns(PlainAgent):
    """Takes turns in threads, with a dictionary beside it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.notes: dict[str, str] = {}

    def run(self, data: dict, **given: Any) -> float:
        with self.lock:
            self.task = data["prompt"]
            self.notes["task"] = self.task
            text = f"{self.task} {self.notes['task']}"
        return super().run({"prompt": text}, **given)


class KeepsBuffers(HttpxAgent):
    """Memory grows with each episode until there are 17 buffers."""

    def __init__(self) -> None:
        self.buffers: deque[mmap.mmap] = deque(maxlen=17)

    async def run(self, data: dict, **given: Any) -> float:
        buffer = mmap.mmap(-1, 5 * 2**19)
        buffer.write(b"x" * len(buffer))
        self.buffers.append(buffer)
        return await super().run(data, **given)


class KeepsAnswers(HttpxAgent):
    """Each episode replaces one of 14 kept answers by its own."""

    def __init__(self) -> None:
        self.answers: deque[bytes] = deque(maxlen=14)

    async def run(self, data: dict, **given: Any) -> float:
        reward = await super().run(data, **given)
        self.answers.append(bytes(20_000))
        return reward


class Trims(agents_faulty.Talks):
    """Sends back what the model said without the white space around it, which keeps its tokens."""

    def reword(self, message: dict) -> dict:
        return {**message, "content": message["content"].strip()}


class GrowsText(agents_faulty.StripsText):
    """Adds each completion as it came."""

    def reword(self, text: str) -> str:
        return text


class MustCall(agents_faulty.ToolAgent):
    """Each turn has to call the tool."""

    choice = "required"


class ToolsOfAnthropic:
    """A tool of Anthropic's interface, whose results go back beside the reasoning; a fault of the server ends it."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        function = agents_faulty.TOOL["function"]
        tools: Any = [{"name": function["name"], "input_schema": function["parameters"]}]
        while True:
            said = await client.messages.create(model="policy", max_tokens=400, messages=messages, tools=tools)
            messages.append({"role": "assistant", "content": said.content})
            calls = [block for block in said.content if block.type == "tool_use"]
            if not calls:
                return float(len(messages))
            found: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "nothing"} for call in calls]
            messages.append({"role": "user", "content": found})


class TriesAgain:
    """A request that fails is made again until the fault of the server has passed."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        while len(messages) < 6:
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
                messages += [reply.choices[0].message.to_dict(), {"role": "user", "content": "And now?"}]
            except openai.InternalServerError:
                await asyncio.sleep(0.1)
        return float(len(messages[-2]["content"]))
