"""One rank answers with an error and waits for its next order. The other waits for it in a collective."""

import multiprocessing
import os
import socket

import torch
import torch.distributed as dist

WORLD = 2


def train(rows):
    assert len(rows) > 1, "too few rows for two micro-batches"
    for micro in (rows[::2], rows[1::2]):
        dist.all_reduce(torch.tensor([float(sum(micro))]))


def work(rank, port, orders):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo")
    while True:
        rows = orders.recv()
        try:
            train(rows)
            orders.send("trained")
        except AssertionError as error:
            orders.send(repr(error))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = []
    for rank in range(WORLD):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(rank, port, theirs), daemon=True).start()
        pipes.append(ours)
    for rows in (6, 6, 3):
        if rows == 3:
            print("ready", flush=True)
        for rank, pipe in enumerate(pipes):
            pipe.send(list(range(rank, rows, WORLD)))
        for pipe in pipes:
            if (answer := pipe.recv()) != "trained":
                raise RuntimeError(answer)
