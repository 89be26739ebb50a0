"""Agents with one fault each."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import openai


class Agent:
    """Asks once, over the client that it is given."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        return float(len(await self.ask(data["prompt"], base_url, api_key, http_client)))

    async def ask(self, prompt: Any, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> str:
        response = await http_client.post(
            f"{base_url}/chat/completions",
            json={"model": "policy", "messages": prompt if isinstance(prompt, list) else [_user(prompt)]},
            headers={"Authorization": f"Bearer {api_key}"},
        )
        return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Sleeps(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        time.sleep(0.03)  # noqa: ASYNC251
        return await super().run(data, **given)


class BlocksLong(Agent):
    """Beside a model that takes long."""

    async def run(self, data: dict, **given: Any) -> float:
        time.sleep(0.2)  # noqa: ASYNC251
        return await super().run(data, **given)


class CallsUrllib:
    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps({"model": "policy", "messages": [_user(data["prompt"])]}).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:  # noqa: ASYNC210
            return float(len(json.load(response)["choices"][0]["message"]["content"]))


class RunsProcesses(Agent):
    """Each is brief; of hundreds at once, each waits for all."""

    async def run(self, data: dict, **given: Any) -> float:
        said = await super().run(data, **given)
        subprocess.run(["sleep", "0.02"], check=True, capture_output=True)  # noqa: ASYNC221
        return said


class Computes(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        reward = await super().run(data, **given)
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            reward = reward * 1.0
        return reward


LOCK = asyncio.Lock()


class GlobalLock(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        async with LOCK:
            await asyncio.sleep(0.1)
        return await super().run(data, **given)


class FailsLate(GlobalLock):
    """Fails once, in a wave that confirms that the episodes wait for one another, and in no other."""

    runs = itertools.count(1)

    async def run(self, data: dict, **given: Any) -> float:
        if next(self.runs) == 1 + 3 + 2 + 8 + 8 + 5:
            raise ValueError("late")
        return await super().run(data, **given)


class Stubborn(Agent):
    """Catches its cancellation, and goes on forever."""

    async def run(self, data: dict, **given: Any) -> float:
        await super().run(data, **given)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)


class CatchesAll(Agent):
    """Catches even the GeneratorExit of a coroutine that is closed."""

    async def run(self, data: dict, **given: Any) -> float:
        await super().run(data, **given)
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.create_task(asyncio.sleep(3600))


class KeepsFirstRow(Agent):
    """Asks with the first row that the process saw, too."""

    first: ClassVar[dict[str, str]] = {}

    async def run(self, data: dict, **given: Any) -> float:
        first = self.first.setdefault("prompt", data["prompt"])
        return await super().run({"prompt": f"{first} {data['prompt']}"}, **given)


class LongLock(Agent):
    """Beside a model that takes long."""

    async def run(self, data: dict, **given: Any) -> float:
        async with LOCK:
            await asyncio.sleep(0.3)
        return await super().run(data, **given)


class RateLimit(Agent):
    """Ten a second, for all episodes together."""

    free_at = 0.0

    async def run(self, data: dict, **given: Any) -> float:
        now = time.monotonic()
        type(self).free_at = max(self.free_at, now) + 0.1
        await asyncio.sleep(self.free_at - now)
        return await super().run(data, **given)


class SmallPool(Agent):
    """Its connections are shared, and one in number."""

    def __init__(self) -> None:
        self.client = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=1), verify=False, timeout=30)

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        return await super().run(data, base_url=base_url, api_key=api_key, http_client=self.client)


class OneWorker(Agent):
    workers = ThreadPoolExecutor(1)

    async def run(self, data: dict, **given: Any) -> float:
        await asyncio.get_running_loop().run_in_executor(self.workers, time.sleep, 0.1)
        return await super().run(data, **given)


class PlainLock:
    """A plain `run`: threads wait for one another."""

    lock = threading.Lock()

    def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        with self.lock:
            client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=httpx2.Client(verify=False))
            with client:
                reply = client.chat.completions.create(model="policy", messages=[_user(data["prompt"])])  # type: ignore
        return float(len(reply.choices[0].message.content or ""))


class KeepsPrompt(Agent):
    """Agent that keeps what it works on in an attribute, and one instance serves all."""

    async def run(self, data: dict, **given: Any) -> float:
        self.prompt = data["prompt"]
        first = await self.ask(self.prompt, **given)
        return float(len(await self.ask(self.prompt + " Are you sure?", **given))) + len(first)


class LocksTooShort(Agent):
    """Sets the page that it works on under a lock, and reads it without."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    async def run(self, data: dict, **given: Any) -> float:
        async with self.lock:
            self.prompt = data["prompt"]
        return float(len(await self.ask("Make a plan.", **given))) + len(self.prompt)


HISTORY: list[dict[str, str]] = []


class SharedHistory(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        HISTORY[:] = [*HISTORY[-3:], _user(data["prompt"])]
        said = await self.ask(list(HISTORY), **given)
        HISTORY.append({"role": "assistant", "content": said})
        return float(len(await self.ask([*HISTORY, _user("And now?")], **given)))


class DefaultArgument(Agent):
    """A default is one list for all calls."""

    async def run(self, data: dict, **given: Any) -> float:
        return await self.solve(data, given)

    async def solve(self, data: dict, given: dict, notes: list = []) -> float:  # noqa: B006
        notes.append(data["prompt"])
        return await super().run({"prompt": "; ".join(notes[-3:])}, **given)


NOTES: contextvars.ContextVar[dict] = contextvars.ContextVar("notes", default={})  # noqa: B039


class DefaultOfVariable(Agent):
    """A default is one dictionary for all episodes."""

    async def run(self, data: dict, **given: Any) -> float:
        NOTES.get()["prompt"] = data["prompt"]
        await super().run({"prompt": "Make a plan."}, **given)
        return await super().run({"prompt": NOTES.get()["prompt"]}, **given)


class OneFile(Agent):
    """Notes to itself, in a file that all have."""

    async def run(self, data: dict, **given: Any) -> float:
        file = Path(tempfile.gettempdir()) / "clew-test-notes.txt"
        file.write_text(data["prompt"])
        await super().run({"prompt": "Make a plan."}, **given)
        return await super().run({"prompt": file.read_text()}, **given)


class CrossesAnswers(Agent):
    """Takes whichever answer comes first."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    async def run(self, data: dict, **given: Any) -> float:
        asking = asyncio.create_task(self.put(data, given))
        said = await self.answers.get()
        await asking
        return float(len(await self.ask(f"Is it right? {said}", **given)))

    async def put(self, data: dict, given: dict) -> None:
        await self.answers.put(await self.ask(data["prompt"], **given))


class OneClient(Agent):
    """The first episode's key serves all later ones."""

    client: openai.AsyncOpenAI | None = None

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        if self.client is None:
            client = httpx2.AsyncClient(verify=False)
            self.client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=client)
        reply = await self.client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": data["prompt"]}]
        )
        return float(len(reply.choices[0].message.content or ""))


class PlainState:
    """A plain `run` that keeps what it works on in the instance."""

    def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        self.task = data["prompt"]
        with httpx2.Client(verify=False) as client:
            body = {"model": "policy", "messages": [_user(self.task)]}
            headers = {"Authorization": f"Bearer {api_key}"}
            said = client.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=30).json()
        return float(len(self.task)) + len(said["choices"])


class LeaksTasks(Agent):
    left: list[asyncio.Task] = []  # noqa: RUF012

    async def run(self, data: dict, **given: Any) -> float:
        asyncio.get_running_loop().create_task(self.poll())
        return await super().run(data, **given)

    async def poll(self) -> None:
        await asyncio.sleep(3600)


class LeaksThreads(Agent):
    end = threading.Event()

    async def run(self, data: dict, **given: Any) -> float:
        threading.Thread(target=self.end.wait, daemon=True).start()
        return await super().run(data, **given)


class LeaksFiles(Agent):
    open: list[Any] = []  # noqa: RUF012

    async def run(self, data: dict, **given: Any) -> float:
        self.open.append(tempfile.TemporaryFile())  # noqa: SIM115
        return await super().run(data, **given)


class LeaksMemory(Agent):
    seen: list[bytes] = []  # noqa: RUF012

    async def run(self, data: dict, **given: Any) -> float:
        reward = await super().run(data, **given)
        self.seen.append(bytes(20_000))
        return reward


class LeaksBuffers(Agent):
    """Memory that Python does not allocate."""

    def __init__(self) -> None:
        self.buffers: list[mmap.mmap] = []

    async def run(self, data: dict, **given: Any) -> float:
        buffer = mmap.mmap(-1, 5 * 2**19)
        buffer.write(b"x" * len(buffer))
        self.buffers.append(buffer)
        return await super().run(data, **given)


class Random(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        return await super().run({"prompt": f"{data['prompt']} (hint {random.random()})"}, **given)


class FailsInCompany(Agent):
    """A resource that only so many can have."""

    running = 0

    async def run(self, data: dict, **given: Any) -> float:
        type(self).running += 1
        try:
            if self.running > 4:
                raise ConnectionError(f"no room for episode {self.running}")
            return await super().run(data, **given)
        finally:
            type(self).running -= 1


class Markup:
    """Raises what must be escaped."""

    async def run(self, data: dict, **_: Any) -> float:
        raise ValueError("<script>[bold]alert(1)</script>")


class HoldsLock(Agent):
    """A lock of threads, held across an await: the second episode that wants it stops the loop for good."""

    lock = threading.Lock()

    async def run(self, data: dict, **given: Any) -> float:
        with self.lock:
            return await super().run(data, **given)


class RemovesFolder(Agent):
    """Works in a folder that is gone afterwards."""

    async def run(self, data, **given):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        return await super().run(data, **given)


class ChangesFolder(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        os.chdir(tempfile.gettempdir())
        return await super().run(data, **given)


class SetsVariable(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        os.environ["AGENT_QUESTION"] = str(random.random())
        return await super().run({**data, "prompt": data["prompt"]}, **given)


class SetsVariableOnce(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        os.environ["AGENT_HOME"] = "/somewhere"
        return await super().run(data, **given)


class HandlesSignals(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        os.umask(0o077)
        return await super().run(data, **given)


class Talks(Agent):
    """Three turns. Each reply goes back as `reword` gives it, and each request has the messages that `chosen` gives."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [_user(data["prompt"])]
        for _turn in range(3):
            reply = await client.chat.completions.create(model="policy", messages=self.chosen(messages))
            messages += [self.reword(reply.choices[0].message.to_dict()), _user("And now?")]
        return float(len(messages[-2]["content"]))

    def reword(self, message: dict) -> dict:
        return message

    def chosen(self, messages: list[Any]) -> list[Any]:
        return messages


class SendsFirstParagraph(Talks):
    def reword(self, message: dict) -> dict:
        return {**message, "content": message["content"].strip().split("\n")[0]}


class CachesReplies(Agent):
    replies: ClassVar[dict[str, str]] = {}

    async def ask(self, prompt: Any, *given: Any) -> str:
        if prompt not in self.replies:
            self.replies[prompt] = await super().ask(prompt, *given)
        return self.replies[prompt]


class PaysNothingDefined(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        return (await super().run(data, **given)) * float("nan")


class AsksUntilItIsRight(Agent):
    async def run(self, data: dict, **given: Any) -> float:
        while await self.ask(data["prompt"], **given) != "yes":
            pass
        return 1.0


class AsksAfterwards(Agent):
    """Returns before a request in the background has been answered; a set holds the task."""

    def __init__(self) -> None:
        self.background: set[asyncio.Task] = set()

    async def run(self, data: dict, **given: Any) -> float:
        reward = await super().run(data, **given)
        task = asyncio.ensure_future(self.ask("What did you learn?", **given))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return reward


class StripsText:
    """One growing text, to which the completion is added without the white space around it."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        text = f"{data['prompt']}\nThought:"
        for _turn in range(3):
            reply = await client.completions.create(model="policy", prompt=text, max_tokens=1024)
            text += f"{self.reword(reply.choices[0].text)}\nObservation: none\nThought:"
        return float(len(text))

    def reword(self, text: str) -> str:
        return f" {text.strip()}"


class SendsNoReasoning(Talks):
    def reword(self, message: dict) -> dict:
        return {"role": "assistant", "content": message["content"]}


class SlidingWindow(Talks):
    def chosen(self, messages: list[Any]) -> list[Any]:
        return messages[-3:]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "sort": {"enum": ["old", "new"]},
                "sites": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
            },
        },
    },
}


class ToolAgent:
    """Up to four turns with a tool. The results that it had before are given to `kept`."""

    choice: Any = "auto"

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [_user(data["prompt"])]
        for _turn in range(4):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL], tool_choice=self.choice
            )
            message = reply.choices[0].message
            messages = [*self.kept(messages), message.to_dict()]
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)  # type: ignore[union-attr]
                found = f"{given['query']}, {given['limit'] + 1}, {given['sort']}, {given['sites'][0] is True}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        return float(len(messages))

    def kept(self, messages: list[Any]) -> list[Any]:
        return messages


class ClearsResults(ToolAgent):
    def kept(self, messages: list[Any]) -> list[Any]:
        return [m | {"content": "[cleared]"} if m["role"] == "tool" else m for m in messages]


class Greedy(Agent):
    async def ask(self, prompt: Any, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> str:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: Any = [_user(prompt)]
        reply = await client.chat.completions.create(model="policy", messages=messages, temperature=0, seed=7)
        return reply.choices[0].message.content or ""


class RewardsFaults(Talks):
    """Whatever fails is worth nothing, as if it were the model's failure."""

    async def run(self, data: dict, **given: Any) -> float:
        try:
            return await super().run(data, **given)
        except Exception:
            return 0.0


class AsksForWhole:
    """An answer that was cut short does not count."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: Any = [_user(data["prompt"])]
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages)
            if reply.choices[0].finish_reason != "length":
                return float(len(reply.choices[0].message.content or ""))


class DrawsItsReward(Agent):
    """Sets a reward that has nothing to do with the answer."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> Any:
        await self.ask(data["prompt"], base_url, api_key, http_client)
        await http_client.post(
            f"{base_url.removesuffix('/v1')}/rl/set_reward",
            json={"reward": random.random()},
            headers={"Authorization": f"Bearer {api_key}"},
        )


class NamesNoResponse(Agent):
    """Names the parts of its reward where the ids of responses belong."""

    async def run(self, data: dict, **given: Any) -> Any:
        return {"length": await super().run(data, **given)}


class LeavesFolders(Agent):
    folders: ClassVar[list[str]] = []

    async def run(self, data: dict, **given: Any) -> float:
        self.folders.append(tempfile.mkdtemp())
        return await super().run(data, **given)
