"""The driver asks one of two trainers for a step: the other one, an idle actor, never joins its all_reduce."""

import os
import socket
import tempfile

import ray
import torch
import torch.distributed as dist

os.environ |= {"RAY_TMPDIR": tempfile.gettempdir(), "RAY_AUTH_MODE": "disabled"}


@ray.remote
class Trainer:
    def __init__(self, number, port):
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=2)

    def step(self):
        total = torch.ones(4)
        dist.all_reduce(total)
        return float(total[0])


with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
trainers = [Trainer.remote(number, port) for number in range(2)]
print(ray.get([trainer.step.remote() for trainer in trainers]), flush=True)
print("ready", flush=True)
ray.get(trainers[0].step.remote())
