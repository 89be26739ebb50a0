"""A thread that reads a bounded queue of metrics fails on an odd one. The workers wait for room in the queue."""

import multiprocessing
import threading
import time


def count(metrics, totals):
    while True:
        name, number = metrics.get()
        totals[name] = totals.get(name, 0) + number


def work(worker, metrics, results):
    for step in range(10**6):
        time.sleep(0.01)
        metrics.put(("tokens", step) if worker or step < 100 else None)
        results.put((worker, step))


if __name__ == "__main__":
    metrics, results = multiprocessing.Queue(8), multiprocessing.Queue(8)
    totals: dict[str, int] = {}
    threading.Thread(target=count, args=(metrics, totals), daemon=True).start()
    for worker in range(2):
        multiprocessing.Process(target=work, args=(worker, metrics, results), daemon=True).start()
    for step in range(10**6):
        batch = [results.get() for _ in range(8)]
        if step == 10:
            print("ready", flush=True)
