"""Rank 0 alone gathers a sharded weight for its log. Its partner is in the next forward pass, the rest wait."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def norm(weight):
    assert isinstance(weight, DTensor)
    return weight.full_tensor().norm()


dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
print("ready", flush=True)
for step in range(6):
    model(torch.ones(2, 8)).sum().backward()
    for weight in model.parameters():
        assert isinstance(weight.grad, DTensor)
        dist.all_reduce(weight.grad.to_local(), group=mesh["data"].get_group())
    if step == 3 and rank == 0:
        print(norm(model[0].weight), flush=True)
