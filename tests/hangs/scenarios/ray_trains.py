"""No hang: actors of Ray generate and train, a second each."""

import os
import tempfile
import time

import ray

os.environ |= {"RAY_TMPDIR": tempfile.gettempdir(), "RAY_AUTH_MODE": "disabled"}


@ray.remote
class Rollout:
    def generate(self, prompts):
        answers = []
        for prompt in prompts:
            time.sleep(0.15)
            answers.append(2 * prompt)
        return answers


@ray.remote
class Learner:
    def __init__(self):
        self.step = 0

    def train(self, batch):
        for _ in range(3):
            time.sleep(0.3)
        self.step += 1
        return self.step


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
rollout, learner = Rollout.remote(), Learner.remote()
print("ready", flush=True)
pending = rollout.generate.remote(list(range(8)))
while True:
    batch = ray.get(pending)
    pending = rollout.generate.remote(list(range(8)))
    ray.get(learner.train.remote(batch))
