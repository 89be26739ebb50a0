"""Two groups of the same ranks are used in opposite order."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
data_group = dist.new_group([0, 1])
model_group = dist.new_group([0, 1])
if rank == 0:
    dist.all_reduce(values, group=data_group)
    dist.all_reduce(values, group=model_group)
else:
    dist.all_reduce(values, group=model_group)
    dist.all_reduce(values, group=data_group)
