"""The process that sets an event has ended; the others wait for the next one."""

import multiprocessing as mp
import time


def publish(published):
    for _ in range(3):
        time.sleep(0.3)
        published.set()


def sample(published):
    while True:
        published.wait()
        published.clear()


if __name__ == "__main__":
    event = mp.Event()
    workers = [mp.Process(target=work, args=(event,), daemon=True) for work in (publish, sample)]
    for worker in workers:
        worker.start()
    print("ready", flush=True)
    for worker in reversed(workers):
        worker.join()
