"""Processes that `clew hang` cannot read, that end meanwhile, or that never let go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clew.hang.examine import examine
from tests.hangs.test_command import clew_hang

SLEEPS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
HOLDS_THE_GIL = """
import re, threading
def answer():
    print('ready', flush=True)
    re.match('(a+)+$', 'a' * 60 + 'b')
answer()
"""
root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")


@contextmanager
def running(script: str, *before: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*before, sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **variables})
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


@root
def test_without_permission_it_says_what_to_set_and_judges_nothing() -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    with running(SLEEPS, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1") as process:
        command = [*nobody, sys.executable, "-m", "clew", "hang", "--pid", str(process.pid)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "HOME": "/tmp"})
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "permission denied" in ended.stdout and "as the same user, or as root" in ended.stdout
    assert "SYS_PTRACE" in ended.stdout and "state S" in ended.stdout


@root
def test_a_process_of_another_user_is_read_by_root() -> None:
    with running(SLEEPS, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups") as process:
        ended = clew_hang("--pid", str(process.pid), "--stacks")
    assert ended.returncode == 0 and "<module> (<string>:3)" in ended.stdout


def test_a_name_that_ends_within_a_character_does_no_harm() -> None:
    """The kernel keeps 15 bytes of a name. Each look reads all processes of the machine."""
    named = "import sys, time\nopen('/proc/self/comm', 'wb').write(b'train\\xd0')\nprint('ready', flush=True)\n"
    with running(f"{named}time.sleep(600)") as process:
        ended = clew_hang("--pid", str(process.pid))
    assert ended.returncode == 1 and f"pid {process.pid} sleeps at" in ended.stdout, ended.stdout + ended.stderr


def test_a_process_that_ends_meanwhile_is_a_finding() -> None:
    with running(SLEEPS) as process:
        timer = threading.Timer(4.0, process.kill)
        timer.start()
        seen = examine([process.pid])
        timer.join()
    (one,) = seen.processes
    assert one.last.state in "ZX" and one.last.error and one.threads, "what was seen before stays"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or os.getuid() != 0, reason="needs root and unshare")
def test_a_process_in_a_pid_namespace_of_its_own_is_read_from_outside() -> None:
    """Its main thread has another number inside than outside."""
    with running(SLEEPS, "unshare", "--pid", "--fork", "--kill-child") as process:
        ended = clew_hang("--pid", str(process.pid), "--stacks")
        judged = clew_hang("--pid", str(process.pid))
    assert ended.returncode == 0 and "<module> (<string>:3)" in ended.stdout, ended.stdout + ended.stderr
    assert judged.returncode in (1, 3) and "<string>:3" in judged.stdout


def test_a_process_that_holds_the_gil_forever_is_read() -> None:
    with running(HOLDS_THE_GIL) as process:
        ended = clew_hang("--pid", str(process.pid), "--stacks")
    assert "answer (<string>:5)" in ended.stdout


def test_native_frames_are_shown_with_the_pause() -> None:
    with running(SLEEPS) as process:
        ended = clew_hang("--pid", str(process.pid), "--native")
    assert "native frames" in ended.stdout and "was paused for up to" in ended.stdout, ended.stdout


def test_a_stopped_process_is_not_asked_for_native_frames() -> None:
    with running(SLEEPS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        ended = clew_hang("--pid", str(process.pid), "--native")
    assert ended.returncode == 1 and "native" not in ended.stdout


def test_a_page_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    frames = f'[{{"name": "{hostile}", "filename": "a.py", "line": 1, "locals": []}}]'
    thread = (
        f'[{{"pid": 7, "thread_name": "M", "os_thread_id": 7, "active": false, "owns_gil": false, "frames": {frames}}}]'
    )
    (tmp_path / "rank0.json").write_text(thread)
    (tmp_path / f"{hostile.replace('/', '')}.json").write_text("nonsense")
    page = tmp_path / "report.html"
    clew_hang("--from", str(tmp_path), "--html", str(page))
    assert "&lt;script&gt;" in page.read_text() and "<script>" not in page.read_text()


def test_a_report_that_cannot_be_written_is_an_error_after_the_verdict(tmp_path: Path) -> None:
    with running(SLEEPS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        ended = clew_hang("--pid", str(process.pid), "--html", str(tmp_path / "missing" / "page.html"))
    assert ended.returncode == 2 and "Cannot write" in ended.stderr and ended.stdout.startswith("stopped")
