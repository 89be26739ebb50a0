"""Episodes ask a busy sandbox again after seconds, and one after the other ends."""

import asyncio
import itertools


class Sandbox:
    def __init__(self):
        self.calls = itertools.count()

    async def run(self):
        for attempt in range(20):
            if next(self.calls) % 3 == 2:
                await asyncio.sleep(2.0)
                return attempt
            print("busy", flush=True)
            await asyncio.sleep(2.0 + attempt)


async def episode(sandbox):
    for _ in range(2):
        await sandbox.run()


async def main():
    sandbox = Sandbox()
    print("ready", flush=True)
    for _ in range(100):
        await asyncio.gather(*(episode(sandbox) for _ in range(6)))


asyncio.run(main())
