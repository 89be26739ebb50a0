"""A saver holds a lock of asyncio while it waits for the evaluation to end, which wants that lock first."""

import asyncio


class Evaluation:
    def __init__(self, weights):
        self.weights = weights
        self.idle = asyncio.Event()

    async def run(self):
        await asyncio.sleep(0.1)
        async with self.weights:
            await asyncio.sleep(0.05)
        self.idle.set()


async def save(weights, evaluation):
    async with weights:
        await evaluation.idle.wait()


async def train():
    weights = asyncio.Lock()
    evaluation = Evaluation(weights)
    jobs = [asyncio.create_task(save(weights, evaluation)), asyncio.create_task(evaluation.run())]
    print("ready", flush=True)
    await asyncio.gather(*jobs)


asyncio.run(train())
