"""Processes write to one SQLite file in turn, and often wait for its lock."""

import multiprocessing as mp
import sqlite3
import tempfile
import time
from pathlib import Path


def write(path, number):
    table = sqlite3.connect(path, timeout=3600, isolation_level=None)
    for step in range(10_000):
        table.execute("BEGIN IMMEDIATE")
        table.execute("INSERT INTO steps VALUES (?, ?)", (number, step))
        time.sleep(0.1)
        table.execute("COMMIT")
        time.sleep(0.05)


if __name__ == "__main__":
    path = str(Path(tempfile.mkdtemp(), "steps.db"))
    sqlite3.connect(path).execute("CREATE TABLE steps (writer INTEGER, step INTEGER)")
    spawned = mp.get_context("spawn")
    writers = [spawned.Process(target=write, args=(path, number), daemon=True) for number in range(2)]
    for writer in writers:
        writer.start()
    print("ready", flush=True)
    for writer in writers:
        writer.join()
