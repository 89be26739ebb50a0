"""A coroutine polls for a file that never appears, while another one prints a heartbeat."""

import asyncio
import os


async def heartbeat():
    beats = 0
    while True:
        beats += 1
        await asyncio.sleep(0.2)


async def wait_for_checkpoint(path):
    while not os.path.exists(path):
        await asyncio.sleep(0.1)


async def main():
    print("ready", flush=True)
    await asyncio.gather(heartbeat(), wait_for_checkpoint("/nonexistent/step-3"))


asyncio.run(main())
