"""No hang: a filter rejects most groups, and batches fill."""

import queue
import threading
import time

groups = queue.Queue()


class Filter:
    def __init__(self):
        self.rejected = 0


def generate(chosen):
    made = 0
    while True:
        time.sleep(0.05)
        made += 1
        if made % 5:
            chosen.rejected += 1
            continue
        groups.put(made)


def train():
    step = 0
    while True:
        batch = [groups.get() for _ in range(4)]
        step += len(batch) // 4


threading.Thread(target=generate, args=(Filter(),), daemon=True).start()
print("ready", flush=True)
train()
