"""Two threads lock each other out, while the main thread only sleeps: it would not notice."""

import threading
import time

weights, buffer = threading.Lock(), threading.Lock()


def train() -> None:
    with weights:
        time.sleep(1)
        with buffer:
            print("trained", flush=True)


def collect() -> None:
    with buffer:
        time.sleep(1)
        with weights:
            print("collected", flush=True)


if __name__ == "__main__":
    for target in (train, collect):
        threading.Thread(target=target, daemon=True).start()
    print("ready", flush=True)
    while True:
        time.sleep(1)
