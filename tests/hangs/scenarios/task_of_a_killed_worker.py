"""A worker of a pool is killed in the middle of a task. The pool puts another one in its place, without the task."""

import multiprocessing
import os
import signal


def verify(number):
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)  # as a limit of memory does
    return number % 2


if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print("ready", flush=True)
        print(pool.map(verify, range(12), chunksize=1), flush=True)
