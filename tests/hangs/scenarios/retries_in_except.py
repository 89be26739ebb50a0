"""Rank 1 runs out of memory and trains on two halves of its batch within the handler: it reduces once more."""

import torch
import torch.distributed as dist

LIMIT = 8

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)


def train_on(batch):
    try:
        if len(batch) > LIMIT:
            raise torch.OutOfMemoryError("out of memory")
        gradient = batch.sum().reshape(1)
        dist.all_reduce(gradient)
        return gradient
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
        half = len(batch) // 2
        return train_on(batch[:half]) + train_on(batch[half:])


for step in range(100):
    train_on(torch.ones(12 if rank == 1 and step == 2 else 6))
    losses = [None] * world
    dist.all_gather_object(losses, {"rank": rank, "step": step})
