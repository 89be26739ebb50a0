"""A filter passes one group of five, and a trainer takes each at once: its buffer is empty at nearly every look."""

import random
import threading
import time
from collections import deque


class Buffer:
    def __init__(self):
        self.ready, self.changed = deque(), threading.Condition()

    def add(self, group):
        with self.changed:
            self.ready.append(group)
            self.changed.notify_all()

    def take(self):
        with self.changed:
            self.changed.wait_for(lambda: len(self.ready) >= 1)
            return self.ready.popleft()


def rollout(buffer):
    prompt = 0
    while True:
        time.sleep(0.01)
        reward = random.random()
        prompt += 1
        if reward > 0.8:
            buffer.add(reward)


buffer, total = Buffer(), 0.0
threading.Thread(target=rollout, args=(buffer,), daemon=True).start()
print("ready", flush=True)
while True:
    total += buffer.take()
