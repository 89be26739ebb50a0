"""A handler of a server on uvloop blocks its loop with the result of a coroutine on the same loop."""

import asyncio
import threading
import time
import urllib.request

import uvicorn
import uvloop

LOOP = []
ACTIVE = [1]


async def drained():
    while ACTIVE[0]:
        await asyncio.sleep(0.01)


def load(version):
    asyncio.run_coroutine_threadsafe(drained(), LOOP[0]).result()
    return version


async def app(scope, receive, send):
    if scope["type"] == "http":
        body = str(load(3)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def serve():
    LOOP.append(asyncio.get_running_loop())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))

    def ask():
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        print("ready", flush=True)
        urllib.request.urlopen(f"http://127.0.0.1:{port}/update_weights")

    threading.Thread(target=ask, daemon=True).start()
    await server.serve()


uvloop.run(serve())
