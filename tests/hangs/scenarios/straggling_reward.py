"""One reward worker of the pool never returns."""

import multiprocessing as mp
import time


def reward(episode):
    if episode == 5:
        while True:
            time.sleep(60)
    return 1.0


if __name__ == "__main__":
    with mp.Pool(2) as pool:
        print("ready", flush=True)
        pool.map(reward, range(8), chunksize=1)
