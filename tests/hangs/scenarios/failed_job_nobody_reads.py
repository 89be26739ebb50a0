"""A job of a thread pool should go on filling a queue. It has failed, and nobody asks for its result."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor

PROMPTS = [{"id": n, "answer": str(n)} for n in range(8)]
del PROMPTS[5]["answer"]


class Rollout:
    def __init__(self) -> None:
        self.samples: queue.Queue[tuple[int, float]] = queue.Queue(maxsize=2)
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.job = self.pool.submit(self.produce)

    def score(self, prompt: dict) -> float:
        time.sleep(0.1)
        return float(len(prompt["answer"]))

    def produce(self) -> None:
        for prompt in PROMPTS * 100:
            self.samples.put((prompt["id"], self.score(prompt)))

    def batch(self) -> list[tuple[int, float]]:
        return [self.samples.get() for _ in range(2)]


rollout = Rollout()
for step in range(100):
    if step == 2:
        print("ready", flush=True)
    print("step", step, rollout.batch(), flush=True)
