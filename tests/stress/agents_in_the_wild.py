"""Agents as people write them, with one fault each, and sound ones that look as if they had one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import random
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx2
import requests


async def ask(text: str, base_url: str, api_key: str, http_client: httpx2.AsyncClient) -> str:
    response = await http_client.post(
        f"{base_url}/chat/completions",
        json={"model": "policy", "messages": [{"role": "user", "content": text}]},
        headers={"Authorization": f"Bearer {api_key}"},
    )
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


# Faulty ---------------------------------------------------------------------------------------------------------------

PLANS: dict[str, str] = {}


class PlanCache:
    """A cache of plans by the first word of the prompt: rows that begin alike get one another's plan."""

    async def run(self, data: dict, **given: Any) -> float:
        key = data["prompt"].split()[0]
        if key not in PLANS:
            PLANS[key] = f"Plan for: {data['prompt']}"
        return float(len(await ask(f"Carry this out. {PLANS[key]}", **given)))


class AnswerCache:
    """A cache of answers, by the length of the question."""

    def __init__(self) -> None:
        self.answers: dict[int, str] = {}

    async def run(self, data: dict, **given: Any) -> float:
        size = len(data["prompt"])
        if size not in self.answers:
            self.answers[size] = await ask(data["prompt"], **given)
        return float(len(await ask(f"{data['prompt']} I think: {self.answers[size]}", **given)))


LAST: list[str] = []


# Not in FAULTY: test_where_it_asked_is_not_where_it_worked_after_that tests this one by itself.
class AsksThenWorks:
    """Agent whose request holds prompts of other episodes, from a shared list. Then a tool blocks the event loop.

    Samples of the stack mostly show the tool, so they mislead about the line that sent the request.
    """

    async def run(self, data: dict, **given: Any) -> float:
        LAST.append(data["prompt"])
        said = await ask(" ".join(LAST[-2:]), **given)
        time.sleep(0.1)  # noqa: ASYNC251
        return float(len(said))


TOOLS = {"search", "calculator", "browser", "python", "shell"}


class SetOrder:
    """Agent that lists a set of strings, whose order differs from process to process."""

    async def run(self, data: dict, **given: Any) -> float:
        names = [name for name in TOOLS if name != "none"]
        return float(len(await ask(f"Tools: {', '.join(names)}. {data['prompt']}", **given)))


def _keywords(text: str) -> list[str]:
    return [word for word in set(text.lower().split()) if len(word) > 2]


class SetInAFunction:
    """The set is in a function beside the class."""

    async def run(self, data: dict, **given: Any) -> float:
        return float(len(await ask(f"Notes on {', '.join(_keywords(data['prompt']))}.", **given)))


class HashShard:
    """Agent that puts hash() of a string into its request; the value differs from process to process."""

    async def run(self, data: dict, **given: Any) -> float:
        shard = hash(data["prompt"]) % 1000
        return float(len(await ask(f"[{shard}] {data['prompt']}", **given)))


class WorkersTakeTurns:
    """Tool in many threads, of which a semaphore lets only one work at a time."""

    turn = threading.Semaphore(1)

    async def run(self, data: dict, **given: Any) -> float:
        await asyncio.to_thread(self.tool)
        return float(len(await ask(data["prompt"], **given)))

    def tool(self) -> None:
        with self.turn:
            time.sleep(0.15)


class NeverTold:
    """Agent of which every twelfth episode waits for an event that nobody sets."""

    count = 0

    async def run(self, data: dict, **given: Any) -> float:
        type(self).count += 1
        number = self.count
        said = await ask(data["prompt"], **given)
        if number % 12 == 0:
            await asyncio.Event().wait()
        return float(len(said))


class LeaksConnections:
    """Agent that opens a connection of its own in each episode, and never closes it."""

    open: list[socket.socket] = []  # noqa: RUF012

    async def run(self, data: dict, base_url: str, **given: Any) -> float:
        url = urlsplit(base_url)
        connection = socket.create_connection((url.hostname, url.port))
        self.open.append(connection)
        return float(len(await ask(data["prompt"], base_url=base_url, **given)))


class LeaksBesidePool:
    """Agent that leaves a log file open in each episode, beside a pool that does close its idle connections."""

    open: list[Any] = []  # noqa: RUF012
    pool: httpx2.AsyncClient | None = None

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        if self.pool is None:
            self.pool = httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(keepalive_expiry=0.01), verify=False)
        log = tempfile.NamedTemporaryFile("w")  # noqa: SIM115
        self.open.append(log)
        log.write(data["prompt"])
        return float(len(await ask(data["prompt"], base_url, api_key, self.pool)))


class LeaksProcesses:
    """A sandbox for each episode, which goes on running."""

    running: list[subprocess.Popen[bytes]] = []  # noqa: RUF012

    async def run(self, data: dict, **given: Any) -> float:
        self.running.append(subprocess.Popen(["sleep", "600"]))  # noqa: ASYNC220
        return float(len(await ask(data["prompt"], **given)))


class ForgetsErrors:
    """A score is written down in a task that fails, and nobody looks."""

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        self.task = asyncio.create_task(self.write_down(said))
        await asyncio.sleep(0)
        return float(len(said))

    async def write_down(self, said: str) -> None:
        raise OSError("the database is away")


class LeavesSessions:
    """A session of aiohttp's for each episode, left to the garbage collector."""

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"})
        body = {"model": "policy", "messages": [{"role": "user", "content": data["prompt"]}]}
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            return float(len((await response.json())["choices"][0]["message"]["content"]))


def compile_answer(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class OneCompiler:
    """A pool of one process."""

    pool: ProcessPoolExecutor | None = None

    async def run(self, data: dict, **given: Any) -> float:
        if OneCompiler.pool is None:
            OneCompiler.pool = ProcessPoolExecutor(1)
        said = await ask(data["prompt"], **given)
        await asyncio.get_running_loop().run_in_executor(self.pool, compile_answer, 0.15)
        return float(len(said))


def lookup() -> str:
    return ""


class Monkeypatches:
    """Agent that replaces a function of its module by one that returns the current episode's prompt."""

    async def run(self, data: dict, **given: Any) -> float:
        global lookup
        lookup = lambda: data["prompt"]  # noqa: E731
        said = await ask("Make a plan.", **given)
        return float(len(await ask(f"{lookup()} {said}", **given)))


LOCAL = threading.local()


class ThreadsRemember:
    """Agent whose worker threads keep the prompts of earlier episodes in thread-local storage."""

    pool = ThreadPoolExecutor(3)

    async def run(self, data: dict, **given: Any) -> float:
        text = await asyncio.get_running_loop().run_in_executor(self.pool, self.context, data["prompt"])
        return float(len(await ask(text, **given)))

    def context(self, prompt: str) -> str:
        seen = [*getattr(LOCAL, "seen", []), prompt][-3:]
        LOCAL.seen = seen
        return " | ".join(seen)


class RetryStorm:
    """Agent whose service takes one call at a time; all other episodes try again every 20 ms."""

    busy = 0

    async def run(self, data: dict, **given: Any) -> float:
        while self.busy >= 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        type(self).busy += 1
        try:
            await asyncio.sleep(0.15)
        finally:
            type(self).busy -= 1
        return float(len(await ask(data["prompt"], **given)))


class OneBrowser:
    """Agent whose episodes take turns with the only browser, which they get from a queue."""

    browsers: asyncio.Queue[str] | None = None

    async def run(self, data: dict, **given: Any) -> float:
        if self.browsers is None:
            self.browsers = asyncio.Queue()
            self.browsers.put_nowait("browser")
        browser = await self.browsers.get()
        try:
            await asyncio.sleep(0.15)
            return float(len(await ask(f"{browser}: {data['prompt']}", **given)))
        finally:
            self.browsers.put_nowait(browser)


class TellsTheTime:
    async def run(self, data: dict, **given: Any) -> float:
        return float(len(await ask(f"It is {time.time()}. {data['prompt']}", **given)))


class NamesItself:
    async def run(self, data: dict, **given: Any) -> float:
        return float(len(await ask(f"You are agent {uuid.uuid4().hex}. {data['prompt']}", **given)))


class Requests:
    """A blocking client in an asynchronous function."""

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        body: Any = {"model": "policy", "messages": [{"role": "user", "content": data["prompt"]}]}
        headers = {"Authorization": f"Bearer {api_key}"}
        response = requests.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60)  # noqa: ASYNC210
        return float(len(response.json()["choices"][0]["message"]["content"]))


class WaitsForWorker:
    """Work is handed to a thread, and the event loop waits for it."""

    pool = ThreadPoolExecutor(4)

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        self.pool.submit(time.sleep, 0.04).result()
        return float(len(said))


class RemembersAll:
    """A cache without a bound, of what each episode made."""

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        return float(len(embedded(f"{uuid.uuid4()} {said}"))) + len(said)


@functools.cache
def embedded(text: str) -> bytes:
    return bytes(30_000)


class SeedsAll:
    """Agent that seeds the process's global generator, and draws from it only after an await."""

    async def run(self, data: dict, **given: Any) -> float:
        random.seed(data["prompt"])
        said = await ask(data["prompt"], **given)
        return float(len(await ask(f"Hint {random.random()}: {said}", **given)))


class GivesUpInCompany:
    """A tool that one episode at a time may use, under a time limit that is too short when several wait for it."""

    def __init__(self) -> None:
        self.tool = asyncio.Lock()

    async def run(self, data: dict, **given: Any) -> float:
        async with asyncio.timeout(0.15), self.tool:
            await asyncio.sleep(0.06)
        return float(len(await ask(data["prompt"], **given)))


# Sound ----------------------------------------------------------------------------------------------------------------


class ClosesIdle:
    """A pool of its own, which closes idle connections soon."""

    pool: httpx2.AsyncClient | None = None

    async def run(self, data: dict, base_url: str, api_key: str, **_: Any) -> float:
        if self.pool is None:
            self.pool = httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(keepalive_expiry=0.02), verify=False)
        return float(len(await ask(data["prompt"], base_url, api_key, self.pool)))


class RightKey:
    """A cache of a tool's results, by the whole question."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    async def run(self, data: dict, **given: Any) -> float:
        if data["prompt"] not in self.found:
            await asyncio.sleep(0.02)
            self.found[data["prompt"]] = f"Found for {data['prompt']}: {len(data['prompt'])} pages."
        return float(len(await ask(self.found[data["prompt"]], **given)))


class ManyWorkers:
    """Agent whose tools run in a pool with more threads than there are episodes at once."""

    pool = ThreadPoolExecutor(32)

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        await asyncio.get_running_loop().run_in_executor(self.pool, time.sleep, 0.05)
        return float(len(said))


class ProcessEach:
    """A process for each episode, started and awaited the asynchronous way."""

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.03; echo 7", stdout=asyncio.subprocess.PIPE)
        told, _ = await process.communicate()
        return float(len(said)) + int(told)


class SeededByRow:
    """Tools by chance, of a generator that the row seeds."""

    async def run(self, data: dict, **given: Any) -> float:
        draw = random.Random(data["prompt"])
        await asyncio.sleep(draw.choice([0.01, 0.02, 0.05]))
        return float(len(await ask(f"{draw.choice(['Shortly', 'At length'])}: {data['prompt']}", **given)))


class SlowRows:
    """Some rows take ten times as long as others, and nobody waits for them."""

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        await asyncio.gather(*(asyncio.sleep(0.3 if "four" in data["prompt"] else 0.03) for _ in range(3)))
        return float(len(said))


class FewShot:
    """Another row of the data is an example in each request."""

    async def run(self, data: dict, **given: Any) -> float:
        return float(len(await ask(f"Q: What is one and one? A: two. Q: {data['prompt']} A:", **given)))


class Traces:
    """Agent that uses random names and the clock only for its traces, and sorts a set before it uses it."""

    def __init__(self) -> None:
        self.spans: dict[str, float] = {}

    async def run(self, data: dict, **given: Any) -> float:
        span = str(uuid.uuid4())
        self.spans[span] = time.time()
        words = sorted({*data["prompt"].split()})
        try:
            return float(len(await ask(" ".join(words), **given)))
        finally:
            del self.spans[span]


class Polls:
    """Looks every few milliseconds whether a job of its own is done."""

    async def run(self, data: dict, **given: Any) -> float:
        job = asyncio.create_task(asyncio.sleep(0.1))
        while not job.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return float(len(await ask(data["prompt"], **given)))


class Hashes:
    """Computation in threads that release the GIL, so that it does not block the event loop."""

    async def run(self, data: dict, **given: Any) -> float:
        said = await ask(data["prompt"], **given)
        await asyncio.to_thread(hashlib.pbkdf2_hmac, "sha256", said.encode(), b"salt", 20_000)
        return float(len(said))


class ReadsBroken:
    """Agent that asks once more if the answer is not JSON, then writes it to a temporary folder of its own."""

    async def run(self, data: dict, **given: Any) -> float:
        for _turn in range(2):
            said = await ask(data["prompt"], **given)
            with contextlib.suppress(json.JSONDecodeError):
                return float(json.loads(said)["score"])
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "notes.txt").write_text(said)
        return 0.0


FAULTY: dict[type, tuple[str, str]] = {
    PlanCache: ("shared", "PlanCache.run"),
    AnswerCache: ("shared", "AnswerCache.run"),
    SetOrder: ("differs", "SetOrder.run"),
    SetInAFunction: ("differs", "_keywords"),
    HashShard: ("differs", "HashShard.run"),
    WorkersTakeTurns: ("serial", "WorkersTakeTurns.run"),
    NeverTold: ("hangs", "NeverTold.run"),
    LeaksConnections: ("growth", "LeaksConnections.run"),
    LeaksBesidePool: ("growth", "LeaksBesidePool.run"),
    LeaksProcesses: ("growth", "LeaksProcesses.run"),
    ForgetsErrors: ("fails", "ForgetsErrors.write_down"),
    LeavesSessions: ("growth", "LeavesSessions.run"),
    OneCompiler: ("serial", "OneCompiler.run"),
    Monkeypatches: ("shared", ""),
    ThreadsRemember: ("differs", ""),
    RetryStorm: ("serial", "RetryStorm.run"),
    OneBrowser: ("serial", "OneBrowser.run"),
    TellsTheTime: ("differs", "TellsTheTime.run"),
    NamesItself: ("differs", "NamesItself.run"),
    Requests: ("blocks", "Requests.run"),
    WaitsForWorker: ("blocks", "WaitsForWorker.run"),
    RemembersAll: ("growth", "agents_in_the_wild.py"),
    SeedsAll: ("differs", ""),
    GivesUpInCompany: ("fails", "GivesUpInCompany.run"),
}
"""Kind of the finding that the stress test has to make for each agent, and text that the finding's place must contain.

The text names the function with the fault, or only the file. It is empty where no single line is at fault.
"""

SOUND: list[type] = [
    ClosesIdle,
    RightKey,
    ManyWorkers,
    ProcessEach,
    SeededByRow,
    SlowRows,
    FewShot,
    Traces,
    Polls,
    Hashes,
    ReadsBroken,
]


def clean_up() -> None:
    """End what the faulty ones left behind."""
    for process in LeaksProcesses.running:
        process.kill()
        process.wait()
    for each in (*LeaksConnections.open, *LeaksBesidePool.open):
        each.close()
    if OneCompiler.pool is not None:
        OneCompiler.pool.shutdown(wait=False, cancel_futures=True)
        OneCompiler.pool = None
    PLANS.clear()
    LAST.clear()
