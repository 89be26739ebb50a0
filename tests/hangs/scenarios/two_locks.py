"""Two threads take two locks in opposite order."""

import threading
import time


class Replay:
    def __init__(self):
        self.rows, self.tree = threading.Lock(), threading.Lock()

    def insert(self):
        with self.tree:
            time.sleep(0.2)
            with self.rows:
                pass

    def sample(self):
        with self.rows:
            time.sleep(0.2)
            with self.tree:
                pass


replay = Replay()
threading.Thread(target=replay.insert, daemon=True).start()
print("ready", flush=True)
replay.sample()
