"""Two ranks gather while one reduces."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
if rank == 1:
    dist.reduce(values, dst=0)
else:
    dist.gather(values, [torch.empty(4) for _ in range(world)] if rank == 0 else None, dst=0)
dist.barrier()
