"""No hang: DDP with two backward passes for each step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8)))
opt = torch.optim.AdamW(model.parameters())
print("ready", flush=True)
for it in range(10**8):
    with model.no_sync():
        model(torch.randn(32, 64)).pow(2).mean().backward()
    model(torch.randn(32, 64)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
