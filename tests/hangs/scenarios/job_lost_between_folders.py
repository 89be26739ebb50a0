"""A worker fails and leaves its job where nobody looks; the program asks for the result again and again."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
while True:
    todo = next((folder / "todo").iterdir(), None)
    if todo is None:
        time.sleep(0.1)
        continue
    job = todo.rename(folder / "running" / todo.name)
    if job.name != "3":
        job.rename(folder / "done" / job.name)
"""


def results(folder, names):
    while True:
        done = [name for name in names if (folder / "done" / name).exists()]
        if len(done) == len(names):
            return done
        time.sleep(0.2)


folder = Path(tempfile.mkdtemp())
for part in ("todo", "running", "done"):
    (folder / part).mkdir()
subprocess.Popen([sys.executable, "-c", WORKER, str(folder)])
for number in range(5):
    (folder / "todo" / str(number)).touch()
print("ready", flush=True)
results(folder, [str(number) for number in range(5)])
