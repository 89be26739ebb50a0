"""A thread takes a lock that it holds, in a statement of one line; the main thread joins it."""

import threading

lock, items = threading.Lock(), []


def size():
    with lock: return len(items)  # fmt: skip # noqa: E701


def collect():
    with lock:
        items.append(size())


thread = threading.Thread(target=collect)
print("ready", flush=True)
thread.start()
thread.join()
