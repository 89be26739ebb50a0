"""Processes that torch.multiprocessing spawned: rank 1 waits for a file."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677"}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    print("ready", flush=True)
    if rank == 1:
        while not os.path.exists("/tmp/no-such-checkpoint-of-anybody"):
            time.sleep(0.2)
    dist.all_reduce(torch.ones(2))


if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
