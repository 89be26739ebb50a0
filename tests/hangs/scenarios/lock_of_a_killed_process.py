"""A process was killed while it held a lock that it shares with others."""

import multiprocessing
import os
import signal


def write(lock):
    with lock:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    lock = multiprocessing.Lock()
    writer = multiprocessing.Process(target=write, args=(lock,))
    writer.start()
    writer.join()
    print("ready", flush=True)
    with lock:
        print("written", flush=True)
