"""Rank 0 serves prompts, and calls a collective on the event loop that should answer the next request of rank 1."""

import asyncio
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from aiohttp import web

dist.init_process_group("gloo")
rank = dist.get_rank()
ports: list = [None]
began = threading.Event()


async def prompt(_):
    began.set()
    return web.json_response({"prompt": "2+2="})


async def lead():
    app = web.Application()
    app.router.add_get("/prompt", prompt)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    dist.broadcast_object_list([site._server.sockets[0].getsockname()[1]])  # type: ignore[attr-defined]
    while not began.is_set():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    dist.all_reduce(torch.ones(4))


if rank == 0:
    asyncio.run(lead())
else:
    dist.broadcast_object_list(ports)
    urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/prompt").read()
    print("ready", flush=True)
    time.sleep(1)
    urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/prompt").read()
    dist.all_reduce(torch.ones(4))
