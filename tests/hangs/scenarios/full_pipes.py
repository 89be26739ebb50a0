"""Two processes send each other more than a pipe holds, and neither receives."""

import multiprocessing as mp
from multiprocessing.connection import Connection


def exchange(name: str, link: Connection) -> None:
    link.send(name)
    print("greeted", link.recv(), flush=True)
    if name == "learner":
        print("ready", flush=True)
    link.send_bytes(bytes(10_000_000))
    link.recv_bytes()


if __name__ == "__main__":
    ours, theirs = mp.Pipe()
    sampler = mp.Process(target=exchange, args=("sampler", theirs))
    sampler.start()
    exchange("learner", ours)
