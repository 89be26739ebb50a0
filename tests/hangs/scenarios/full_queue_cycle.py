"""Trainer and rollout each wait for room in the other's queue."""

import multiprocessing as mp


def rollout(weights, episodes):
    while True:
        for n in range(10):
            episodes.put(n)
        weights.get()


def train(weights, episodes):
    while True:
        for n in range(10):
            weights.put(n)
        episodes.get()


if __name__ == "__main__":
    weights, episodes = mp.Queue(maxsize=2), mp.Queue(maxsize=2)
    mp.Process(target=rollout, args=(weights, episodes), daemon=True).start()
    print("ready", flush=True)
    train(weights, episodes)
