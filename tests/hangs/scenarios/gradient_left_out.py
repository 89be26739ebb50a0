"""A worker skips a batch whose loss is not finite, so the parameter server waits for its gradient's key."""

import multiprocessing
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

WORKERS = 3


def connect(port, serves):
    return TCPStore("127.0.0.1", port, None, serves, timeout=timedelta(minutes=30), wait_for_workers=False)


class Server:
    def __init__(self, port):
        self.store, self.version = connect(port, True), 0

    def run(self):
        while True:
            self.store.set(f"weights/{self.version}", "written")
            for worker in range(WORKERS):
                self.store.get(f"gradient/{self.version}/{worker}")
            self.version += 1
            print("ready" if self.version == 3 else f"version {self.version}", flush=True)


class Worker:
    def __init__(self, index, port):
        self.index, self.store = index, connect(port, False)

    def run(self):
        for step in range(1000):
            self.store.get(f"weights/{step}")
            time.sleep(0.05)
            if self.index == 1 and step == 5:
                continue
            self.store.set(f"gradient/{step}/{self.index}", "written")


def serve(port):
    Server(port).run()


def work(index, port):
    Worker(index, port).run()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=serve, args=(port,))]
    processes += [fork.Process(target=work, args=(index, port)) for index in range(WORKERS)]
    for process in processes:
        process.start()
        time.sleep(0.5)
    for process in processes:
        process.join()
