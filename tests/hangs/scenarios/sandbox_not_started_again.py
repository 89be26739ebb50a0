"""A rank kills its sandbox, which takes too long, and fails to start another one. So nobody fills its queue."""

import multiprocessing
import threading
import time

import torch
import torch.distributed as dist


def run_programs(jobs, results) -> None:
    while True:
        results.put(eval(jobs.get()))


class Sandbox:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("fork")
        self.jobs, self.results = self.context.Queue(), self.context.Queue()
        self.since = 0.0
        self.start()
        threading.Thread(target=self.watch, daemon=True).start()

    def start(self) -> None:
        self.child = self.context.Process(target=run_programs, args=(self.jobs, self.results), daemon=True)
        self.child.start()

    def watch(self) -> None:
        while True:
            time.sleep(0.1)
            if self.since and time.monotonic() - self.since > 1.0:
                self.since = 0.0
                self.child.kill()
                self.child.join()
                self.child.close()
                print("killed sandbox", self.child.name, flush=True)
                try:
                    self.child.start()
                except Exception as error:
                    print("cannot start the sandbox:", error, flush=True)

    def evaluate(self, program: str) -> float:
        self.since = time.monotonic()
        self.jobs.put(program)
        value = self.results.get()
        self.since = 0.0
        return value


sandbox = Sandbox()
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(100):
    if step == 3:
        print("ready", flush=True)
    reward = torch.tensor(sandbox.evaluate("sum(iter(int, 1))" if (step, rank) == (3, 1) else "1.0"))
    dist.all_reduce(reward)
