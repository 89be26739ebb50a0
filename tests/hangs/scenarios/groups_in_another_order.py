"""Once, rank 1 gathers statistics of all ranks before it synchronises with rank 0, and not after that."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
print("ready", flush=True)
rank = dist.get_rank()


def gather():
    dist.all_reduce(torch.ones(4))


def synchronise():
    if rank < 2:
        dist.all_reduce(torch.ones(4), group=pair)


def train(step):
    if rank == 1 and step == 20:
        gather()
    time.sleep(0.02)
    synchronise()
    if step % 5 == 0 and not (rank == 1 and step == 20):
        gather()


for step in range(10_000):
    train(step)
