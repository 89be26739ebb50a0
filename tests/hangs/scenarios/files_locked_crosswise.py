"""An evaluation locks its scores and then the checkpoint; the writer of checkpoints locks them the other way round."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())


def with_both(first, second):
    with (FOLDER / first).open("a") as outer:
        fcntl.flock(outer, fcntl.LOCK_EX)
        time.sleep(1)
        with (FOLDER / second).open("a") as inner:
            fcntl.flock(inner, fcntl.LOCK_EX)


if os.fork():
    print("ready", flush=True)
    with_both("scores", "checkpoint")
else:
    with_both("checkpoint", "scores")
