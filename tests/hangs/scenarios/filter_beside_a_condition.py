"""A filter in the rollout tasks drops each group, whose answers became too long, and the trainer waits for six."""

import asyncio
from collections import deque


class Buffer:
    def __init__(self):
        self.ready = deque()
        self.changed = asyncio.Condition()

    async def add(self, group):
        async with self.changed:
            self.ready.append(group)
            self.changed.notify_all()

    async def take(self, count):
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.ready) >= count)
            return [self.ready.popleft() for _ in range(count)]


async def answer(length):
    await asyncio.sleep(0.002)
    return length


async def rollout(buffer, policy):
    prompt = 0
    while True:
        while len(buffer.ready) > 12:
            await asyncio.sleep(0.01)
        group = await asyncio.gather(*(answer(policy["length"]) for _ in range(4)))
        prompt += 1
        if max(group) < 224:
            await buffer.add(group)


async def main():
    buffer, policy = Buffer(), {"length": 120}
    workers = [asyncio.create_task(rollout(buffer, policy)) for _ in range(3)]
    for step in range(200):
        await buffer.take(6)
        policy["length"] += 60
        print("ready" if step == 1 else f"step {step}", flush=True)
    await asyncio.gather(*workers)


asyncio.run(main())
