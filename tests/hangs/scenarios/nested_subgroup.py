"""Ranks 0 and 1 wait in a barrier, rank 3 in a subgroup with rank 2, and rank 2 sleeps."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
pair = dist.new_group(ranks=[2, 3])
if rank == 2:
    time.sleep(3600)
if rank >= 2:
    dist.all_reduce(values, group=pair)
dist.barrier()
