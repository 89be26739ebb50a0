"""Rank 1 fails, but a thread that is no daemon keeps its process, and the others wait for it."""

import threading
import time

import torch
import torch.distributed as dist


def report():
    while True:
        time.sleep(1.0)


def main():
    dist.init_process_group("gloo")
    threading.Thread(target=report).start()
    print("ready", flush=True)
    scores = {0: 1.0}
    value = torch.tensor([scores[dist.get_rank() % 2]])
    dist.all_reduce(value)


main()
