"""Processor time of the threads of this process and of the processes they start: episodes may wait for these.

The sum of their time counts, not the share of the machine. While a lock is held across a sleep, all of them are idle,
however many other programs compete for the cores. While a crowd waits for a processor, they are not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from clew.processes import cores

LOOK_S = 0.02
"""Minimum seconds between two looks."""

COST = 10
"""Minimum time between two looks, as a multiple of the processor time that a look takes."""

LATE_S = 0.2
"""Maximum seconds before a look at which a wait may have begun: the kernel counts a wait only when it is over."""

BUSY_THREAD = "clew busy watch"


class BusyWatch:
    """Measures, while entered, how long threads and child processes computed or waited for a processor."""

    def __init__(self, ignored: tuple[str, ...]) -> None:
        """Create a watch.

        Args:
            ignored: Names of threads that only watch, and are not counted.
        """
        self._ignored = (*ignored, BUSY_THREAD)
        self._stop = threading.Event()
        self._busy_s = 0.0
        self._began = time.monotonic()

    async def __aenter__(self) -> BusyWatch:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=BUSY_THREAD, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def busy_s(self) -> float:
        """Return the seconds since entry in which something ran or was ready to run."""
        return self._busy_s

    def idle_s(self) -> float:
        """Return the seconds since entry in which nothing ran or was ready to run."""
        return max(0.0, time.monotonic() - self._began - self._busy_s)

    def _run(self) -> None:
        before = self._wanted()
        seen, idle, cost = time.monotonic(), 0.0, 0.0
        while not self._stop.wait(max(LOOK_S, COST * cost)):
            computed = time.thread_time()
            now, wanted = time.monotonic(), self._wanted()
            span, seen = now - seen, now
            new = sum(seconds - before.get(thread, 0.0) for thread, seconds in wanted.items())
            new += span * min(1.0, self._children_ready() / cores())
            before = wanted
            busy = min(max(0.0, new), span + idle)
            self._busy_s += busy
            idle = min(LATE_S, max(0.0, idle + span - busy))
            cost = time.thread_time() - computed

    def _wanted(self) -> dict[int, float]:
        """Return the seconds for which each thread computed or waited for a processor, by native thread ID."""
        wanted = {}
        for thread in threading.enumerate():
            if thread.native_id is not None and thread.name not in self._ignored:
                wanted[thread.native_id] = sum(scheduled(thread.native_id))
        if not any(wanted.values()):  # not on Linux
            wanted = {0: time.process_time()}
        return wanted

    def _children_ready(self) -> int:
        """Return the number of descendant processes that run or are ready to run."""
        return sum(state_of(pid) == "R" for pid in children())


def scheduled(thread: int) -> tuple[float, float]:
    """Return the seconds for which a thread of this process computed, and for which it was ready but had no processor.

    Args:
        thread: Native ID of the thread.
    """
    with suppress(OSError, ValueError):  # it may have ended
        computed, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return int(computed) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


def children() -> Iterator[int]:
    """Yield the process ID of each descendant of this process. Linux only."""
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
