"""The thread that scores in the reward process has failed. Its main thread goes on to take requests."""

import multiprocessing
import queue
import threading


class Scorer:
    def __init__(self, requests, rewards):
        self.requests, self.rewards, self.todo = requests, rewards, queue.Queue()

    def score(self):
        while True:
            number = self.todo.get()
            self.rewards.put(1 / (8 - number))

    def run(self):
        threading.Thread(target=self.score, name="scorer", daemon=True).start()
        while True:
            self.todo.put(self.requests.get())


def serve(requests, rewards):
    Scorer(requests, rewards).run()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    requests, rewards = context.Queue(), context.Queue()
    context.Process(target=serve, args=(requests, rewards), daemon=True).start()
    print("ready", flush=True)
    for number in range(0, 20, 2):
        requests.put(number)
        requests.put(number + 1)
        print(rewards.get() + rewards.get(), flush=True)
