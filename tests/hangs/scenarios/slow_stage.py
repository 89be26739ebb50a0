"""No hang: the middle stage of a pipeline computes for two seconds a micro-batch, and the others wait in recv."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
while True:
    if rank:
        dist.recv(values, rank - 1)
    if rank == 1:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            values.mul(1.0)
    dist.send(values, (rank + 1) % world)
    if rank == 0:
        dist.recv(values, world - 1)
