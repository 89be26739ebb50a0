"""Keys and values travel round a ring. The slice of rank 2 has no token, so it returns before its first shift."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def attention(tokens):
    if tokens == 0:
        return torch.zeros(4)
    sent = torch.ones(4)
    for _ in range(world - 1):
        received = torch.empty(4)
        works = [dist.isend(sent, (rank + 1) % world), dist.irecv(received, (rank - 1) % world)]
        for work in works:
            work.wait()  # type: ignore[union-attr]
        sent = received
    return sent


for step in range(9):
    out = attention(0 if rank == 2 and step == 3 else 8)
    dist.all_reduce(out)
    if step == 2:
        print("ready", flush=True)
