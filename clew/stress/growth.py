"""Things that episodes leave behind: tasks, threads, open files, sessions, memory, unseen errors, unclosed clients."""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clew.stress.busy import WatchThread, children
from clew.stress.frames import Code, is_clew, is_loop, shown_path, stack_of_coroutine, stack_of_error, stack_of_thread
from clew.stress.origins import Origins
from clew.stress.verdict import Verdict

SETTLE_S = 0.05
"""Seconds to wait after the last episode: anything that ends by itself in this time is no leak."""

DEPTH = 8
"""Number of frames kept for each allocation, to find the user's line among them."""

SHRINKS = 0.8
"""Ratio of a wave's growth per episode to that of the wave before, below which it shrinks."""

NEVER_CLOSED = "Unclosed client session"
"""Message with which aiohttp reports a client session that was left to the garbage collector."""

NOT_CLOSED_EITHER = "Unclosed connector"
"""Message that aiohttp adds for the connections of such a session."""

NEVER_LOOKED_AT = "Task exception was never retrieved"

SHARE = 0.1
"""Number of reports of one of these kinds, as a share of the episodes, above which they count as a fault."""

QUANTITIES = {
    "tasks": (0.05, 2, "{:.1f} tasks"),
    "threads": (0.05, 2, "{:.1f} threads"),
    "processes": (0.05, 2, "{:.1f} processes"),
    "files": (0.05, 2, "{:.1f} open files or pipes"),
    "sockets": (0.05, 2, "{:.1f} sockets"),
    "temp": (0.05, 2, "{:.1f} temporary files or folders"),
    "sessions": (0.05, 2, "{:.1f} sessions"),
    "memory": (512, 16 * 2**10, "{:,.0f} bytes"),
    "resident": (64 * 2**10, 16 * 2**20, "{:,.0f} bytes of resident memory"),
}
"""Quantities that are counted: minimum growth per episode, minimum growth in total, and format of the message.

`memory` is what the user's code allocated and still holds. `resident` is the memory of the whole process, whose cause
is less certain.
"""

COMES = {
    "tasks": "created at",
    "threads": "started at",
    "processes": "started at",
    "files": "opened at",
    "sockets": "connected at",
    "temp": "by",
}
"""Word before the line that each thing comes from."""


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
    """Return the growth per episode if it is steady; None if it is not, or if fewer than three waves counted it.

    Growth in the first of these waves is left out, because it may be warm-up. Growth is steady if each later wave adds
    at least half of the mean and the minimum of QUANTITIES, and if it does not shrink from wave to wave, which takes
    four waves to tell.
    """
    counted = [sample for sample in samples if quantity in sample.counts]
    return _slope([each.episodes for each in counted], [each.counts[quantity] for each in counted], quantity)


def _slope(episodes: Sequence[int], values: Sequence[float], quantity: str) -> float | None:
    least, least_in_all, _ = QUANTITIES[quantity]
    if len(values) < 3:
        return None
    points = zip(episodes, values, strict=True)
    slopes = [(after - before) / (end - start) for (start, before), (end, after) in itertools.pairwise(points)]
    growth = values[-1] - values[0]
    mean = growth / (episodes[-1] - episodes[0])
    steady = min(slopes) >= max(least, 0.5 * mean)
    shrinks = len(slopes) > 2 and all(b < SHRINKS * a for a, b in itertools.pairwise(slopes))
    return mean if steady and not shrinks and growth >= least_in_all else None


def judge_growth(samples: Sequence[Sample]) -> list[Verdict]:
    """Return a verdict for each quantity that grows, without `resident` if `memory` grows, which explains it.

    The share of a single line is judged before the whole quantity.
    """
    verdicts: dict[str, Verdict] = {}
    for quantity, (_, _, format) in QUANTITIES.items():
        counted = [sample for sample in samples if quantity in sample.counts]
        lines = sorted({line for sample in counted for line in sample.by_line.get(quantity, ()) if line})
        shares = {line: [sample.by_line[quantity].get(line, 0) for sample in counted] for line in lines}
        for line, values in [*shares.items(), ("", [sample.counts[quantity] for sample in counted])]:
            slope = _slope([sample.episodes for sample in counted], values, quantity)
            if slope is None or (quantity == "resident" and "memory" in verdicts):
                continue
            examples = (sample.examples.get(quantity, "") for sample in reversed(samples))
            unnamed = f"{COMES[quantity]} {line}" if line else ""
            where = next((example for example in examples if line in example), unnamed)
            what = f"{quantity} left behind: +{format.format(slope)} with every episode"
            evidence = ["after each wave of episodes: " + ", ".join(f"{value:,.0f}" for value in values)]
            verdicts[quantity] = Verdict(kind="growth", what=what, where=where, evidence=evidence)
            break
    return list(verdicts.values())


class Sampler:
    """Takes samples in the event loop in which it was created. Anything that existed before is not counted."""

    def __init__(self, code: Code, origins: Origins, sessions: Callable[[], int]) -> None:
        """Remember what exists now, so that samples can leave it out. `sessions` counts the gateway's open sessions."""
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
        """Return the counts now, after this number of episodes."""
        gc.collect()
        await asyncio.sleep(SETTLE_S)
        gc.collect()  # once more, for what ended while it slept
        new = (thread for thread in threading.enumerate() if thread not in self._threads)
        threads = [thread for thread in new if not isinstance(thread, WatchThread)]
        origins = self._origins
        left = {
            "tasks": [(self._task(task), origins.tasks.get(task, "")) for task in self.left_tasks()],
            "threads": [(self._thread(thread), origins.threads.get(thread, "")) for thread in threads],
            "temp": [("", line) for path, line in list(origins.temporary.items()) if os.access(path, os.F_OK)],
        }
        """Each thing that is left, and the line that it comes from, by quantity."""
        if sys.platform == "linux":
            left |= {"files": [], "sockets": []}
            for number, name in sorted(_open_files().items() - self._files.items()):
                if name.startswith("socket:"):
                    left["sockets"].append(("", origins.sockets.get(number, "")))
                else:
                    left["files"].append((re.sub(r"\d+", "#", name), self._opened_at(name)))
            started = len(set(children()) - self._processes)
            left["processes"] = [("", _largest(origins.processes))] * started
        counts: dict[str, float] = {quantity: len(things) for quantity, things in left.items()}
        counts["sessions"] = self._sessions()
        examples = {quantity: _most_common(quantity, things) for quantity, things in left.items()}
        by_line = {each: dict(Counter(line for _, line in left.get(each, ()))) for each in ("files", "sockets")}
        if tracemalloc.is_tracing():
            held = self._held()
            counts["memory"], examples["memory"] = held.total(), _largest(held)
        elif sys.platform == "linux":  # tracing itself costs memory
            counts["resident"] = _resident()
        return Sample(episodes=episodes, counts=counts, examples=examples, by_line=by_line)

    def _task(self, task: asyncio.Task) -> str:
        return str(self._code.place(stack_of_coroutine(task.get_coro())) or task.get_name())

    def _thread(self, thread: threading.Thread) -> str:
        place = self._code.place(stack_of_thread(thread.ident or 0))
        return re.sub(r"[0-9]+", "#", thread.name) + (f", at {place}" if place else "")

    def _opened_at(self, name: str) -> str:
        """Return the user's line that opened a file; for a file without a name, the line that opened its folder."""
        path = Path(name.removesuffix(" (deleted)"))
        return self._origins.files.get(str(path)) or self._origins.files.get(str(path.parent), "")

    def _held(self) -> Counter[str]:
        """Return the bytes that the user's code holds, by the line that allocated them."""
        held: Counter[str] = Counter()
        for trace in tracemalloc.take_snapshot().statistics("traceback"):
            for frame in reversed(trace.traceback):  # innermost first
                if is_loop(frame.filename) or is_clew(frame.filename):
                    break  # the frames outside are those of whoever runs the loop
                if self._code.is_user(frame.filename):
                    held[f"{shown_path(frame.filename)}:{frame.lineno}"] += trace.size
                    break
        return held


class Complaints:
    """Problems that asyncio and its libraries report to the event loop because no caller is left to receive them."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._unclosed = 0
        self._errors: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        self._printed = {NOT_CLOSED_EITHER}

    def hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count a report of an unclosed session or an unseen error, and print any other once.

        This is the handler to pass to `loop.set_exception_handler`.
        """
        message, error = str(context.get("message", "")), context.get("exception")
        with self._lock:
            if message == NEVER_CLOSED:
                self._unclosed += 1
            elif message == NEVER_LOOKED_AT:
                place = str(self._code.place(stack_of_error(error)) or "") if error is not None else ""
                self._errors[f"{type(error).__name__}: {error}"] += 1
                self._places[place] += 1
            elif message not in self._printed:
                self._printed.add(message)
                loop.default_exception_handler(context)

    def verdicts(self, episodes: int, origins: Origins) -> list[Verdict]:
        """Return verdicts on the problems that happened in more than SHARE of the episodes."""
        verdicts: list[Verdict] = []
        if self._unclosed > SHARE * episodes:
            what = f"{self._unclosed} client sessions of aiohttp were left to the garbage collector"
            where = _most_common("sockets", [("", line) for line in origins.sockets.values()])
            advice = "close each: async with aiohttp.ClientSession() as session"
            verdicts.append(Verdict(kind="growth", what=what, where=where, evidence=[advice]))
        if (unseen := self._errors.total()) > SHARE * episodes:
            what = f"{unseen} tasks of {episodes} episodes failed, and nobody looked at their errors"
            evidence = [f"{count} times {error}" for error, count in self._errors.most_common(3)]
            verdicts.append(Verdict(kind="fails", what=what, where=_largest(self._places), evidence=evidence))
        return verdicts


def _most_common(quantity: str, things: Sequence[tuple[str, str]]) -> str:
    """Return the most common of the things that are left, and the line it comes from, as far as either is known."""
    lines = ((thing, f"{COMES[quantity]} {line}" if line else "") for thing, line in things)
    return _largest(Counter(", ".join(filter(None, each)) for each in lines if any(each)))


def _resident() -> int:
    """Return the number of bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> dict[int, str]:
    """Return the target of each open file descriptor."""
    files: dict[int, str] = {}
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            files[int(entry.name)] = str(entry.readlink())
    return files


def _largest(counts: Counter[str]) -> str:
    return counts.most_common(1)[0][0] if counts else ""
