"""A weight update is lost, so the buffer drops each new episode as too old, and the trainer finds no batch."""

import collections
import random
import threading
import time

MAX_AGE, BATCH, LOST = 0, 4, 3


class ReplayBuffer:
    def __init__(self):
        self.episodes = collections.deque()
        self.lock = threading.Lock()

    def add(self, episode):
        with self.lock:
            self.episodes.append(episode)

    def sample(self, version):
        with self.lock:
            fresh = [each for each in self.episodes if version - each["version"] <= MAX_AGE]
            self.episodes = collections.deque(fresh)
            if len(fresh) < BATCH:
                return None
            return [self.episodes.popleft() for _ in range(BATCH)]


class Generator(threading.Thread):
    def __init__(self, buffer):
        super().__init__(daemon=True)
        self.buffer = buffer
        self.version, self.newest = 0, 0

    def run(self):
        while True:
            if self.newest != LOST:
                self.version = self.newest
            time.sleep(0.02)
            self.buffer.add({"version": self.version, "reward": random.random()})


def train(buffer, generator):
    version = 0
    while version < 1000:
        batch = buffer.sample(version)
        if batch is None:
            time.sleep(0.1)
            continue
        version += 1
        generator.newest = version
        if version == LOST:
            print("ready", flush=True)


buffer = ReplayBuffer()
generator = Generator(buffer)
generator.start()
train(buffer, generator)
