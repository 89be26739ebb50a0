"""Only rank 0 calls new_group."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
if rank == 0:
    dist.new_group([0, 1])
dist.all_reduce(values)
