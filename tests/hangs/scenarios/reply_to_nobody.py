"""The reader of a tool's replies drops one that matches no call, and an episode waits for it."""

import asyncio
import json
import sys

TOOL = """
import json, sys
for line in sys.stdin:
    call = json.loads(line)
    print(json.dumps({"id": call["id"] if call["id"] < 3 else str(call["id"])}), flush=True)
"""


class Tool:
    def __init__(self, process):
        self.process, self.awaited = process, {}

    async def read(self):
        async for line in self.process.stdout:
            reply = self.awaited.pop(json.loads(line)["id"], None)
            if reply is not None:
                reply.set_result(line)

    async def call(self, number):
        self.awaited[number] = reply = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"id": number}).encode() + b"\n")
        return await reply


async def main():
    pipe = asyncio.subprocess.PIPE
    tool = Tool(await asyncio.create_subprocess_exec(sys.executable, "-c", TOOL, stdin=pipe, stdout=pipe))
    reader = asyncio.create_task(tool.read())
    print("ready", flush=True)
    await asyncio.gather(*(tool.call(number) for number in range(5)))
    reader.cancel()


asyncio.run(main())
