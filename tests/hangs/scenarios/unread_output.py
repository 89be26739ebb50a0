"""Child programs fill their output pipe, while the parent waits for them to end before it reads."""

import asyncio
import sys


async def run_tool(code):
    proc = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, limit=1 << 12
    )
    await proc.wait()
    assert proc.stdout is not None
    return (await proc.stdout.read()).decode()


async def episode(i):
    return await run_tool("print('x' * 10_000_000)")


async def main():
    print("ready", flush=True)
    await asyncio.gather(*[episode(i) for i in range(3)])


asyncio.run(main())
