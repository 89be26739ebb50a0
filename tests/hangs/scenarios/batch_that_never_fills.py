"""A batch is filled with groups whose rewards differ. After a change of format all rewards are 0, and none is kept."""

import time


def reward(answer, step):
    return float(answer.endswith("7")) if step < 2 else float(answer == "#### 7")


def fill(step, size):
    kept, num_gen_batches = [], 0
    while len(kept) < size:
        num_gen_batches += 1
        time.sleep(0.02)
        rewards = [reward(f"the answer is {n}", step) for n in range(8)]
        if len(set(rewards)) == 1:
            continue
        kept.append(rewards)
    return kept


for step in range(100):
    if step == 2:
        print("ready", flush=True)
    fill(step, 4)
