"""No hang: a service waits for requests, and so do the workers that it has forked within its event loop."""

import asyncio
import multiprocessing


def work(connection):
    while True:
        connection.send(len(connection.recv()))


async def answer(reader, writer):
    writer.close()


async def main():
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    for _, theirs in pipes:
        multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True).start()
    await asyncio.start_server(answer, "127.0.0.1", 0)
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
