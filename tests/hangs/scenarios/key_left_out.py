"""The learner drops an update that is not finite, and with it the key for which the sampler waits."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
LIMIT = timedelta(minutes=30)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=LIMIT)  # pyright: ignore[reportPrivateImportUsage]


class Weights:
    def push(self, version):
        store.set(f"weights/{version}", "written")

    def pull(self, version):
        key = f"weights/{version}"
        store.wait([key], LIMIT)


def learn(weights):
    for step in range(100):
        batch = torch.empty(4)
        dist.recv(batch, src=1)
        if not torch.isfinite(batch).all():
            continue
        weights.push(step)
        print("ready" if step == 2 else f"step {step}", flush=True)


def sample(weights):
    for step in range(100):
        dist.send(torch.full((4,), 1.0 / (3 - step) if step < 3 else float("inf")), dst=0)
        weights.pull(step)
        print("ready" if step == 2 else f"step {step}", flush=True)


learn(Weights()) if dist.get_rank() == 0 else sample(Weights())
