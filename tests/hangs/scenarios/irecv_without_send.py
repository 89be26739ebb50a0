"""Each of two ranks waits for a message that the other sends only after its own receive."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = torch.ones(4)
dist.all_reduce(values)
print("ready", flush=True)
request = dist.irecv(values, src=1 - rank)
request.wait()  # pyright: ignore[reportOptionalMemberAccess]
dist.send(values, dst=1 - rank)
