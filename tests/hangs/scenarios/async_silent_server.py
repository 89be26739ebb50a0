"""A coroutine reads from a server that accepts but never answers; the trainer's coroutine waits for it."""

import asyncio


async def silent(_reader, _writer):
    await asyncio.sleep(3600)


async def ask(port, results):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"generate\n")
    await results.put(await reader.readline())


async def main():
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    results = asyncio.Queue()
    asking = asyncio.create_task(ask(server.sockets[0].getsockname()[1], results))
    print("ready", flush=True)
    await results.get()
    await asking


asyncio.run(main())
