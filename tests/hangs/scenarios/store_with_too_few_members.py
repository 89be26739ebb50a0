"""Rank 0 makes a store of its own for five members, of which only three exist."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist


def connect(port, world_size):
    return dist.TCPStore("127.0.0.1", port, world_size, dist.get_rank() == 0, timedelta(minutes=30))  # pyright: ignore[reportPrivateImportUsage]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print("ready", flush=True)
    if rank == 0:
        connect(port, 2 * int(os.environ["WORLD_SIZE"]) - 1)
    dist.barrier()


main()
