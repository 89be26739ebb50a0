"""The thread that fills the buffer died of an exception; the trainer waits for a batch that never comes."""

import queue
import threading
import time

rollouts = queue.Queue(maxsize=8)


def collect():
    for step in range(3):
        rollouts.put({"reward": step})
    raise RuntimeError("HTTP 500 from the engine")


def train():
    while True:
        batch = rollouts.get()
        time.sleep(0.05)
        del batch


threading.Thread(target=collect, daemon=True).start()
print("ready", flush=True)
train()
