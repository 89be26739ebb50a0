"""Rank 0 gathers metrics while rank 1 broadcasts a configuration."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
if rank == 0:
    metrics = [None] * world
    dist.all_gather_object(metrics, {"loss": 1.0})
else:
    config = [None]
    dist.broadcast_object_list(config, src=0)
