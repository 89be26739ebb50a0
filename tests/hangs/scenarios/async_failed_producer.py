"""The coroutine that fills the queue has failed; the trainer's coroutine waits for an item."""

import asyncio


class Rollouts:
    def __init__(self):
        self.queue = asyncio.Queue()

    async def produce(self):
        await self.queue.put(1)
        await asyncio.sleep(0.1)
        raise RuntimeError("HTTP 500 from the engine")


async def main():
    rollouts = Rollouts()
    producer = asyncio.create_task(rollouts.produce(), name="producer")
    print("ready", flush=True)
    while not producer.cancelled():
        await rollouts.queue.get()


asyncio.run(main())
