"""A sampler counts its attempts over all prompts. Each call tries until it has one sample, and is called again."""

import random
import time


class Sampler:
    def __init__(self):
        self.attempts = 0

    def batch(self, size):
        kept = []
        while len(kept) < size:
            self.attempts += 1
            time.sleep(0.004)
            if (sample := random.random()) > 0.5:
                kept.append(sample)
        return kept


def prompts():
    while True:
        yield random.choice(("short", "long"))


def run(sampler):
    for prompt in prompts():
        [sample] = sampler.batch(1)
        print(prompt, sample, flush=True)


print("ready", flush=True)
run(Sampler())
