"""Rank 1 has one batch less, so its peer's backward waits for it."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
print("ready", flush=True)
for _batch in range(3 if rank == 0 else 2):
    model(torch.randn(2, 4)).sum().backward()
if rank == 1:
    time.sleep(3600)
