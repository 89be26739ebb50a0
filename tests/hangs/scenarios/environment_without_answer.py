"""One environment forgets to set its flag when its episode ends. Main process and workers share the flags."""

import multiprocessing
import time

ORDERED, DONE = 1, 2
WORKERS = 3


def play(worker, flags, rewards):
    steps = 0
    while True:
        while flags[worker] != ORDERED:
            time.sleep(0.001)
        steps += 1
        if steps == 20 + worker * 10:
            steps = 0
            flags[worker] = 0 if worker == 1 else DONE
            continue
        rewards[worker] = steps / 10
        flags[worker] = DONE


def step_all(flags, rewards):
    for worker in range(WORKERS):
        flags[worker] = ORDERED
    while any(flags[worker] != DONE for worker in range(WORKERS)):
        time.sleep(0.001)
    return sum(rewards)


if __name__ == "__main__":
    flags, rewards = multiprocessing.RawArray("i", WORKERS), multiprocessing.RawArray("d", WORKERS)
    for worker in range(WORKERS):
        multiprocessing.Process(target=play, args=(worker, flags, rewards), daemon=True).start()
    total = 0.0
    for step in range(10**6):
        total += step_all(flags, rewards)
        if step == 28:
            print("ready", flush=True)
