"""Rank 0 takes one micro-batch more than all others, among them its partner, which must not be blamed."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]


def train(step):
    total = torch.zeros(1)
    for _micro in range(3 if rank == 0 and step == 3 else 2):
        dist.all_reduce(total, group=pairs[rank // 2])
    dist.all_reduce(total)


for step in range(9):
    train(step)
    if step == 2:
        print("ready", flush=True)
