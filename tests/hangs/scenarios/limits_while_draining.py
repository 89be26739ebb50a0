"""A cancelled generation stays counted, so an update waits for it forever. Meanwhile each request times out."""

import asyncio

SLOW, LIMIT_S = 40, 0.6


class Engine:
    def __init__(self):
        self.paused, self.in_flight = False, 0

    async def generate(self, prompt):
        while self.paused:
            await asyncio.sleep(0.05)
        self.in_flight += 1
        await asyncio.sleep(30 if prompt == SLOW else 0.02)
        self.in_flight -= 1
        return [prompt]

    async def begin_update(self):
        self.paused = True
        while self.in_flight:
            await asyncio.sleep(0.03)

    def end_update(self):
        self.paused = False


class Collector:
    def __init__(self, engine):
        self.engine, self.completions = engine, asyncio.Queue()
        self.asked, self.dropped = 0, 0

    async def work(self):
        while True:
            self.asked += 1
            try:
                tokens = await asyncio.wait_for(self.engine.generate(self.asked), timeout=LIMIT_S)
            except TimeoutError:
                self.dropped += 1
                if self.dropped == 4:
                    print("ready", flush=True)
                continue
            await self.completions.put(tokens)


async def train():
    engine = Engine()
    collector = Collector(engine)
    workers = [asyncio.create_task(collector.work()) for _ in range(4)]
    while not any(worker.done() for worker in workers):
        for _ in range(16):
            await collector.completions.get()
        await engine.begin_update()
        engine.end_update()


asyncio.run(train())
