"""A coroutine of the orchestrator calls time.sleep, and a worker thread waits for the loop."""

import asyncio
import time


async def score(episode):
    time.sleep(3600)
    return episode


async def rollouts():
    await asyncio.gather(*(score(n) for n in range(4)))


async def main():
    print("ready", flush=True)
    await asyncio.gather(rollouts(), asyncio.sleep(1))


asyncio.run(main())
