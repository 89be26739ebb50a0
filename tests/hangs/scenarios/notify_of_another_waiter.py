"""One condition for producers and the consumer: `notify()` wakes a producer, although the batch is full."""

import threading
import time


class Buffer:
    def __init__(self, capacity):
        self.items, self.capacity = [], capacity
        self.changed = threading.Condition()

    def put(self, item):
        with self.changed:
            while len(self.items) >= self.capacity:
                self.changed.wait()
            self.items.append(item)
            if len(self.items) == self.capacity:
                self.changed.notify()

    def take(self, wanted):
        with self.changed:
            while len(self.items) < wanted:
                self.changed.wait()
            batch, self.items = self.items[:wanted], self.items[wanted:]
            return batch

    def idle(self):
        with self.changed:
            while self.capacity:
                self.changed.wait()


def produce():
    time.sleep(1)
    for number in range(100):
        buffer.put(number)


buffer = Buffer(4)
threading.Thread(target=buffer.idle, daemon=True).start()  # the first that waits, so the first that is woken
time.sleep(0.5)
threading.Thread(target=produce, daemon=True).start()
print("ready", flush=True)
buffer.take(4)
