"""A regular expression on rank 1 takes forever and holds the GIL."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
import re  # noqa: E402

if rank == 1:
    re.match(r"(a+)+$", "a" * 60 + "b")
dist.all_reduce(values)
