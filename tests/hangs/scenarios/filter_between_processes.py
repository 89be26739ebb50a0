"""A scorer between two queues rejects every group, while two samplers go on."""

import multiprocessing
import random
import statistics
import time


def sample(groups):
    while True:
        time.sleep(0.05)
        groups.put([random.random() for _ in range(4)])


class Scorer:
    def __init__(self, groups, scored):
        self.groups, self.scored = groups, scored

    def informative(self, rewards):
        return statistics.pstdev(rewards) > 0

    def run(self):
        while True:
            answers = self.groups.get()
            rewards = [float(answer > 1) for answer in answers]
            if not self.informative(rewards):
                continue
            self.scored.put(rewards)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    groups, scored = context.Queue(8), context.Queue(8)
    scorer = Scorer(groups, scored)
    for target in (lambda: sample(groups), lambda: sample(groups), scorer.run):
        context.Process(target=target, daemon=True).start()
    print("ready", flush=True)
    batch = []
    while len(batch) < 4:
        batch.append(scored.get())
