"""Tests with real processes: the newest files of a job, and how its logs end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clew.hang.collect import snapshot
from clew.hang.files import LIMIT_S, newest_traceback, with_files
from clew.hang.observed import Process, Snapshot
from clew.hang.proc import below
from clew.record.run import RunDirectory

POLLS = """
import os, sys, time

def wait(checkpoint_dir):
    print("waits for version 4", flush=True)
    while not os.path.exists(checkpoint_dir + "/version-4"):
        time.sleep(0.1)

wait(sys.argv[1])
"""


FAILS_IN_A_THREAD = """
import threading, time

def write():
    open("/nowhere/step-5")

writer = threading.Thread(target=write, name="writer")
writer.start()
writer.join()
print("step 6", flush=True)
time.sleep(60)
"""


def make_old(path: Path, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


def test_the_traceback_of_a_failed_thread_is_found_behind_later_lines(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    (tmp_path / "job.py").write_text(FAILS_IN_A_THREAD)
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, stdout=output, stderr=output)
    try:
        while "step 6" not in log.read_text():
            time.sleep(0.05)
        lines = with_files(snapshot([process.pid], lambda *_: True)).machine
    finally:
        process.kill()
        process.wait()
    (said,) = [line for line in lines if line.startswith("newest traceback")]
    assert "FileNotFoundError" in said and "at job.py:5 in thread writer, 1 line before the end" in said


def test_a_traceback_is_read_without_the_prefix_of_its_lines() -> None:
    lines = ["Traceback (most recent call last):", '  File "/src/train.py", line 3, in f', "    g()", "ValueError: no"]
    assert newest_traceback("\n".join(f"[rank1]: {line}" for line in lines)) == "'ValueError: no' at train.py:3"
    assert newest_traceback("\n".join(lines[:3])) == newest_traceback("step 3\n") == ""
    timed = [f"12:00:0{n} {line}" for n, line in enumerate(lines)]
    assert newest_traceback("\n".join(timed)) == ""  # each line has another prefix


def test_a_traceback_is_read_between_lines_of_another_rank() -> None:
    lines = ["Traceback (most recent call last):", '  File "/src/train.py", line 3, in f', "    g()", "ValueError: no"]
    text = "".join(f"[rank1]: {line}\n[rank0]: step 3\n" for line in lines)
    assert newest_traceback(text) == "'ValueError: no' at train.py:3, 1 line before the end"


def test_a_group_of_exceptions_without_tracebacks_is_read_as_a_whole(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text('raise ExceptionGroup("two", [ValueError(1), KeyError(2)])\n')
    log = subprocess.run([sys.executable, str(script)], capture_output=True, text=True).stderr
    said = newest_traceback(log + "step 7\n")
    assert said.startswith("'ExceptionGroup: two (2 sub-exceptions)' at job.py:1")


def test_a_long_line_without_an_end_is_read_quickly() -> None:
    began = time.monotonic()
    assert newest_traceback("Traceback (most recent call last):\n  " + 'File "' * 40_000 + "\nValueError") == ""
    assert time.monotonic() - began < 5


def test_the_newest_file_of_a_polled_folder_and_the_end_of_the_log_are_reported(tmp_path: Path) -> None:
    spool, log = tmp_path / "spool", tmp_path / "job.log"
    spool.mkdir()
    (spool / "version-2").touch()
    make_old(spool / "version-2", 900)
    (spool / "version-3").touch()
    make_old(spool / "version-3", 70)
    (tmp_path / "job.py").write_text(POLLS)
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "job.py", str(spool)], cwd=tmp_path, stdout=output, stderr=output)
    try:
        while "waits" not in log.read_text():
            time.sleep(0.05)
        time.sleep(0.3)
        lines = with_files(snapshot([process.pid], lambda *_: True)).machine
    finally:
        process.kill()
        process.wait()
    (newest,) = [line for line in lines if line.startswith("newest file")]
    assert "checkpoint_dir of wait" in newest and "'version-3', 7" in newest
    (end,) = [line for line in lines if line.startswith("log of")]
    assert str(log) in end and end.endswith("'waits for version 4'")


@pytest.mark.parametrize("age, old", [(60, True), (1, False)])
def test_an_exception_at_the_end_of_a_log_is_old_if_it_came_before_the_observation(
    tmp_path: Path, age: int, old: bool
) -> None:
    log, error = tmp_path / "job.log", "sqlite3.IntegrityError: UNIQUE constraint failed"
    log.write_text(f"Traceback (most recent call last):\n{error}\n")
    make_old(log, age)
    with log.open("a") as output:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=output)
    try:
        (seen,) = with_files(Snapshot(processes=(Process(pid=process.pid),), seconds=10.0)).processes
    finally:
        process.kill()
        process.communicate()
    assert seen.old_error == (error if old else "")


def test_the_log_of_an_ended_process_and_the_newest_files_of_a_run_are_reported(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "digits" / "try")
    (run.logs / "rollout.log").write_text("loading\nRuntimeError: no GPU \x1b[2Jleft\n\n")
    (run.checkpoints / "step-000003").mkdir()
    make_old(run.checkpoints / "step-000003", 3600)
    dead = Process(pid=4194305, name="rollout", exit="with exit code 3")
    lines = with_files(Snapshot(processes=(dead,)), run.path).machine
    assert "newest checkpoint: 'step-000003', 3600 s old" in lines
    assert "newest finished group: none" in lines
    (end,) = [line for line in lines if line.startswith("log of")]
    assert "rollout (pid 4194305), which has ended with exit code 3" in end
    assert end.endswith(r"'RuntimeError: no GPU \x1b[2Jleft'")


def test_a_log_that_is_not_a_regular_file_is_not_opened(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "digits" / "try")
    log = run.logs / "rollout.log"
    os.mkfifo(log)  # opening a FIFO to read would block until somebody writes to it
    began = time.monotonic()
    lines = with_files(
        Snapshot(processes=(Process(pid=4194305, name="rollout", exit="by signal 9"),)), run.path
    ).machine
    assert time.monotonic() - began < LIMIT_S + 1 and not [line for line in lines if line.startswith("log of")]


def test_a_file_that_filelock_closes_between_attempts_is_still_awaited(tmp_path: Path) -> None:
    path = tmp_path / "rows.lock"
    program = "import sys, filelock; print('tries', flush=True); filelock.FileLock(sys.argv[1]).acquire()"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", program, "rows.lock"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"tries\n"
                time.sleep(0.5)
                (waiting,) = snapshot([process.pid], lambda *_: True).processes
            finally:
                process.kill()
    assert waiting.wants == (str(path.stat().st_ino),)


def test_a_helper_that_inherited_the_rank_is_not_named_as_that_rank(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    log = tmp_path / "job.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=output, stderr=output, env={**os.environ, "RANK": "0"}
        )
    try:
        while len(pids := below([process.pid])) < 2:
            time.sleep(0.05)
        time.sleep(0.5)
        lines = with_files(snapshot(sorted(pids, reverse=True), lambda *_: True)).machine
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    (end,) = [line for line in lines if line.startswith("log of")]
    assert f"log of pid {max(pids)}," in end
