"""Every group is dropped, and nothing counts them; the learner waits for a batch."""

import asyncio


class Groups:
    """Keeps groups whose rewards differ."""

    def __init__(self) -> None:
        self.kept: list[list[float]] = []
        self.more = asyncio.Condition()

    async def add(self, group):
        if max(group) == min(group):
            return
        async with self.more:
            self.kept.append(group)
            self.more.notify()

    async def take(self, count):
        async with self.more:
            await self.more.wait_for(lambda: len(self.kept) >= count)
            return self.kept[:count]


async def score(answer):
    await asyncio.sleep(0.03)
    return 0.0


async def sample(groups):
    while True:
        answers = [f"answer {n}" for n in range(4)]
        await groups.add([await score(answer) for answer in answers])


async def learn(groups):
    while True:
        await groups.take(4)


async def main():
    groups = Groups()
    print("ready", flush=True)
    await asyncio.gather(learn(groups), *(sample(groups) for _ in range(3)))


asyncio.run(main())
