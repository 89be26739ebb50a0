"""A filter object rejects every group: its counters are two objects away from the thread's frame."""

import threading
import time


class Filter:
    def __init__(self):
        self.seen = self.rejected = 0

    def accept(self, rewards):
        self.seen += 1
        if len(set(rewards)) < 2:
            self.rejected += 1
            return False
        return True


class Rollout(threading.Thread):
    def __init__(self, chosen, ready):
        super().__init__(daemon=True)
        self.chosen, self.ready = chosen, ready

    def run(self):
        while True:
            time.sleep(0.02)
            if self.chosen.accept([1.0]):
                self.ready.set()


if __name__ == "__main__":
    ready = threading.Event()
    Rollout(Filter(), ready).start()
    print("ready", flush=True)
    ready.wait()
