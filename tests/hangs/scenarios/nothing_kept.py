"""A filter keeps nothing more: it counts what it saw and what it kept, but not what it rejected."""

import subprocess
import sys
import time


def informative(rewards):
    return len(set(rewards)) > 1


def rollouts():
    seen = kept = 0
    while True:
        time.sleep(0.1)
        seen += 1
        if informative([0, int(seen < 12)]):
            kept += 1
            print("ready" if seen == 11 else kept, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rollouts()
    child = subprocess.Popen([sys.executable, __file__, "rollouts"], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    while True:
        print(child.stdout.readline(), flush=True)
