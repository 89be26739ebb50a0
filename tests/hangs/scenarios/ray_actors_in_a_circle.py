"""An actor of Ray asks another one, which asks the first: it runs one method at a time, so both wait."""

import os
import tempfile

import ray

os.environ |= {"RAY_TMPDIR": tempfile.gettempdir(), "RAY_AUTH_MODE": "disabled"}


@ray.remote
class Trainer:
    def meet(self, sampler):
        self.sampler = sampler

    def step(self):
        return ray.get(self.sampler.sample.remote())

    def version(self):
        return 1


@ray.remote
class Sampler:
    def __init__(self, trainer):
        self.trainer = trainer

    def sample(self):
        return ray.get(self.trainer.version.remote())


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
trainer = Trainer.remote()
ray.get(trainer.meet.remote(Sampler.remote(trainer)))
print("ready", flush=True)
ray.get(trainer.step.remote())
