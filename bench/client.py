"""CPU time of Clew's HTTP client for a request at 64 concurrent requests, against a bare aiohttp client.

The server is a process of its own that answers each request at once, with 256 tokens as `/generate` returns them. The
two clients take turns. The bare one sends the same bytes and parses the answer.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from bench.ratios import show
from clew.inference.client import HTTPEngine, sampling_fields
from clew.inference.protocol import GenerateRequest, SamplingParams

CONCURRENT, REQUESTS, ROUNDS, TOKENS = 64, 1024, 7, 256


def answer() -> bytes:
    logprobs = [[-1.234567 - index / 1000, index, None] for index in range(TOKENS)]
    meta = {
        "finish_reason": {"type": "length", "length": TOKENS},
        "completion_tokens": TOKENS,
        "output_token_logprobs": logprobs,
        "weight_versions": [{"version": "3", "start": 0, "end": TOKENS}],
    }
    return orjson.dumps({"text": "", "output_ids": list(range(TOKENS)), "meta_info": meta})


def serve() -> None:
    body = answer()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


async def crowd(one: Callable[[], Awaitable[Any]]) -> float:
    """Return the CPU seconds of this process for a request."""
    left = iter(range(REQUESTS))

    async def worker() -> None:
        for _ in left:
            await one()

    began = time.process_time()
    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
    return (time.process_time() - began) / REQUESTS


async def measure(port: int) -> None:
    request = GenerateRequest(list(range(256)), SamplingParams(max_new_tokens=TOKENS, stop_token_ids=(1,)))
    body = orjson.dumps({"input_ids": request.input_ids, "sampling_params": sampling_fields(request.params)})
    engine = HTTPEngine(f"127.0.0.1:{port}")
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def bare() -> None:
            async with session.post(f"http://127.0.0.1:{port}/generate", data=body) as response:
                orjson.loads(await response.read())

        async def clew() -> None:
            await engine.generate(request)

        await crowd(bare)
        await crowd(clew)
        turns = [(await crowd(bare), await crowd(clew)) for _ in range(ROUNDS)]
    await engine.close()
    theirs, ours = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    ratio = statistics.median(one / other for other, one in turns)
    detail = f"{ours * 1e6:.0f} µs of CPU a request, bare aiohttp {theirs * 1e6:.0f} µs"
    show("client, 64 requests at once, over bare aiohttp", ratio, "2", detail)


def main() -> None:
    if "--serve" in sys.argv:
        serve()
        return
    command = [sys.executable, "-m", "bench.client", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        asyncio.run(measure(int(server.stdout.readline())))
        server.stdin.close()


if __name__ == "__main__":
    main()
