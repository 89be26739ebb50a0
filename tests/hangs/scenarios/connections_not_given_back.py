"""A client keeps a connection of its pool after each answer of 503: in the end its threads wait for one another's."""

import asyncio
import http.client
import multiprocessing
import queue
import threading

POOL = 4


def serve(ready):
    count = 0

    async def answer(reader, writer):
        nonlocal count
        while await reader.readuntil(b"\r\n\r\n"):
            count += 1
            status = b"503 Busy" if count > 40 else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async def main():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ready.put(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(main())


class Client:
    def __init__(self, port):
        self.free = queue.LifoQueue()
        for _ in range(POOL):
            self.free.put(http.client.HTTPConnection("127.0.0.1", port))

    def complete(self):
        while True:
            connection = self.free.get()
            connection.request("GET", "/")
            response = connection.getresponse()
            text = response.read()
            if response.status == 200:
                self.free.put(connection)
                return text


def work(client, out):
    while True:
        out.put(client.complete())


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    ready, out = spawn.Queue(), queue.Queue(maxsize=8)
    spawn.Process(target=serve, args=(ready,), daemon=True).start()
    client = Client(ready.get())
    for _ in range(POOL):
        threading.Thread(target=work, args=(client, out), daemon=True).start()
    for step in range(100):
        batch = [out.get() for _ in range(8)]
        print("ready" if step == 3 else f"step {step}", flush=True)
