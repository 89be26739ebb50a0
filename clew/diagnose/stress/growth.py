"""What grows with every episode and never stops: tasks, threads, open files, sessions, memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clew.diagnose.stress.frames import Code, is_clew, is_loop, shown_path, stack_of_coroutine, stack_of_thread
from clew.diagnose.stress.verdict import Verdict
from clew.diagnose.stress.watch import WATCHING

SETTLE_S = 0.05
"""What ends by itself shortly after the last episode is no leak."""

DEPTH = 8
"""Frames of each allocation that are kept, to find the user's line among them."""

QUANTITIES = {
    "tasks": (0.05, 2, "{:.1f} tasks"),
    "threads": (0.05, 2, "{:.1f} threads"),
    "files": (0.05, 2, "{:.1f} open files or sockets"),
    "sessions": (0.05, 2, "{:.1f} sessions"),
    "memory": (512, 16 * 2**10, "{:,.0f} bytes"),
    "resident": (64 * 2**10, 16 * 2**20, "{:,.0f} bytes of resident memory"),
}
"""What is counted: the least growth an episode, the least in all, and how it is told. `memory` is what the user's code
allocated and holds; `resident` is the whole process's, which is known less well."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was there after a wave of episodes."""

    episodes: int
    """So far."""
    counts: dict[str, float]
    """By the names of QUANTITIES."""
    examples: dict[str, str] = field(default_factory=dict)
    """The commonest of each: where it is from."""


def grows(samples: Sequence[Sample], quantity: str) -> float | None:
    """Growth an episode, when it is steady: in each wave but the first, which may warm up, and not levelling off.

    None: it does not grow, or there are fewer than three waves to tell from.
    """
    least, least_in_all, _ = QUANTITIES[quantity]
    points = [(s.episodes, s.counts[quantity]) for s in samples if quantity in s.counts]
    if len(points) < 3:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    mean = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    steady = min(slopes) >= max(least, 0.5 * mean)
    return mean if steady and points[-1][1] - points[0][1] >= least_in_all else None


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """What grows. The process's memory is named only when the user's code does not explain it."""
    found = []
    for quantity, (_, _, told) in QUANTITIES.items():
        slope = grows(samples, quantity)
        if slope is None or (quantity == "resident" and any(v.what.startswith("memory") for v in found)):
            continue
        values = [s.counts[quantity] for s in samples if quantity in s.counts]
        found.append(
            Verdict(
                kind="growth",
                what=f"{quantity} left behind: +{told.format(slope)} with every episode",
                where=samples[-1].examples.get(quantity, ""),
                evidence=["after each wave of episodes: " + ", ".join(f"{value:,.0f}" for value in values)],
            )
        )
    return found


class Sampler:
    """Takes samples in the event loop in which it was made; what was there before is not counted."""

    def __init__(self, code: Code, sessions: Callable[[], int] | None = None) -> None:
        """sessions: how many the gateway holds open."""
        self._code = code
        self._sessions = sessions
        self._tasks = set(asyncio.all_tasks())
        self._threads = set(threading.enumerate())
        self._files = _open_files()

    def left_tasks(self) -> list[asyncio.Task]:
        """Tasks that run, and did not when this was made."""
        return [task for task in asyncio.all_tasks() if task not in self._tasks and task is not asyncio.current_task()]

    async def sample(self, episodes: int) -> Sample:
        """episodes: that have run so far."""
        gc.collect()
        await asyncio.sleep(SETTLE_S)
        gc.collect()
        tasks = self.left_tasks()
        threads = [each for each in threading.enumerate() if each not in self._threads and each.name not in WATCHING]
        files = {number: name for number, name in _open_files().items() if self._files.get(number) != name}
        counts: dict[str, float] = {"tasks": len(tasks), "threads": len(threads)}
        examples = {
            "tasks": _commonest(
                str(self._code.place(stack_of_coroutine(task.get_coro())) or task.get_name()) for task in tasks
            ),
            "threads": _commonest(
                f"{re.sub(r'[0-9]+', '#', thread.name)}, at {self._code.place(stack_of_thread(thread.ident or 0))}"
                for thread in threads
            ),
        }
        if sys.platform == "linux":
            counts["files"] = len(files)
            examples["files"] = _commonest(re.sub(r"\d+", "#", name) for name in files.values())
            counts["resident"] = _resident()
        if self._sessions is not None:
            counts["sessions"] = self._sessions()
        if tracemalloc.is_tracing():
            held = self._held()
            counts["memory"] = held.total()
            examples["memory"] = held.most_common(1)[0][0] if held else ""
            del counts["resident"]  # to trace costs memory itself
        return Sample(episodes=episodes, counts=counts, examples=examples)

    def _held(self) -> Counter[str]:
        """Bytes that the user's code holds, by the line that allocated them."""
        held: Counter[str] = Counter()
        for trace in tracemalloc.take_snapshot().statistics("traceback"):
            for frame in reversed(trace.traceback):  # innermost first
                if is_loop(frame.filename) or is_clew(frame.filename):
                    break  # below it is whoever runs the loop
                if self._code.is_user(frame.filename):
                    held[f"{shown_path(frame.filename)}:{frame.lineno}"] += trace.size
                    break
        return held


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> dict[int, str]:
    """Descriptor to what it is of."""
    files: dict[int, str] = {}
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            files[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the listing's own
            continue
    return files


def _commonest(names: Iterable[str]) -> str:
    counts = Counter(names)
    return counts.most_common(1)[0][0] if counts else ""
