"""The gateway, between a bare client and an engine that answers at once: requests a second, latency, and a crowd.

The gateway has a process of its own, with the engine in it; the client is aiohttp, in another. A session is 4 turns,
each of which extends the one before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import aiohttp

from bench.ratios import show
from clew.http_server import new_event_loop

TURNS = 4
SESSIONS, CROWD = 256, 2048
ANSWER = "the answer is right"


def serve() -> None:
    """The gateway's process. For a number on stdin it opens that many sessions, prints its URL and their keys, and
    at the next line what was recorded of each: the IDs of its interactions, and the number of its sequences."""
    from clew.gateway.agent_session import Limits
    from clew.gateway.gateway_thread import GatewayThread
    from clew.gateway.sequences import assemble  # the client's process is free of all this
    from tests.gateway.chatml import chatml_tokenizer
    from tests.gateway.spoken import Spoken, session_on

    with tempfile.TemporaryDirectory() as folder:
        engine = Spoken(chatml_tokenizer(folder), lambda prompt: f"{ANSWER}<|im_end|>")
    gateway = GatewayThread(Limits())

    async def close(keys: list[str]) -> None:
        for key in keys:
            await gateway.close(key)

    count = 0
    for line in sys.stdin:
        opened = [gateway.open(session_on(engine, f"g{count + number:06d}.e0")) for number in range(int(line))]
        count += len(opened)
        keys = [key for key, _ in opened]
        print(json.dumps([gateway.base_url, keys]), flush=True)
        sys.stdin.readline()
        interactions = [session.engine.interactions for _, session in opened]
        print(json.dumps([[[i.id for i in each], len(assemble(each))] for each in interactions]), flush=True)
        asyncio.run(close(keys))
    gateway.stop()


class Gateway:
    """Handle of that process, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gateway", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, line: str) -> Any:
        """Its answer to a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def talk(client: aiohttp.ClientSession, url: str, key: str, latencies: list[float]) -> list[str]:
    """A session; the ids of its responses."""
    messages: list[Any] = [{"role": "user", "content": "What is the answer?"}]
    ids: list[str] = []
    for _ in range(TURNS):
        began = time.perf_counter()
        asked = {"model": "policy", "messages": messages}
        async with client.post(url, json=asked, headers={"Authorization": f"Bearer {key}"}) as response:
            answer = await response.json()
        latencies.append(time.perf_counter() - began)
        message = answer["choices"][0]["message"]
        assert message["content"] == ANSWER, answer
        ids.append(answer["id"])
        messages = [*messages, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Is it right?"}]
    return ids


async def crowd(gateway: Gateway, sessions: int, *, at_once: int) -> tuple[float, list[float], int]:
    """Seconds, latencies, and how many sessions are not whole: a turn unanswered, or not recorded exactly once."""
    base_url, keys = gateway.ask(str(sessions))
    latencies: list[float] = []
    turns = asyncio.Semaphore(at_once)

    async def one(key: str) -> list[str]:
        async with turns:
            return await talk(client, f"{base_url}/chat/completions", key, latencies)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        began = time.perf_counter()
        answered = await asyncio.gather(*(one(key) for key in keys), return_exceptions=True)
        seconds = time.perf_counter() - began
    recorded = gateway.ask("what was recorded?")
    return seconds, latencies, sum([ids, 1] != known for ids, known in zip(answered, recorded, strict=True))


async def measure(rounds: int) -> None:
    """Print the figures."""
    gateway = Gateway()
    await crowd(gateway, 32, at_once=32)  # imports, templates
    rates: list[float] = []
    idle: list[float] = []
    for _ in range(rounds):
        seconds, _, lost = await crowd(gateway, SESSIONS, at_once=SESSIONS)
        assert lost == 0
        rates.append(SESSIONS * TURNS / seconds)
        _, latencies, _ = await crowd(gateway, 50, at_once=1)
        idle += latencies
    rate, latency = statistics.median(rates), 1000 * statistics.median(idle)
    show(f"requests a second, {SESSIONS} sessions of {TURNS} turns", rate / 400, ">= 1", f"{rate:.0f} a second, of 400")
    show("latency when idle, at the median", latency / 5, "<= 1", f"{latency:.1f} ms, of 5")
    seconds, _, lost = await crowd(gateway, CROWD, at_once=CROWD)
    show(
        f"of {CROWD:,} sessions at once, lost",
        lost / CROWD,
        "0",
        f"{CROWD * TURNS / seconds:.0f} requests a second",
        percent=True,
    )
    gateway.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help="be the gateway")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    else:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(measure(arguments.rounds))
