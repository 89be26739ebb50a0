"""Rank 0 finds nothing to resume from and goes on; ranks 1 and 2 wait for the name that it would have set."""

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(hours=2))
board = dist.distributed_c10d.PrefixStore("resume", dist.distributed_c10d._get_default_store())
net = torch.nn.Linear(4, 2)


def newest():
    return None


def resume():
    if dist.get_rank() == 0:
        name = newest()
        if name is None:
            return 0
        board.set("name", name)
    return int(board.get("name"))


print("ready", flush=True)
step = resume()
for p in net.parameters():
    dist.broadcast(p.data, src=0)
