"""Rank 1 is stopped by a signal."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
import os  # noqa: E402
import signal  # noqa: E402

if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(values)
