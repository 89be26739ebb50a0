"""One of three ranks has an old port in its settings, and looks for the others there."""

import os
import time

from torch.multiprocessing.spawn import spawn


def worker(rank: int, ports: list[int]) -> None:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[rank]), "RANK": str(rank), "WORLD_SIZE": "3"}
    print("ready", flush=True)
    dist.init_process_group("gloo")
    time.sleep(3600)


if __name__ == "__main__":
    from socket import socket

    with socket() as one, socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        new, old = one.getsockname()[1], other.getsockname()[1]
    spawn(worker, args=([new, old, new],), nprocs=3)
