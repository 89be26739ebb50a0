"""A source is exhausted, and a loop within a loop asks it for more."""

import collections
import time


class Source:
    def __init__(self, rows):
        self.rows = iter(rows)

    def take(self, n):
        return [r for r, _ in zip(self.rows, range(n), strict=False)]


class Buffer:
    def __init__(self, source):
        self.source, self.items = source, collections.deque()

    def refill(self):
        while len(self.items) < 8:
            got = self.source.take(8 - len(self.items))
            self.items.extend(got)
            if not got:
                time.sleep(0.02)

    def next_batch(self):
        self.refill()
        return [self.items.popleft() for _ in range(8)]


def fit(buffer, steps):
    done = 0
    while done < steps:
        buffer.next_batch()
        done += 1


print("ready", flush=True)
fit(Buffer(Source(range(100))), 1000)
