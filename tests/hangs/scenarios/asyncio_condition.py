"""A coroutine waits for a notification that nobody sends."""

import asyncio


async def main():
    admitted = asyncio.Condition()
    print("ready", flush=True)
    async with admitted:
        await admitted.wait()


asyncio.run(main())
