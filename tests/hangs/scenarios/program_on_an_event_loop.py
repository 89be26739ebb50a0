"""A reward runs a program without a time limit in a coroutine: on rank 1 it never ends, and blocks the event loop."""

import asyncio
import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


class Reward:
    def run(self, source):
        return subprocess.run([sys.executable, "-S", "-c", source], capture_output=True, text=True).stdout

    async def __call__(self, step, index):
        await asyncio.sleep(0.03)
        endless = step == 3 and index == 1 and rank == 1
        return float(len(self.run("while True: pass" if endless else "print(1)")))


async def train():
    reward = Reward()
    for step in range(100):
        rewards = torch.tensor(await asyncio.gather(*(reward(step, index) for index in range(3))))
        dist.all_reduce(rewards)
        print("ready" if step == 2 else f"step {step}", flush=True)


asyncio.run(train())
