"""Two programs that an agent has started compute, and it waits for their output."""

import asyncio
import sys

COUNT = """
import time
total = 0
for number in range(100000):
    time.sleep(0.4)
    total += number
"""


async def run():
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", COUNT, stdout=asyncio.subprocess.PIPE)
    return await program.communicate()


async def main():
    print("ready", flush=True)
    await asyncio.gather(run(), run())


asyncio.run(main())
