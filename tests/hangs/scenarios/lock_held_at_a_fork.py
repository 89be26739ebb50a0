"""A thread writes under a lock while the process forks its pool: in the workers nobody will ever release that lock."""

import multiprocessing
import threading
import time

lock = threading.Lock()


def report():
    while True:
        with lock:
            time.sleep(0.3)
        time.sleep(0.001)


def score(number):
    with lock:
        return number % 2


if __name__ == "__main__":
    threading.Thread(target=report, daemon=True).start()
    time.sleep(0.1)
    pool = multiprocessing.get_context("fork").Pool(2)
    print("ready", flush=True)
    print(pool.map(score, range(8)), flush=True)
