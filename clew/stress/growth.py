"""Resources that grow with every episode and never stop: tasks, threads, open files, sessions, memory."""

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

from clew.stress.busy import children
from clew.stress.frames import Code, is_clew, is_loop, shown_path, stack_of_coroutine, stack_of_thread
from clew.stress.origins import Origins
from clew.stress.verdict import Verdict
from clew.stress.watch import WATCHING

SETTLE_S = 0.05
"""Seconds to wait after the last episode: anything that ends by itself in this time is no leak."""

DEPTH = 8
"""Number of frames kept for each allocation, to find the user's line among them."""

SHRINKS = 0.8
"""Ratio of a wave's growth per episode to that of the wave before, below which it shrinks."""

QUANTITIES = {
    "tasks": (0.05, 2, "{:.1f} tasks"),
    "threads": (0.05, 2, "{:.1f} threads"),
    "processes": (0.05, 2, "{:.1f} processes"),
    "files": (0.05, 2, "{:.1f} open files or pipes"),
    "sockets": (0.05, 2, "{:.1f} sockets"),
    "sessions": (0.05, 2, "{:.1f} sessions"),
    "memory": (512, 16 * 2**10, "{:,.0f} bytes"),
    "resident": (64 * 2**10, 16 * 2**20, "{:,.0f} bytes of resident memory"),
}
"""Quantities that are counted: minimum growth per episode, minimum growth in total, and format of the message.

`memory` is what the user's code allocated and still holds. `resident` is the memory of the whole process, whose cause
is less certain.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Counts after a wave of episodes."""

    episodes: int
    """Number of episodes run so far."""
    counts: dict[str, float]
    """Count of each quantity, by the names of QUANTITIES."""
    examples: dict[str, str] = field(default_factory=dict)
    """Most common example of each quantity, with the line it comes from."""
    by_line: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of open files and sockets, by the line that opened them.

    A leak shows here even if a pool closes idle connections meanwhile. (Not a Counter, because dataclasses.asdict would
    count its items.)
    """


def grows(samples: Sequence[Sample], quantity: str) -> float | None:
    """Return the growth per episode if it is steady.

    The first wave is left out, because it may warm up. Growth is steady if each wave after it adds at least half of the
    mean, and if the growth does not shrink from wave to wave, of which it takes four to tell.

    Returns:
        None if the quantity does not grow steadily, or if fewer than three waves counted it.
    """
    least, least_in_all, _ = QUANTITIES[quantity]
    points = [(s.episodes, s.counts[quantity]) for s in samples if quantity in s.counts]
    if len(points) < 3:
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    mean = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    steady = min(slopes) >= max(least, 0.5 * mean)
    shrinks = len(slopes) > 2 and all(b < SHRINKS * a for a, b in itertools.pairwise(slopes))
    return mean if steady and not shrinks and points[-1][1] - points[0][1] >= least_in_all else None


def line_that_leaks(samples: Sequence[Sample], quantity: str) -> tuple[str, list[float]]:
    """Return the line whose share of a quantity grows steadily, and its counts; empty if there is none."""
    counted = [sample for sample in samples if quantity in sample.counts]
    lines = {line for sample in counted for line in sample.by_line.get(quantity, ()) if line}
    for line in sorted(lines):
        values = [float(sample.by_line.get(quantity, {}).get(line, 0)) for sample in counted]
        series = [
            Sample(episodes=sample.episodes, counts={quantity: value})
            for sample, value in zip(counted, values, strict=True)
        ]
        if grows(series, quantity) is not None:
            return line, values
    return "", []


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """Return a verdict for each quantity that grows.

    The memory of the whole process is named only if the user's code does not explain it.
    """
    found = []
    for quantity, (_, _, told) in QUANTITIES.items():
        slope, where = grows(samples, quantity), samples[-1].examples.get(quantity, "")
        line, part = line_that_leaks(samples, quantity)
        if line:
            span = samples[-1].episodes - samples[0].episodes
            slope, where = (
                (part[-1] - part[0]) / span,
                next(
                    (each.examples[quantity] for each in reversed(samples) if line in each.examples.get(quantity, "")),
                    f"opened at {line}",
                ),
            )
        if slope is None or (quantity == "resident" and any(v.what.startswith("memory") for v in found)):
            continue
        values = part or [s.counts[quantity] for s in samples if quantity in s.counts]
        found.append(
            Verdict(
                kind="growth",
                what=f"{quantity} left behind: +{told.format(slope)} with every episode",
                where=where,
                evidence=["after each wave of episodes: " + ", ".join(f"{value:,.0f}" for value in values)],
            )
        )
    return found


class Sampler:
    """Takes samples in the event loop in which it was created. Anything that existed before is not counted."""

    def __init__(self, code: Code, origins: Origins, sessions: Callable[[], int] | None = None) -> None:
        """Remember what exists now, so that samples can leave it out.

        Args:
            code: Tells the user's code from libraries'.
            origins: Provides the lines that created tasks, threads, files and sockets.
            sessions: Returns the number of sessions that the gateway holds open.
        """
        self._code = code
        self._origins = origins
        self._sessions = sessions
        self._tasks = set(asyncio.all_tasks())
        self._threads = set(threading.enumerate())
        self._files = _open_files()
        self._processes = set(children())

    def left_tasks(self) -> list[asyncio.Task]:
        """Return the tasks that run now and did not when this was created."""
        return [task for task in asyncio.all_tasks() if task not in self._tasks and task is not asyncio.current_task()]

    async def sample(self, episodes: int) -> Sample:
        """Return the counts now.

        Args:
            episodes: Number of episodes that have run so far.
        """
        gc.collect()
        await asyncio.sleep(SETTLE_S)
        gc.collect()
        tasks = self.left_tasks()
        threads = [each for each in threading.enumerate() if each not in self._threads and each.name not in WATCHING]
        files = {number: name for number, name in _open_files().items() if self._files.get(number) != name}
        by_line: dict[str, dict[str, int]] = {}
        counts: dict[str, float] = {"tasks": len(tasks), "threads": len(threads)}
        examples = {
            "tasks": _commonest(
                _with(
                    str(self._code.place(stack_of_coroutine(task.get_coro())) or task.get_name()),
                    "created at",
                    self._origins.tasks.get(task, ""),
                )
                for task in tasks
            ),
            "threads": _commonest(
                _with(
                    f"{re.sub(r'[0-9]+', '#', thread.name)}, at {self._code.place(stack_of_thread(thread.ident or 0))}",
                    "started at",
                    self._origins.threads.get(thread, ""),
                )
                for thread in threads
            ),
        }
        if sys.platform == "linux":
            sockets = {number for number, name in files.items() if name.startswith("socket:")}
            counts["processes"] = len(set(children()) - self._processes)
            counts["files"], counts["sockets"] = len(files) - len(sockets), len(sockets)
            examples["processes"] = _with("", "started at", _commonest(self._origins.processes.elements()))
            examples["files"] = _commonest(
                _with(re.sub(r"\d+", "#", name), "opened at", self._opened_at(name))
                for number, name in files.items()
                if number not in sockets
            )
            examples["sockets"] = _with(
                "", "connected at", _commonest(filter(None, map(self._origins.sockets.get, sockets)))
            )
            opened = (self._opened_at(name) for number, name in files.items() if number not in sockets)
            by_line["files"] = dict(Counter(opened))
            by_line["sockets"] = dict(Counter(self._origins.sockets.get(number, "") for number in sockets))
            counts["resident"] = _resident()
        if self._sessions is not None:
            counts["sessions"] = self._sessions()
        if tracemalloc.is_tracing():
            held = self._held()
            counts["memory"] = held.total()
            examples["memory"] = held.most_common(1)[0][0] if held else ""
            del counts["resident"]  # to trace costs memory itself
        return Sample(episodes=episodes, counts=counts, examples=examples, by_line=by_line)

    def _opened_at(self, name: str) -> str:
        """Return the user's line that opened a file; for a file without a name, the line that opened its folder.

        Args:
            name: What the file descriptor links to.
        """
        path = Path(name.removesuffix(" (deleted)"))
        return self._origins.files.get(str(path)) or self._origins.files.get(str(path.parent), "")

    def _held(self) -> Counter[str]:
        """Return the bytes that the user's code holds, by the line that allocated them."""
        held: Counter[str] = Counter()
        for trace in tracemalloc.take_snapshot().statistics("traceback"):
            for frame in reversed(trace.traceback):  # innermost first
                if is_loop(frame.filename) or is_clew(frame.filename):
                    break  # below it is whoever runs the loop
                if self._code.is_user(frame.filename):
                    held[f"{shown_path(frame.filename)}:{frame.lineno}"] += trace.size
                    break
        return held


def _with(what: str, how: str, place: str) -> str:
    """Return what is left behind and where it comes from, as far as either is known."""
    return ", ".join(filter(None, (what, f"{how} {place}" if place else "")))


def _resident() -> int:
    """Return the number of bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> dict[int, str]:
    """Return the target of each open file descriptor."""
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
