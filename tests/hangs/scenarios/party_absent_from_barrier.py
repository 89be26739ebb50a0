"""Two of three threads are at a barrier; the third waits for an event that is set only after the barrier."""

import threading

weights = threading.Event()
together = threading.Barrier(3)


def sample(first):
    while True:
        if first:
            weights.wait()
            weights.clear()
        together.wait()


weights.set()
for first in (True, False):
    threading.Thread(target=sample, args=(first,), daemon=True).start()
print("ready", flush=True)
for step in range(1000):
    together.wait()
    if step < 5:
        weights.set()
