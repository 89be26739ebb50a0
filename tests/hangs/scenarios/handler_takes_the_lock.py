"""A signal handler takes the lock that the main thread, which it interrupts, holds."""

import signal
import threading
import time


class Progress:
    def __init__(self):
        self.lock, self.done = threading.Lock(), 0
        signal.signal(signal.SIGALRM, self.show)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)

    def show(self, *_):
        with self.lock:
            print("done", self.done, flush=True)

    def advance(self):
        with self.lock:
            time.sleep(0.05)
            self.done += 1


progress = Progress()
print("ready", flush=True)
for _ in range(10_000):
    progress.advance()
