"""A rollout program polls for weights that a program has stopped to write: it exited with code 0."""

import os
import subprocess
import sys
import tempfile
import time


def wait_for_weights(folder, version):
    while not os.path.isfile(os.path.join(folder, f"weights-{version}")):
        time.sleep(0.25)


def main():
    folder = tempfile.mkdtemp()
    publisher = subprocess.Popen([sys.executable, "-c", "pass"])
    rollout = subprocess.Popen([sys.executable, __file__, folder])
    publisher.wait()
    print("ready", flush=True)
    rollout.wait()


if len(sys.argv) > 1:
    wait_for_weights(sys.argv[1], 3)
else:
    main()
