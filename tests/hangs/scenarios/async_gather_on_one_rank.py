"""Rank 1 begins an asynchronous all_gather that rank 0 does not begin; both go on to the same all_reduce."""

import torch
import torch.distributed as dist


class Meter:
    def __init__(self):
        self.pending = []

    def update(self, value):
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        self.pending.append(dist.all_gather(parts, value, async_op=True))


class Trainer:
    def __init__(self):
        self.meter = Meter()

    def step(self, number):
        gradient = torch.ones(8)
        if number == 3 and dist.get_rank() == 1:
            self.meter.update(torch.ones(1))
        dist.all_reduce(gradient)


dist.init_process_group("gloo")
print("ready", flush=True)
trainer = Trainer()
for number in range(100):
    trainer.step(number)
