"""A router leaks a slot whenever an engine refuses a request, until each new request waits for a slot."""

import asyncio
import multiprocessing


async def engine(reader, writer):
    while line := await reader.readline():
        writer.write(b"busy\n" if line == b"long\n" else b"done\n")
        await writer.drain()


class Router:
    def __init__(self, port):
        self.port, self.slots = port, asyncio.Semaphore(2)

    async def handle(self, reader, writer):
        while line := await reader.readline():
            await self.slots.acquire()
            try:
                writer.write(await self.forward(line))
            except ValueError:
                writer.write(b"failed\n")
                continue
            self.slots.release()

    async def forward(self, line):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(line)
        answer = await reader.readline()
        writer.close()
        if answer != b"done\n":
            raise ValueError(answer)
        return answer


async def route(ports):
    engines = await asyncio.start_server(engine, "127.0.0.1", 0)
    router = Router(engines.sockets[0].getsockname()[1])
    server = await asyncio.start_server(router.handle, "127.0.0.1", 0)
    ports.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def router_main(ports):
    asyncio.run(route(ports))


async def rollout(port, prompts):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for prompt in prompts:
        writer.write(prompt)
        await reader.readline()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=router_main, args=(theirs,), daemon=True).start()
    port = ours.recv()
    print("ready", flush=True)
    asyncio.run(rollout(port, [b"short\n", b"long\n", b"short\n", b"long\n", b"short\n"]))
