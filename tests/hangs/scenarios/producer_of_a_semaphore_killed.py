"""The process that releases a semaphore for each row is killed. The rank waits for the semaphore forever."""

import multiprocessing
import os
import signal


def produce(rows):
    for row in range(20):
        if row == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        rows.release()


def consume(rows):
    print("ready", flush=True)
    for _ in range(20):
        rows.acquire()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    rows = context.Semaphore(0)
    processes = [context.Process(target=each, args=(rows,)) for each in (consume, produce)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
