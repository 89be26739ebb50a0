"""Reading what no stack shows in the memory of a real process: coroutines, counters, ended children and threads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clew.hang import inside
from clew.hang.collect import look_at, py_spy
from clew.hang.memory import VERSIONS, Memory, Unreadable

pytestmark = pytest.mark.skipif(sys.version_info[:2] not in VERSIONS, reason="layout of this Python is unknown")

PROGRAM = """
import asyncio, multiprocessing, os, sys, threading, time

class Buffer:
    def __init__(self):
        self.groups, self.stats, self.step = [1, 2, 3], {"rejected": 7}, 41
        self.taken, self.free, self.slots = multiprocessing.Lock(), multiprocessing.Lock(), multiprocessing.Semaphore(3)
        self.taken.acquire()

    async def fill(self, version=5):
        read = lambda: self.step < version
        await asyncio.Event().wait()

async def fail():
    raise ValueError("lost")

async def learn(ready):
    threading.Timer(0.1, ready.set).start()
    await ready.wait()

async def main(buffer):
    learner = asyncio.create_task(learn(asyncio.Event()), name="learner")
    failed = asyncio.create_task(fail())
    filling = asyncio.create_task(buffer.fill(), name="filler")
    threading.Timer(0.3, print, ["ready"]).start()
    await filling

def quit():
    sys.exit(3)

def serve(parent):
    while os.getppid() == parent:
        time.sleep(0.1)

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    ended = threading.Thread(target=print, name="collector")
    ended.start()
    child = multiprocessing.get_context("fork").Process(target=quit, name="actor")
    child.start()
    child.join()
    multiprocessing.get_context("fork").Process(target=serve, args=(os.getpid(),), daemon=True).start()
    asyncio.run(main(Buffer()))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    script = tmp_path_factory.mktemp("memory") / "program.py"
    script.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    while process.stdout.readline().strip() != b"ready":
        assert process.poll() is None
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_waiting_coroutine_is_seen_with_its_line_and_its_counters(program: int) -> None:
    tasks = {thread.name: thread for thread in look_at(program, py_spy()).threads if thread.task}
    frames = tasks["task filler"].frames
    assert [frame.name for frame in frames] == ["wait", "fill"]
    assert PROGRAM.splitlines()[frames[1].line - 1].strip() == "await asyncio.Event().wait()"
    numbers = frames[1].locals
    assert numbers["version"] == "5", "an inner function uses it, so it lies in a cell"
    assert (numbers["self.step"], numbers["len(self.groups)"], numbers["self.stats.rejected"]) == ("41", "3", "7")
    locks = {name: value for name, value in numbers.items() if name.endswith("_semlock.count")}
    assert locks == {"self.taken._semlock.count": "1", "self.free._semlock.count": "0"}, "a semaphore has no owner"
    assert [thread.ended for thread in tasks.values() if thread.ended] == ["ValueError"]


def test_a_coroutine_is_known_whose_event_another_thread_has_set_without_waking_the_loop(program: int) -> None:
    tasks = {thread.name: thread for thread in look_at(program, py_spy()).threads if thread.task}
    assert tasks["task learner"].woken and not tasks["task filler"].woken


def test_ended_children_and_threads_are_known(program: int) -> None:
    facts = inside.inside(program)
    assert [(name, code) for _, name, code in facts.children] == [("actor", 3)]
    assert facts.ended_threads == ("collector",)


def test_a_forked_process_has_not_ended_the_threads_of_its_parent(program: int) -> None:
    (child,) = psutil.Process(program).children()
    assert inside.inside(child.pid).ended_threads == ()


def test_memory_that_is_not_there_cannot_be_read(program: int) -> None:
    with Memory(program) as memory, pytest.raises(Unreadable):
        memory.word(8)
    assert inside.inside(1 << 22) == inside.Inside()


def test_lines_of_instructions_are_those_of_python() -> None:
    code = look_at.__code__
    for start, _, line in code.co_lines():
        if line is not None:
            assert inside.line_of(code.co_linetable, code.co_firstlineno, start) == line
    for end in range(len(code.co_linetable)):  # as torn memory may hold it
        inside.line_of(code.co_linetable[:end], code.co_firstlineno, 1 << 20)


FAILED_JOBS = """
import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

def fail(depth):
    if depth:
        fail(depth - 1)
    raise ValueError("lost")  # line 9

def read(number):
    raise KeyError(number)

class Trainer:
    def __init__(self):
        pool = ThreadPoolExecutor(1)
        self.large = [{n: n for n in range(90_000)} for _ in range(20)]
        self.jobs = {"read": pool.submit(read, 1), "deep": pool.submit(fail, 300)}
        with suppress(KeyError):
            self.jobs["read"].result()

    def wait(self):
        while not self.jobs["deep"].done():
            pass
        print("ready", flush=True)
        queue.Queue().get()

Trainer().wait()
"""


def test_a_failed_job_counts_until_its_result_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILED_JOBS)
    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == b"ready"
        look = look_at(process.pid, py_spy())
        before = time.process_time()
        assert inside.inside(process.pid, look.threads).failed_jobs == (("fail", "ValueError", "program.py:9"),)
        assert time.process_time() - before < 1, "large containers are not read as a whole"
    finally:
        process.kill()
        process.communicate()
