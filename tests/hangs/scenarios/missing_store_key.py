"""Rank 1 asks the store for a key that nobody sets."""

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(hours=2))
store = dist.distributed_c10d._get_default_store()
rank = dist.get_rank()
net = torch.nn.Linear(8, 8)


def sync_version(step):
    if rank == 0:
        store.set(f"weights_version/{step}", "ok")
        return step
    # off by one: asks for the version after the one that was published
    return store.get(f"weights_version/{step + 1}")


print("ready", flush=True)
for step in range(3):
    sync_version(step)
    for p in net.parameters():
        dist.all_reduce(p.data)
