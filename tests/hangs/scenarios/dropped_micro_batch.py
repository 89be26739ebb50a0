"""A stage drops a micro-batch that is not finite, so the last stage waits for it, and the stage for gradients."""

import torch
import torch.distributed as dist

MICRO_BATCHES = 4


class Stage:
    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        x = torch.full((2, 3), 1.0 + number)
        if self.rank > 0:
            dist.recv(x, src=self.rank - 1)
        if self.rank == 1 and (step, number) == (3, 2):
            x = x * float("inf")
        y = self.layer(x.requires_grad_())
        if not y.isfinite().all():
            return None
        if self.rank + 1 < self.world:
            dist.send(y.detach(), dst=self.rank + 1)
        return x, y

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        gradient = torch.ones_like(y)
        if self.rank + 1 < self.world:
            dist.recv(gradient, src=self.rank + 1)
        y.backward(gradient)
        if self.rank > 0 and x.grad is not None:
            dist.send(x.grad, dst=self.rank - 1)

    def step(self, step: int) -> None:
        done = []
        for number in range(MICRO_BATCHES):
            if (pair := self.forward(step, number)) is not None:
                done.append(pair)
        for x, y in done:
            self.backward(x, y)


dist.init_process_group("gloo")
stage = Stage()
for step in range(6):
    if step == 3:
        print("ready", flush=True)
    stage.step(step)
