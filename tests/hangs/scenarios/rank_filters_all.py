"""Rank 0 collects prompts that pass its filter, and none does; the others wait in a broadcast."""

import time

import torch
import torch.distributed as dist


class Filter:
    def __init__(self):
        self.counts = {"rejected": 0}

    def collect(self, wanted):
        found = []
        while len(found) < wanted:
            time.sleep(0.1)
            reward = 1.0
            if reward in (0.0, 1.0):
                self.counts["rejected"] += 1
                continue
            found.append(reward)
        return found


dist.init_process_group("gloo")
print("ready", flush=True)
rewards = torch.tensor(Filter().collect(4)) if dist.get_rank() == 0 else torch.zeros(4)
dist.broadcast(rewards, 0)
