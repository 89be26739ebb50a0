"""No hang: coroutines sleep and finish, four at a time."""

import asyncio

finished = 0


async def episode():
    global finished
    await asyncio.sleep(0.2)
    finished += 1


async def main():
    print("ready", flush=True)
    step = 0
    while True:
        await asyncio.gather(*(episode() for _ in range(4)))
        step += 1


asyncio.run(main())
