"""A tool that an agent runs waits for input that nobody gives."""

import asyncio
import sys


async def main():
    tool = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input('sure? ')", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert tool.stdout is not None
    print("ready", flush=True)
    answer = asyncio.ensure_future(tool.stdout.read())
    await tool.wait()
    print(await answer)


asyncio.run(main())
