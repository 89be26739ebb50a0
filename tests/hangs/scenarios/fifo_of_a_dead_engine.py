"""An engine has ended, and the trainer waits until it opens the other end of a FIFO."""

import os
import subprocess
import sys
import tempfile
from typing import Any


def request(path: str, prompts: list[Any]) -> None:
    with open(path, "w") as pipe:
        pipe.write(repr(prompts))


if __name__ == "__main__":
    path = os.path.join(tempfile.mkdtemp(), "requests")
    os.mkfifo(path)
    engine = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    print("ready", flush=True)
    request(path, ["1+1="])
