"""An asynchronous actor of Ray was paused for an update and never resumed; the trainer is in ray.wait."""

import asyncio
import os
import tempfile

import ray

os.environ |= {"RAY_TMPDIR": tempfile.gettempdir(), "RAY_AUTH_MODE": "disabled"}


@ray.remote
class Engine:
    def __init__(self):
        self.resumed = asyncio.Event()
        self.resumed.set()

    async def pause(self):
        self.resumed.clear()

    async def generate(self, prompt):
        await self.resumed.wait()
        return [prompt] * 4


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
engine = Engine.remote()
for step in range(2):
    pending = [engine.generate.remote(prompt) for prompt in range(4)]
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=None)
    ray.get(engine.pause.remote())
    print("ready", flush=True)
