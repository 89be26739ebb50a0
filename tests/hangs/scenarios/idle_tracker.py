"""Rank 0 writes to a program that does not read."""

import json
import subprocess
import sys

import torch
import torch.distributed as dist


class Tracker:
    """Sends metrics to a side process, in the style of experiment trackers."""

    def __init__(self):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9999)"], stdin=subprocess.PIPE)

    def log(self, **metrics):
        assert self.child.stdin is not None
        self.child.stdin.write((json.dumps(metrics) + "\n").encode())
        self.child.stdin.flush()


def run():
    dist.init_process_group("gloo")
    tracker = Tracker() if dist.get_rank() == 0 else None
    loss = torch.zeros(1)
    print("ready", flush=True)
    step = 0
    while step < 10**7:
        dist.all_reduce(loss)
        if tracker:
            tracker.log(step=step, loss=float(loss), note="x" * 4000)
        step += 1


run()
