"""The main process waits for an event that its child will set when it has trained."""

import multiprocessing as mp
import time


def train(finished):
    step = 0
    while step < 10_000:
        time.sleep(0.8)
        step += 1
    finished.set()


if __name__ == "__main__":
    finished = mp.Event()
    mp.Process(target=train, args=(finished,), daemon=True).start()
    print("ready", flush=True)
    finished.wait()
