"""Rank 1 fails, and its finally waits in a barrier while the others train."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)


def train():
    for step in range(100):
        if rank == 1 and step == 2:
            raise ValueError("bad batch")
        dist.all_reduce(values)


try:
    train()
finally:
    dist.barrier()
    dist.destroy_process_group()
