"""Jobs of a pool of threads wait for jobs of the same pool."""

import time
from concurrent.futures import ThreadPoolExecutor

EXECUTOR = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grader")


def unit_test(code, case):
    time.sleep(0.1)
    return code == case


def grade(code):
    time.sleep(0.2)
    futures = [EXECUTOR.submit(unit_test, code, c) for c in range(3)]
    return sum(f.result() for f in futures)


print("ready", flush=True)
totals = list(EXECUTOR.map(grade, range(4)))
print(totals)
