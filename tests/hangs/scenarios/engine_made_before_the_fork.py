"""No hang: agents ask an engine that takes a second for each answer; both have the socket that it listens at."""

import asyncio
import multiprocessing
import socket

import aiohttp
from aiohttp import web


def engine(listening: socket.socket) -> None:
    async def generate(request: web.Request) -> web.Response:
        tokens = []
        for position in range(int(request.query["tokens"])):
            await asyncio.sleep(0.2)
            tokens.append(position)
        return web.json_response(tokens)

    application = web.Application()
    application.router.add_get("/generate", generate)
    web.run_app(application, sock=listening, print=None)


async def agent(session: aiohttp.ClientSession, url: str, slots: asyncio.Semaphore, finished: list[int]) -> None:
    turns = 0
    while True:
        async with slots, session.get(url, params={"tokens": "5"}) as response:
            finished.append(len(await response.json()))
        turns += 1


async def main(url: str) -> None:
    slots, finished = asyncio.Semaphore(2), []
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(agent(session, url, slots, finished) for _ in range(4)))


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    multiprocessing.get_context("fork").Process(target=engine, args=(listening,), daemon=True).start()
    print("ready", flush=True)
    asyncio.run(main(f"http://127.0.0.1:{listening.getsockname()[1]}/generate"))
