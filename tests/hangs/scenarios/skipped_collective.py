"""Rank 0 skips a collective and sleeps."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
if rank == 0:
    time.sleep(3600)
dist.all_reduce(values)
