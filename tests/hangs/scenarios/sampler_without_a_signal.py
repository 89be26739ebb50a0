"""A sampler leaves out groups whose rewards are equal. The data gets too hard for any other group."""

import multiprocessing as mp
import statistics
import time


class Sampler:
    def __init__(self):
        self.seen = self.kept = 0

    def reward(self, number, sample):
        time.sleep(0.004)
        return float(number < 30 and sample % 2)

    def groups(self):
        for number in range(10**9):
            rewards = [self.reward(number, sample) for sample in range(8)]
            self.seen += 1
            if statistics.pstdev(rewards) == 0:
                continue
            self.kept += 1
            yield rewards


def sample(out):
    sampler = Sampler()
    for group in sampler.groups():
        out.put(group)


if __name__ == "__main__":
    queue = mp.Queue()
    mp.Process(target=sample, args=(queue,), daemon=True).start()
    print("ready", flush=True)
    while True:
        batch = [queue.get() for _ in range(4)]
