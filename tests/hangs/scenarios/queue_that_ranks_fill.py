"""A rank has left the loop and waits for work that only rank 0, which waits for it in a collective, can put."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, queues):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29679"}
    dist.init_process_group("gloo", rank=rank, world_size=len(queues))
    for step in range(4):
        if rank == 0:
            for each in queues:
                each.put(step)
        assert queues[rank].get() == step
        dist.all_reduce(torch.ones(2))
    print("ready", flush=True)
    if rank == 2:
        queues[rank].get()
    dist.all_gather_object([None] * len(queues), rank)


if __name__ == "__main__":
    context = mp.get_context("spawn")  # pyright: ignore[reportPrivateImportUsage]
    mp.spawn(work, args=([context.Queue() for _ in range(3)],), nprocs=3)  # pyright: ignore[reportPrivateImportUsage]
