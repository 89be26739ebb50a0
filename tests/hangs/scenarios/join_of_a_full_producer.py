"""Rank 1 fails, and its cleanup joins a thread that waits for room in a queue from which nobody takes any more."""

import queue
import threading

import torch
import torch.distributed as dist


class Ahead:
    """Makes batches in a thread."""

    def __enter__(self):
        self.batches = queue.Queue(maxsize=2)
        self.thread = threading.Thread(target=self.fill, name="ahead", daemon=True)
        self.thread.start()
        return self

    def fill(self):
        while True:
            self.batches.put(torch.ones(2))

    def __exit__(self, *error):
        self.thread.join()


def main():
    dist.init_process_group("gloo")
    with Ahead() as ahead:
        print("ready", flush=True)
        while True:
            batch = ahead.batches.get()
            if dist.get_rank() == 1:
                raise ValueError("an empty batch")
            dist.all_reduce(batch)


main()
