"""Rank 0 opens a pipe that nobody writes to."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
import os  # noqa: E402
import tempfile  # noqa: E402

path = os.path.join(tempfile.mkdtemp(), "commands")
if rank == 0:
    os.mkfifo(path)
    with open(path) as commands:
        commands.readline()
dist.broadcast(values, src=0)
