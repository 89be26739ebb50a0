"""Rank 1 swallows an exception and goes on to the barrier after the loop."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
try:
    for step in range(100):
        if rank == 1 and step == 2:
            raise RuntimeError("lost a file")
        dist.all_reduce(values)
except RuntimeError:
    pass
dist.barrier()
