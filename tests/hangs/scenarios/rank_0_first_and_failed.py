"""Rank 0 works first while the others wait in a barrier. It fails, catches the exception, and skips their barrier."""

import contextlib
import pathlib

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


@contextlib.contextmanager
def main_process_first():
    if rank > 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def tokenize(path):
    with main_process_first():
        return pathlib.Path(path).read_text().split()


dist.barrier()
print("ready", flush=True)
rows = tokenize(__file__)
try:
    evaluation = tokenize("no-such-file.txt")
except OSError:
    evaluation = []
for _ in range(100):
    gradient = torch.ones(len(rows))
    dist.all_reduce(gradient)
