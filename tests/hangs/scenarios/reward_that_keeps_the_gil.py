"""A reward computes a huge power in one call, which keeps the GIL. So the limit of its pool never takes effect."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist


def verify(answer: tuple[int, int, int]) -> int:
    base, power, modulus = answer
    return base**power % modulus


def score(pool: ThreadPoolExecutor, answers: list[tuple[int, int, int]]) -> float:
    jobs = [pool.submit(verify, each) for each in answers]
    return float(sum(job.result(timeout=5.0) == 1 for job in jobs))


dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(100):
    if step == 3:
        print("ready", flush=True)
    answers = [(3, 2, 8), (7, 10**9 if (step, rank) == (3, 0) else 2, 48)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        reward = torch.tensor(score(pool, answers))
    dist.all_reduce(reward)
    time.sleep(0.1)
