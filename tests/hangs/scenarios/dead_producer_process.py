"""The process that makes rollouts was killed; the trainer polls an empty queue."""

import multiprocessing as mp
import os
import queue
import signal
import time


def produce(results):
    results.put(1)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def train(results):
    while True:
        try:
            results.get(timeout=0.5)
        except queue.Empty:
            continue


if __name__ == "__main__":
    results = mp.Queue()
    mp.Process(target=produce, args=(results,)).start()
    print("ready", flush=True)
    train(results)
