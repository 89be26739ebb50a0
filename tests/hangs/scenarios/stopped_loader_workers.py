"""The workers of rank 1's data loader are stopped by a signal."""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    batches = iter(DataLoader(TensorDataset(torch.ones(4096, 4)), batch_size=4, num_workers=2))
    print("ready", flush=True)
    for step, (batch,) in enumerate(batches):
        dist.all_reduce(batch)
        if step == 3 and dist.get_rank() == 1:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGSTOP)


if __name__ == "__main__":
    main()
