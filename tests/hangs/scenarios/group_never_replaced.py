"""A group of samples fails and is not replaced. The trainer asks for it, and the collector waits for new weights."""

import threading
import time


class Collector:
    def __init__(self) -> None:
        self.version, self.failed = 0, 0
        self.groups: dict[int, list[int]] = {}
        self.newer = threading.Event()
        threading.Thread(target=self.collect, name="collector", daemon=True).start()

    def generate(self, version: int) -> list[int]:
        if version == 5:
            raise ValueError("the prompt is longer than the context")
        return [version] * 4

    def collect(self) -> None:
        done = -1
        while True:
            if done == self.version:
                self.newer.clear()
                self.newer.wait()
                continue
            done = self.version
            try:
                self.groups[done] = self.generate(done)
            except ValueError:
                self.failed += 1

    def publish(self, version: int) -> None:
        self.version = version
        self.newer.set()


collector = Collector()
for step in range(100):
    if step == 5:
        print("ready", flush=True)
    while (group := collector.groups.pop(step, None)) is None:
        time.sleep(0.1)
    time.sleep(0.1)
    collector.publish(step + 1)
