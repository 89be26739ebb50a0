"""One rank of each tensor-parallel pair gathers a sharded weight, and the other one has gone on to a barrier."""

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
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
print("ready", flush=True)
for step in range(6):
    model(torch.ones(2, 8)).sum().backward()
    if step == 3 and mesh["tensor"].get_local_rank() == 0:
        print(norm(model[0].weight), flush=True)
    dist.barrier()
