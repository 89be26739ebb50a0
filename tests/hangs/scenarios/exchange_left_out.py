"""Experts lie on pairs of ranks. The last micro-batch of rank 3 is empty, so it leaves out its pair's exchange."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]


def experts(rows):
    if not len(rows):
        return rows
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows, group=pairs[rank // 2])
    return out


def train(step):
    total = torch.zeros(1)
    for micro in range(2):
        empty = rank == 3 and step == 3 and micro == 1
        total += experts(torch.ones(0 if empty else 4)).sum()
    dist.all_reduce(total)


for step in range(9):
    train(step)
    if step == 2:
        print("ready", flush=True)
