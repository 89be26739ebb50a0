"""No hang: a process computes and pauses for each file, and the main process polls for the next one."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def write(folder):
    for number in range(10000):
        total = sum(n * n for n in range(4_000_000))
        time.sleep(1.7)
        Path(f"{folder}/{number}.part").write_text(str(total))
        os.rename(f"{folder}/{number}.part", f"{folder}/{number}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    folder = tempfile.mkdtemp()
    writer = subprocess.Popen([sys.executable, __file__, folder])
    print("ready", flush=True)
    for step in range(10000):
        while not os.path.exists(f"{folder}/{step}"):
            time.sleep(0.2)
