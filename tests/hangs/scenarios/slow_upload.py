"""Rank 0 uploads a checkpoint to a server that reads slowly; rank 1 waits in a barrier."""

import multiprocessing as mp
import socket
import time

import torch.distributed as dist


def receive(listener):
    connection, _ = listener.accept()
    while connection.recv(65536):
        time.sleep(0.3)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        mp.get_context("fork").Process(target=receive, args=(listener,), daemon=True).start()
        client = socket.create_connection(listener.getsockname())
        print("ready", flush=True)
        client.sendall(bytes(64_000_000))
    else:
        print("ready", flush=True)
    dist.barrier()
