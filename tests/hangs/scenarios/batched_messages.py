"""The two ranks post three receives and two sends."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(4))
print("ready", flush=True)
rows = [torch.ones(4) for _ in range(5)]
ops = [dist.P2POp(dist.isend, row, 1 - rank) for row in rows[:2]]
ops += [dist.P2POp(dist.irecv, row, 1 - rank) for row in rows[2:]]
for work in dist.batch_isend_irecv(ops):
    work.wait()
