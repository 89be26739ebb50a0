"""Rank 0 forks a service while it has locked the cache, and closes the file: the service keeps it locked."""

import fcntl
import multiprocessing
import time

import torch.distributed as dist


def serve(requests: multiprocessing.Queue) -> None:
    while True:
        requests.get()


dist.init_process_group("gloo")
rank = dist.get_rank()
if rank > 0:
    time.sleep(2)
print("ready", flush=True)
with open(__file__) as file:  # it stands for the lock file of a cache
    fcntl.flock(file, fcntl.LOCK_EX)
    if rank == 0:
        context = multiprocessing.get_context("fork")
        context.Process(target=serve, args=(context.Queue(),), daemon=True).start()
dist.barrier()
