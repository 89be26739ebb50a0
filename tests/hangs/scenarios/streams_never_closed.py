"""Streamed answers are abandoned halfway and never closed, until the client runs out of connections."""

import asyncio

import httpx


async def answer(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ntoken\r\n")
    await asyncio.sleep(3600)


class Sampler:
    def __init__(self, url):
        self.url = url
        self.client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=2))
        self.answers = []

    async def sample(self):
        answer = await self.client.send(self.client.build_request("GET", self.url), stream=True)
        texts = answer.aiter_text()
        self.answers.append(texts)  # the rest may be wanted later
        async for text in texts:
            return text


async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sampler = Sampler(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await sampler.sample()
    print("ready", flush=True)
    await asyncio.gather(*(sampler.sample() for _ in range(4)))


asyncio.run(main())
