"""An actor of Ray asks for a version of the weights that nobody publishes any more, and the trainer waits for it."""

import os
import tempfile
import time

import ray

os.environ |= {"RAY_TMPDIR": tempfile.gettempdir(), "RAY_AUTH_MODE": "disabled"}


@ray.remote
class Weights:
    def __init__(self):
        self.version = 0

    def publish(self, version):
        self.version = version

    def newest(self):
        return self.version


@ray.remote
class Rollout:
    def generate(self, weights, needed):
        while ray.get(weights.newest.remote()) < needed:
            time.sleep(0.2)
        return list(range(8))


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
weights, rollout = Weights.remote(), Rollout.remote()
for step in range(10):
    batch = ray.get(rollout.generate.remote(weights, step))
    if step < 3:
        ray.get(weights.publish.remote(step + 1))
    else:
        print("ready", flush=True)
