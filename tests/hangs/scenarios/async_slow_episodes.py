"""No hang: coroutines of episodes take 1.5 seconds each."""

import asyncio


class Trainer:
    def __init__(self):
        self.queue = asyncio.Queue()
        self.version = 0

    async def play(self):
        while True:
            await asyncio.sleep(1.5)
            await self.queue.put(self.version)

    async def train(self):
        while True:
            await self.queue.get()
            self.version += 1


async def main():
    trainer = Trainer()
    print("ready", flush=True)
    await asyncio.gather(trainer.play(), trainer.train())


asyncio.run(main())
