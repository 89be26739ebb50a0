"""A worker raises while it has the lock, tries again, and waits for itself; the trainer wants the lock, too."""

import multiprocessing as mp
import time


class Stale(Exception):
    pass


def fetch(guard, version):
    guard.acquire()
    if version.value < 1:
        raise Stale
    guard.release()


def worker(guard, version):
    for _ in range(5):
        try:
            return fetch(guard, version)
        except Stale:
            time.sleep(0.1)


if __name__ == "__main__":
    guard, version = mp.Lock(), mp.Value("i", 0)
    process = mp.Process(target=worker, args=(guard, version), daemon=True)
    process.start()
    time.sleep(1)
    print("ready", flush=True)
    with guard:
        version.value = 1
    process.join()
