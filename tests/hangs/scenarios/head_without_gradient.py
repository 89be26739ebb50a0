"""DDP reduces nothing on a rank whose loss leaves out a head, so it goes on to the next collective of that step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
metrics = dist.new_group([0, 1])


class ActorCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.value = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x, with_value):
        return self.policy(x).sum() + (self.value(x).sum() if with_value else 0)


model = DistributedDataParallel(ActorCritic())


def update(with_value):
    loss = model(torch.ones(2, 4), with_value)
    loss.backward()
    return loss.detach()


def mean(value):
    dist.all_reduce(value, group=metrics)
    return value / 2


for step in range(9):
    loss = update(with_value=rank == 0 or step < 3)
    mean(loss)
    if step == 2:
        print("ready", flush=True)
