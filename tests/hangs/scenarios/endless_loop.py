"""Rank 1 loops forever in Python."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)


def find_boundary(tokens):
    place = 0
    while tokens[place] != 7:
        place = (place + 1) % len(tokens)
    return place


if rank == 1:
    find_boundary([1, 2, 3])
dist.all_reduce(values)
