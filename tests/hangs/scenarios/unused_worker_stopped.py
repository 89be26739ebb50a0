"""Training goes on in the main process. A worker of a pool that it has used is stopped, and nobody needs it."""

import multiprocessing
import os
import signal

if __name__ == "__main__":
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(abs, range(4))
    print("ready", flush=True)
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGSTOP)
    step = 0
    while True:
        step += 1
        sum(range(200_000))
