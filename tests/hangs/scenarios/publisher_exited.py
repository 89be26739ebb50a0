"""The rollout waits for a version that can never come: the publisher has exited."""

import multiprocessing as mp
import time


def publish(version):
    for _ in range(3):
        version.value += 1


def wait_for_version(version, wanted):
    while version.value < wanted:
        time.sleep(0.1)


if __name__ == "__main__":
    version = mp.Value("i", 0)
    mp.Process(target=publish, args=(version,)).start()
    print("ready", flush=True)
    wait_for_version(version, 4)
