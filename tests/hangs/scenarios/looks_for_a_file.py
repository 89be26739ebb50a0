"""Nobody writes the file for which a function looks 1,800 times, a second apart."""

import os
import tempfile
import time


def wait_for(path: str) -> str:
    for _ in range(1800):
        if os.path.exists(path):
            return path
        time.sleep(1)
    raise TimeoutError(path)


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    print("ready", flush=True)
    wait_for(os.path.join(folder, "step_4", "ready"))
