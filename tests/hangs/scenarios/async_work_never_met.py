"""Rank 0 waits for an asynchronous reduction that rank 1 never starts."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
if rank == 0:
    work = dist.all_reduce(values, async_op=True)
    work.wait()  # pyright: ignore[reportOptionalMemberAccess]
else:
    dist.broadcast(values, src=0)
