"""A process waits within its transaction for one that writes to the same SQLite file."""

import multiprocessing as mp
import sqlite3
import tempfile
from pathlib import Path


def grade(path, graded):
    rows = sqlite3.connect(path, timeout=3600)
    for number in range(100):
        with rows:
            rows.execute("INSERT INTO scores VALUES (?)", (number,))
        graded.set()


if __name__ == "__main__":
    path = str(Path(tempfile.mkdtemp(), "scores.db"))
    graded = mp.get_context("spawn").Event()
    table = sqlite3.connect(path, isolation_level=None)
    table.execute("CREATE TABLE scores (score REAL)")
    table.execute("BEGIN IMMEDIATE")
    mp.get_context("spawn").Process(target=grade, args=(path, graded), daemon=True).start()
    print("ready", flush=True)
    graded.wait()
    table.execute("COMMIT")
