"""A sampler counts its attempts over all batches. Its filter rejects every group from the third batch on."""

import random


class Sampler:
    def __init__(self):
        self.attempts = 0

    def batch(self, size, spread):
        kept = []
        while len(kept) < size:
            for group in ([random.random() * spread for _ in range(4)] for _ in range(8)):
                self.attempts += 1
                if max(group) - min(group) > 0.1:
                    kept.append(group)
        return kept[:size]


sampler = Sampler()
print("ready", flush=True)
for step in range(100):
    batch = sampler.batch(4, 1.0 if step < 2 else 0.05)
    print(step, sampler.attempts, flush=True)
