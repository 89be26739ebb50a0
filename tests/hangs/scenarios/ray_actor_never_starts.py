"""Two actors of Ray want more cores than there are, so the second one never starts."""

import os
import tempfile

import ray

os.environ |= {"RAY_TMPDIR": tempfile.gettempdir(), "RAY_AUTH_MODE": "disabled"}


@ray.remote(num_cpus=2)
class Worker:
    def score(self, batch):
        return sum(batch)


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
workers = [Worker.remote() for _ in range(2)]
print("ready", flush=True)
scores = ray.get([worker.score.remote([1, 2]) for worker in workers])
