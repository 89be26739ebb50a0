"""One rank has no gradient for one parameter. Its next sums fit those of the others by their bytes, until the last."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.elastic.control_plane import worker_main

if "TORCH_WORKER_SERVER_SOCKET" not in os.environ:  # as a launcher would set it
    socket = f"{tempfile.gettempdir()}/{os.getpid()}.sock"
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TORCH_WORKER_SERVER_SOCKET": socket})


def reduce_gradients(gradients: list[torch.Tensor | None]) -> None:
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient)


def train() -> None:
    dist.init_process_group("gloo")
    gradients = [torch.ones(4, 2), torch.ones(2, 4), torch.ones(8), torch.ones(1, 8)]
    dist.all_reduce(torch.ones(1))
    print("ready", flush=True)
    reduce_gradients([None if dist.get_rank() == 2 and n == 1 else each for n, each in enumerate(gradients)])
    dist.barrier()


with worker_main():  # type: ignore[reportOptionalContextManager]
    train()
