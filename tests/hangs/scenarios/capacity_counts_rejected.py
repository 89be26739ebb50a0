"""Rollout may start a limited number of episodes for each version, and rejected ones count forever."""

import threading
import time


class Rollout:
    def __init__(self):
        self.version = self.submitted = self.rejected = 0
        self.finished = []
        self.lock = threading.Lock()
        for _ in range(2):
            threading.Thread(target=self.run, daemon=True).start()

    def play(self):
        return self.submitted % 3

    def run(self):
        while True:
            with self.lock:
                free = (self.version + 2) * 4 - self.submitted
                self.submitted += free > 0
            if free <= 0:
                time.sleep(0.1)
                continue
            with self.lock:
                if self.play():
                    self.finished.append(self.submitted)
                else:
                    self.rejected += 1

    def batch(self):
        while len(self.finished) < 4:
            time.sleep(0.05)
        self.finished = self.finished[4:]


rollout = Rollout()
print("ready", flush=True)
for _ in range(100):
    rollout.batch()
    rollout.version += 1
