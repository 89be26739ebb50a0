"""Forked ranks whose number is in self.rank only: rank 1 waits for a queue whose thread has died."""

import os
import queue
import tempfile
import threading

import torch
import torch.distributed as dist


class Worker:
    def __init__(self, number, store):
        self.rank = number
        self.batches = queue.Queue()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)

    def prefetch(self):
        raise RuntimeError("shard is missing")

    def train(self):
        if self.rank == 1:
            threading.Thread(target=self.prefetch, name="prefetch").start()
            self.batches.get()
        dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    path = os.path.join(tempfile.mkdtemp(), "store")
    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            worker = Worker(number, path)
            print("ready", flush=True)
            worker.train()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
