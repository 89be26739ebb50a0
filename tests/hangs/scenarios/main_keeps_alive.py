"""No hang: a thread trains, and the main thread only keeps the program alive."""

import threading
import time


def score(step: int) -> int:
    time.sleep(0.2)
    return min(hash((step, sample)) for sample in range(20_000))


def train() -> None:
    losses = []
    step = 0
    while True:
        losses.append(score(step))
        step += 1


if __name__ == "__main__":
    threading.Thread(target=train, daemon=True).start()
    print("ready", flush=True)
    while True:
        time.sleep(1)
