"""No hang: the trainer polls for files, and one comes every second."""

import multiprocessing as mp
import os
import tempfile
import time


def write(folder):
    for number in range(10_000):
        time.sleep(1)
        open(os.path.join(folder, f"rollout-{number}"), "w").close()


def train(folder):
    step = 0
    while True:
        path = os.path.join(folder, f"rollout-{step}")
        while not os.path.exists(path):
            time.sleep(0.1)
        step += 1


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    mp.Process(target=write, args=(folder,), daemon=True).start()
    print("ready", flush=True)
    train(folder)
