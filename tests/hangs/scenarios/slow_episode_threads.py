"""A trainer asks a buffer for a batch while threads go through long episodes: they are slow, and nothing hangs."""

import collections
import threading
import time

BATCH, TURNS, TURN_S = 6, 40, 0.9


class Buffer:
    def __init__(self):
        self.episodes = collections.deque()
        self.lock = threading.Lock()

    def add(self, episode):
        with self.lock:
            self.episodes.append(episode)

    def sample(self):
        with self.lock:
            if len(self.episodes) < BATCH:
                return None
            return [self.episodes.popleft() for _ in range(BATCH)]


def play(buffer, worker):
    while True:
        reward = 0.0
        for turn in range(TURNS):
            time.sleep(TURN_S + 0.05 * worker)
            reward += turn
        buffer.add(reward)


buffer = Buffer()
for worker in range(3):
    threading.Thread(target=play, args=(buffer, worker), daemon=True).start()
print("ready", flush=True)
step = 0
while step < 100:
    batch = buffer.sample()
    if batch is None:
        time.sleep(0.1)
        continue
    step += 1
