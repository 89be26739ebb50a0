"""Threads that watch, and the processor time of the threads and child processes that they watch.

Episodes may wait for any of these threads and processes. The sum of their time counts, not the load of the machine:
while a lock is held across a sleep, all of them are idle, however many other programs compete for the cores. While a
crowd waits for a processor, they are busy.
"""

from __future__ import annotations

import asyncio
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from clew.processes import cores
from clew.stress.frames import Line

LOOK_S = 0.02
"""Minimum seconds between two looks."""

COST = 10
"""Minimum time between two looks, as a multiple of the processor time that a look takes."""

LATE_S = 0.2
"""Maximum seconds that were counted as idle and may turn out busy at a later look.

The kernel counts a wait for a processor only when the wait is over.
"""

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the system call that waits for a lock. This may be the interpreter's lock, which is nobody's fault."""


class WatchThread(threading.Thread):
    """Thread that only watches. It does not count as left behind by an agent, and its processor time is ignored."""


class Watcher:
    """Runs `run` in a thread of its own while entered. `run` must return soon after `stop` is set.

    It knows the event loop in which it was entered, and the loop's thread by its Python and its native ID.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self.loop_thread, self.loop_native = threading.get_ident(), threading.get_native_id()
        self.thread = WatchThread(target=self.run, name=type(self).__name__, daemon=True)
        self.thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def run(self) -> None:
        raise NotImplementedError


class BusyWatch(Watcher):
    """Measures, while entered, how long threads and child processes computed or waited for a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.busy_s = 0.0
        """Seconds since entry in which something ran or was ready to run."""

    def idle_s(self) -> float:
        """Return the seconds up to now in which nothing ran or was ready to run. Only differences have a meaning."""
        return time.monotonic() - self.busy_s

    def run(self) -> None:
        before = _wanted()
        seen, idle, cost = time.monotonic(), 0.0, 0.0
        while not self.stop.wait(max(LOOK_S, COST * cost)):
            computed = time.thread_time()
            now, wanted = time.monotonic(), _wanted()
            span, seen = now - seen, now
            new = sum(seconds - before.get(thread, 0.0) for thread, seconds in wanted.items())
            ready = sum(state_of(pid) == "R" for pid in children())
            new += span * min(1.0, ready / cores())  # children, which may have to share the processors
            before = wanted
            busy = min(max(0.0, new), span + idle)
            self.busy_s += busy
            idle = min(LATE_S, max(0.0, idle + span - busy))
            cost = time.thread_time() - computed


def _wanted() -> dict[int, float]:
    """Return the seconds for which each thread computed or waited for a processor, by native thread ID."""
    wanted = {}
    for thread in threading.enumerate():
        if thread.native_id is not None and not isinstance(thread, WatchThread):
            wanted[thread.native_id] = sum(scheduled(thread.native_id))
    return wanted if any(wanted.values()) else {0: time.process_time()}  # all 0: this is not Linux


def scheduled(thread: int) -> tuple[float, float]:
    """Return the seconds for which a thread of this process computed, and for which it was ready but had no processor.

    `thread` is a native ID.
    """
    with suppress(OSError, ValueError):  # it may have ended
        computed, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return int(computed) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


def children() -> Iterator[int]:
    """Yield the process IDs of this process's descendants. Linux only.

    Processes that a descendant started outside its main thread are missing.
    """
    for thread in threading.enumerate():
        yield from _below(f"/proc/self/task/{thread.native_id}/children")


def _below(listing: str) -> Iterator[int]:
    with suppress(OSError):
        for pid in Path(listing).read_text().split():
            yield int(pid)
            yield from _below(f"/proc/{pid}/task/{pid}/children")


def state_of(pid: int) -> str:
    """Return the kernel's abbreviation for a process's state, such as R or Z; empty when the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return ""


def working_threads() -> set[int]:
    """Return the native IDs of all threads except those that watch; empty except on Linux.

    Threads that watch wake so often that they wait for a processor even if nothing else needs one.
    """
    threads = {int(path.name) for path in Path("/proc/self/task").glob("*")}  # also threads unknown to Python
    return threads - {each.native_id for each in threading.enumerate() if isinstance(each, WatchThread)}


def sleeps_in_a_call(thread: int, stack: Sequence[Line] = ()) -> bool:
    """Return whether a thread of this process waits in a system call, other than for the interpreter.

    The answer is False where the kernel does not report the call. A lock for which the thread waits inside `threading`,
    according to its stack, is not the interpreter's, unless the thread is starting another one, which must first get
    the interpreter.
    """
    within = [code.co_name for code, _ in stack if code.co_filename == threading.__file__]
    waits = bool(stack) and stack[0][0].co_filename == threading.__file__ and "start" not in within
    with suppress(OSError, ValueError):
        call = Path(f"/proc/self/task/{thread}/syscall").read_text().split(maxsplit=1)[0]
        if call != "running" and FUTEX is not None:
            return waits if int(call) == FUTEX else int(call) != -1
    return False
