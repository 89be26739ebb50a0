"""Asyncio tasks of Clew's processes, which they write when `clew hang` asks with a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clew.asyncio_tasks import DUMP_SIGNAL, tasks_here, write_tasks_on_signal
from clew.hang.observed import Process, Snapshot
from clew.hang.task_dumps import catches, with_tasks
from clew.waits import Reporter, waiting

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from clew.waits import Reporter, waiting

async def episode():
    with waiting("episode 3", unblocks="the tool", numbers=lambda: 1 / 0):
        await tool()

async def tool():
    await asyncio.Event().wait()

async def main():
    tasks = [asyncio.create_task(episode()) for _ in range(3)]
    await asyncio.sleep(0)  # now all of them have begun
    began = time.perf_counter()
    sum(range(10**7))
    many = int(10**7 * 4 / (time.perf_counter() - began))
    print("ready", flush=True)
    if sys.argv[2] == "blocked":
        sum(range(many))  # 4 s, longer than `clew hang` waits
        print("went on", flush=True)
    await asyncio.wait(tasks)

with Reporter(Path(sys.argv[1]), "rollout") as reporter:
    asyncio.run(main())
"""


def start(status: Path, how: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(status), how], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def seen(process: subprocess.Popen[bytes]) -> Snapshot:
    return Snapshot(processes=(Process(pid=process.pid, name="rollout"),))


def test_the_tasks_of_an_event_loop_are_shown_with_where_each_waits(tmp_path: Path) -> None:
    with start(tmp_path, "idle") as process:
        (one,) = with_tasks(seen(process), tmp_path).processes
        alive = process.poll() is None
        process.kill()
    assert alive
    task = next(task for task in one.tasks if "episode" in task)
    assert task.startswith("3 x episode (<string>:") and "tool (<string>:" in task and "Event.wait (locks.py:" in task


def test_a_process_that_is_blocked_is_not_disturbed_and_is_named(tmp_path: Path) -> None:
    with start(tmp_path, "blocked") as process:
        time.sleep(0.3)  # it says so just before it blocks
        found = with_tasks(seen(process), tmp_path)
        assert process.stdout is not None and process.stdout.readline() == b"went on\n"
        process.kill()
    assert not found.processes[0].tasks
    assert "rollout" in found.notes[0] and "its main thread is blocked" in found.notes[0]


def test_a_process_that_does_not_listen_is_never_sent_the_signal(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    with process:
        assert process.stdout is not None and process.stdout.readline()
        assert not catches(process.pid)
        found = with_tasks(seen(process), tmp_path)
        time.sleep(0.1)
        alive = process.poll() is None
        process.kill()
    assert alive and not found.notes


def test_a_task_of_a_loop_in_another_thread_is_written_too(tmp_path: Path) -> None:
    import asyncio

    begun = threading.Event()

    async def of_the_gateway() -> None:
        begun.set()
        await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    waits = asyncio.run_coroutine_threadsafe(of_the_gateway(), loop)
    if DUMP_SIGNAL is None:
        pytest.skip("no such signals here")
    assert begun.wait(10)
    with Reporter(tmp_path, "server"), waiting("a thing", unblocks="nobody"):
        os.kill(os.getpid(), DUMP_SIGNAL)
        text = (tmp_path / "server.tasks").read_text()
    waits.cancel()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert "of_the_gateway (test_task_dumps.py:" in text and '"what": "a thing"' in text


def test_a_task_in_an_async_for_is_shown_down_to_what_it_awaits() -> None:
    import asyncio

    async def chunks() -> AsyncIterator[int]:
        await asyncio.sleep(60)
        yield 1

    async def reads() -> None:
        async for _ in chunks():
            pass

    async def look() -> list[str]:
        task = asyncio.create_task(reads())
        await asyncio.sleep(0)
        stacks = tasks_here()
        task.cancel()
        return stacks

    (stack,) = (each for each in asyncio.run(look()) if "reads" in each)
    names = [line.partition(" (")[0].rpartition(".")[2] for line in stack.splitlines()]
    assert names == ["reads", "chunks", "sleep"]


@pytest.mark.skipif(DUMP_SIGNAL is None, reason="no such signals here")
def test_a_second_signal_during_the_first_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert DUMP_SIGNAL is not None
    number, asked = int(DUMP_SIGNAL), list[int]()

    def waits() -> list[dict[str, Any]]:
        asked.append(1)
        if len(asked) < 3:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        return []

    before = signal.getsignal(DUMP_SIGNAL)
    try:
        write_tasks_on_signal(tmp_path / "mine.tasks", waits)
        os.kill(os.getpid(), DUMP_SIGNAL)
        time.sleep(0.1)
    finally:
        signal.signal(DUMP_SIGNAL, before)
    assert len(asked) == 1 and json.loads((tmp_path / "mine.tasks").read_text())["pid"] == os.getpid()
    assert capfd.readouterr().err == ""


LOCKED = """
import os, shutil, sys
from pathlib import Path
from clew import printing
from clew.asyncio_tasks import DUMP_SIGNAL
from clew.waits import Reporter

with Reporter(Path(sys.argv[1]), "rollout"):
    shutil.rmtree(sys.argv[1])
    with printing.shown._cond:  # as amid the `shown.set()` of every print
        os.kill(os.getpid(), DUMP_SIGNAL)
    print("went on", flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(DUMP_SIGNAL is None, reason="no such signals here")
def test_what_cannot_be_written_is_said_without_a_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKED, str(tmp_path / "status")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "went on\n" and f"Cannot write {tmp_path}/status/rollout.tasks: " in ended.stderr
