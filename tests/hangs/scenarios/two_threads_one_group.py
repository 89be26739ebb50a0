"""A thread reduces its counts in the group in which the main thread broadcasts, on rank 1 in the other order."""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def report():
    time.sleep(rank * 1.0)
    dist.all_reduce(torch.ones(4))


threading.Thread(target=report, name="report", daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
dist.broadcast(torch.ones(4), src=0)
