"""Processes die with their parent, waits explain themselves: with real processes and a real SIGKILL."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from clew.errors import Interrupted
from clew.processes import PARENT_VARIABLE, kept_signals
from clew.waits import Reporter, current_waits, oldest_of_each_kind, waiting

CHILD = """
import re, sys
from clew.processes import die_with_parent
die_with_parent()
print("up", flush=True)
re.match("(a+)+$", "a" * 60 + "b")  # for hours, in C, holding the interpreter's lock
"""

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, sys.argv[2]: str(os.getpid())},
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def gone(pid: int) -> bool:
    try:
        state = re.search(r"State:\s+(\w)", Path(f"/proc/{pid}/status").read_text())
        return state is not None and state[1] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_child_that_is_stuck_in_c_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, PARENT_VARIABLE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child)


def test_a_child_whose_parent_died_before_it_looked_ends_itself() -> None:
    code = "from clew.processes import die_with_parent; die_with_parent(2**22 - 3); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert ended.returncode == -signal.SIGKILL and ended.stdout == b""


def test_a_wait_is_shown_with_its_numbers(tmp_path: Path) -> None:
    with Reporter(tmp_path, "rollout") as reporter:
        reporter.set(doing="admitting", version=7)
        with waiting("admission", unblocks="trainer", numbers=lambda: "16 waiting, lag limit 0 at version 7"):
            reporter.write()
            shown = json.loads((tmp_path / "rollout.json").read_text())
        assert current_waits() == []
    (wait,) = shown["waits"]
    assert (wait["what"], wait["unblocks"]) == ("admission", "trainer")
    assert wait["numbers"] == "16 waiting, lag limit 0 at version 7"
    assert shown["version"] == 7 and shown["pid"] == os.getpid()
    assert json.loads((tmp_path / "rollout.json").read_text())["doing"] == "ended"


def test_waits_of_one_kind_are_shown_as_one() -> None:
    with contextlib.ExitStack() as stack:
        for i in range(3):
            stack.enter_context(waiting(f"the response to g{i:06d}.e0.i0", unblocks="an inference server"))
        stack.enter_context(waiting("a batch for step 7", unblocks="rollout"))
        shown = [(wait.what, alike) for wait, alike in oldest_of_each_kind()]
    assert shown == [("the response to g000000.e0.i0", 3), ("a batch for step 7", 1)]


def test_an_error_is_left_in_the_status_file(tmp_path: Path) -> None:
    try:
        with Reporter(tmp_path, "trainer"):
            raise ValueError("no such thing")
    except ValueError:
        pass
    status = json.loads((tmp_path / "trainer.json").read_text())
    assert status["doing"] == "failed" and status["error"] == "ValueError: no such thing"


def test_a_process_that_was_asked_to_end_has_not_failed(tmp_path: Path) -> None:
    with contextlib.suppress(Interrupted), Reporter(tmp_path, "trainer"):
        raise Interrupted("before step 3")
    status = json.loads((tmp_path / "trainer.json").read_text())
    assert status["doing"] == "ended (interrupted)" and "error" not in status


def test_handlers_of_signals_are_put_back() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, own)
    try:
        with kept_signals():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
