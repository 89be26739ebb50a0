"""Each thread of a pool waits for a job of the same pool, and no thread is left to run it."""

from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(2)


def part(text):
    return len(text)


def score(text):
    return sum(job.result() for job in [pool.submit(part, text), pool.submit(part, text)])


print("ready", flush=True)
print([job.result() for job in [pool.submit(score, text) for text in ("one", "two", "three")]], flush=True)
