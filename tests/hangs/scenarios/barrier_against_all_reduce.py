"""One rank saves a checkpoint and waits in a barrier that the others never reach."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)


def save_checkpoint():
    dist.barrier()


for step in range(100):
    if step == 3 and rank == 2:
        save_checkpoint()
    dist.all_reduce(values)
