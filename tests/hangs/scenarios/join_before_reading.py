"""A parent waits for the end of its scorers before it reads their queue, which they cannot empty by themselves."""

import multiprocessing


def score(seed, results):
    for number in range(5000):
        results.put({"seed": seed, "number": number, "text": "an answer that takes some room " * 4})


if __name__ == "__main__":
    results = multiprocessing.Queue()
    scorers = [multiprocessing.Process(target=score, args=(seed, results)) for seed in range(2)]
    for each in scorers:
        each.start()
    print("ready", flush=True)
    for each in scorers:
        each.join()
    print(sum(1 for _ in iter(results.get, None)), flush=True)
