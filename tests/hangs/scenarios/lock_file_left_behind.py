"""A job that ended long ago has left its lock file, and nobody removes it."""

import os
import tempfile
import time


def write(folder: str, step: int) -> None:
    lock = os.path.join(folder, ".writer")
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(0.2)
            continue
        break
    with open(os.path.join(folder, "step"), "w") as file:
        file.write(str(step))
    os.unlink(lock)


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    write(folder, 0)
    with open(os.path.join(folder, ".writer"), "w") as left:
        left.write("40731")
    print("ready", flush=True)
    write(folder, 1)
