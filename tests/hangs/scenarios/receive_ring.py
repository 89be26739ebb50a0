"""Every rank receives before it sends."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
incoming = torch.empty(4)
dist.recv(incoming, src=(rank - 1) % world)
dist.send(values, dst=(rank + 1) % world)
