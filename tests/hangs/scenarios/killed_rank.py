"""A spawned rank was killed. It said its number only in a variable, so the number follows from the others'."""

import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    dist.all_reduce(torch.ones(4))
    print("ready", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists(f"{path}.of_rank_1"):
        time.sleep(0.3)


if __name__ == "__main__":
    path = os.path.join(tempfile.mkdtemp(), "store")
    ranks = [mp.get_context("spawn").Process(target=worker, args=(n, 3, path)) for n in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(1)
