"""A trainer and an actor each put into a full queue of the other; a heartbeat puts the time into a third queue."""

import multiprocessing
import threading
import time

BATCH, LATER = 6, 3


def act(episodes, errors):
    for count in range(1_000_000):
        for _ in range(BATCH if count < LATER else 5 * BATCH):
            episodes.put(1.0)
        for _ in range(BATCH):
            errors.get()


def log(box):
    seen = 0
    while True:
        box.get()
        seen += 1


def beat(box):
    while True:
        box.put({"at": time.time()})
        time.sleep(0.5)


def train(episodes, errors, box):
    threading.Thread(target=beat, args=(box,), daemon=True).start()
    for step in range(1_000_000):
        for _ in range(BATCH):
            episodes.get()
        for _ in range(BATCH):
            errors.put(0.5)
        print("ready" if step == LATER - 1 else f"step {step}", flush=True)


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    episodes, errors, box = spawn.Queue(maxsize=8), spawn.Queue(maxsize=8), spawn.Queue()
    jobs = [
        spawn.Process(target=train, args=(episodes, errors, box)),
        spawn.Process(target=act, args=(episodes, errors)),
    ]
    for job in [*jobs, spawn.Process(target=log, args=(box,), daemon=True)]:
        job.start()
    for job in jobs:
        job.join()
