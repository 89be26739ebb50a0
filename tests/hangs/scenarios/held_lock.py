"""A thread of rank 1 holds a lock and waits for something else."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
import threading  # noqa: E402

lock = threading.Lock()


def hold():
    with lock:
        time.sleep(3600)


if rank == 1:
    threading.Thread(target=hold, daemon=True).start()
    time.sleep(0.2)
    with lock:
        values += 1
dist.all_reduce(values)
