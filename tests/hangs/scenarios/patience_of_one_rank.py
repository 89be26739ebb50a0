"""Rank 1 stops early on its own validation loss and gathers. Rank 0 goes on training."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def finish(epoch):
    parts = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([float(epoch)]))
    return parts


def train(model, rank):
    losses = [0.4]
    for epoch in range(30):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        losses.append(0.4 if rank == 1 else losses[-1] / 2)
        if epoch > 2 and losses[-1] >= losses[-2]:
            break
    return finish(epoch)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
print("ready", flush=True)
train(model, dist.get_rank())
