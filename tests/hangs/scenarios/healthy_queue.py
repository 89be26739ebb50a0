"""No hang: rollout and trainer exchange groups twice a second."""

import multiprocessing as mp
import time


def rollout(groups):
    made = 0
    while True:
        time.sleep(0.5)
        made += 1
        groups.put(made)


if __name__ == "__main__":
    groups = mp.Queue()
    mp.Process(target=rollout, args=(groups,), daemon=True).start()
    print("ready", flush=True)
    step = 0
    while True:
        groups.get()
        step += 1
