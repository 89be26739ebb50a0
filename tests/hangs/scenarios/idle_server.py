"""A reward server waits for its first request: that is no hang."""

import asyncio
import queue
import threading

jobs: queue.Queue = queue.Queue()


def worker():
    while True:
        text, answered = jobs.get()
        answered.set_result(len(text))


async def answer(reader, writer):
    text = await reader.readline()
    answered = asyncio.get_running_loop().create_future()
    jobs.put((text, answered))
    writer.write(str(await answered).encode())


async def main():
    threading.Thread(target=worker, daemon=True).start()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print("ready", flush=True)
    await server.serve_forever()


asyncio.run(main())
