"""The receiver expects one micro-batch more than is sent."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
micro_batches = 4 if rank == 0 else 5
for _ in range(micro_batches):
    if rank == 0:
        dist.send(values, dst=1)
    else:
        dist.recv(values, src=0)
dist.barrier()
