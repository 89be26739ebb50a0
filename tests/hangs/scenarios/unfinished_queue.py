"""Some jobs of a queue are never marked as done."""

import queue
import threading

jobs = queue.Queue()
results = []


def worker():
    while True:
        job = jobs.get()
        if job % 7 == 3:
            continue  # forgets task_done
        results.append(job)
        jobs.task_done()


for _ in range(3):
    threading.Thread(target=worker, daemon=True).start()
for n in range(40):
    jobs.put(n)
print("ready", flush=True)
jobs.join()
