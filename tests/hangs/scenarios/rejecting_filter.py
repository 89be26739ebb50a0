"""The filter rejects every group, so a batch never fills."""

import queue
import random
import threading
import time

groups = queue.Queue()


def generate():
    rejected = 0
    accepted = 0
    while True:
        rewards = [random.random() for _ in range(1)]
        time.sleep(0.01)
        if len(rewards) < 2 or max(rewards) == min(rewards):
            rejected += 1
            continue
        accepted += 1
        groups.put(rewards)


threading.Thread(target=generate, daemon=True).start()
print("ready", flush=True)
batch = [groups.get() for _ in range(8)]
