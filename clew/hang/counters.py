"""Finds the integers in the user's frames that show progress: which were read, and which of them advanced."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from clew.hang import source
from clew.hang.activity import activity_of
from clew.hang.looks import busy, own_code_only, recent
from clew.hang.observed import PROGRAM, Look, Process

WAITING_NAMES = re.compile(
    r"(^|[._(])(n|num_)?(wait\w*|try|tries|attempt\w*|retr(y|ies|ied|ying)|poll(s|ed|ing)?|spin\w*|elapsed|"
    r"deadline|timeout|\w*time(r|stamp)?|now|(heart)?beats?|ticks?|pid|port|seed|fd|pause\w*|backoff|delay)s?($|[^a-z])",
    re.I,
)
"""Names of counters that a loop advances while it waits. Whole words only: `timestep` and `entries` count work."""
DEADLINE = "its deadline"
"""Beginning of the name of a deadline that is used as a counter."""
ACCEPTED = re.compile(r"accept|kept|keep|good|ready|done|put|sent|emitted|passed|step|version|update|iter|batch|len\(")
"""Names of counters that grow if not everything is rejected."""


class CounterName(NamedTuple):
    """Name of an integer in a frame of the user's, the same in each look."""

    of: Literal["main", "task", "thread"]
    """Kind of what runs the frame: main for the thread whose number is the pid."""
    thread: int
    """Number of the thread; the address of a task."""
    in_while: bool
    """True if only growth shows progress, because the rounds of a `while` may change it back and forth."""
    depth: int
    """Place of its frame, from the outermost one."""
    function: str
    variable: str
    """Variable, such as step, self.step or len(self.rows)."""
    list_at: int = 0
    """Address of the list in len(...). A new list in each round does not grow."""

    @property
    def frame(self) -> tuple[object, ...]:
        """Return what the counters of one frame share."""
        return self[: self._fields.index("variable")]

    @property
    def last(self) -> str:
        """Return the last name of the variable, such as rows of len(self.rows)."""
        return last_name(self.variable)

    @property
    def short(self) -> str:
        """Return the function and the variable, as verdicts name them."""
        return f"{self.function}.{self.variable}"


def last_name(variable: str) -> str:
    """Return the last name of a variable, such as errors of client.errors and of len(self.errors)."""
    return variable.removesuffix(")").rpartition("(")[2].rpartition(".")[2]


def moved_counters(
    process: Process, sources: Mapping[str, str], *, must_grow: bool = False
) -> dict[CounterName, tuple[int, int]]:
    """Return the first and the last value of each counter that advanced, without those of polling loops.

    With `must_grow`, numbers that go back and forth are left out everywhere, not only in a `while`.
    """
    looks = [look for look in recent(process).looks if any(frame.locals for t in look.threads for frame in t.frames)]
    if len(looks) < 2:
        return {}
    every = [counters_in(look, process, sources) for look in looks]
    first, last = _with_unread(looks[0], every[0], every[1]), _with_unread(looks[-1], every[-1], every[-2])
    # Tasks that answer requests come and go: one may have begun, counted and ended between the first and the last look.
    tasks = {name for each in every for name in each if name.of == "task"}
    found: dict[CounterName, tuple[int, int]] = {}
    for name in sorted((first.keys() & last.keys()) | tasks):
        values = [each[name] for each in every if name in each]
        # In a `while`, two looks can differ by chance: its numbers must only grow, and take three values if it is busy.
        enough = 3 if name.in_while and busy(process) else 2
        if len(set(values)) >= enough and (_grow(values) or not (name.in_while or must_grow)):
            found[name] = (values[0], values[-1])
    monitors = _monitors(looks[-1], process, sources) if any(name.of != "main" for name in found) else set[int]()
    return {name: moved for name, moved in found.items() if name.thread not in monitors}


def _grow(values: list[int]) -> bool:
    """Return whether numbers never fall. One of eight may be wrong, and three of eleven.

    The memory of a wrong one was used again before it was read. Without those, the numbers must rise at each look.
    """
    ends: list[int] = []  # of the shortest rising series of each length, so that the last belongs to the longest
    for value in values:
        place = bisect_left(ends, value)
        ends[place : place + 1] = [value]
    wrong = len(values) - len(ends)
    return values == sorted(values) or (len(values) >= 8 and wrong <= (len(values) - 5) / 2)


def _with_unread(
    look: Look, counters: dict[CounterName, int], beside: dict[CounterName, int]
) -> dict[CounterName, int]:
    """Return a look's counters, with those of its frames that changed too fast to be read, from the look beside it."""
    frames = {name.frame for name in counters}
    read = {f"{frame.name}.{name}" for thread in look.threads for frame in thread.frames for name in frame.locals}
    unread = (name for name in beside if name.frame in frames and name.short not in read)
    return {name: beside[name] for name in unread} | counters


def _monitors(look: Look, process: Process, sources: Mapping[str, str]) -> set[int]:
    """Return the threads and tasks, as in `CounterName`, that only report, and could end no wait of others.

    The set is empty if the main thread only joins threads or awaits results: it may wait for any of them.
    """
    every = [(t, activity_of(process, t, sources)) for t in look.threads]
    if any(t.os_id == process.pid and each.kind in ("thread", "future", "pool") for t, each in every):
        return set()
    waiting = (each for _, each in every if not (each.heartbeat or each.idle_loop or each.kind in ("tasks", "sleep")))
    waits = {(each.kind, each.target) for each in waiting if each.target}
    monitors = set[int]()
    for thread, each in every:
        text = sources.get(each.file, "")
        # A heartbeat is given what it reports to: nobody waits for that.
        if each.heartbeat and waits and not source.ends_one_of(text, each.line, waits, by_argument=False):
            monitors.add(thread.at if thread.task else thread.os_id)
    return monitors


def counters_in(look: Look, process: Process, sources: Mapping[str, str]) -> dict[CounterName, int]:
    """Return the integers in the user's frames that may show progress."""
    found: dict[CounterName, int] = {}
    works = busy(process)
    own = works and own_code_only(process)
    for thread in look.threads:
        of = "main" if thread.os_id == process.pid else "task" if thread.task else "thread"
        number = thread.at if of == "task" else thread.os_id
        around = False
        for depth, frame in enumerate(reversed(thread.frames)):
            if not frame.of_user and frame.file != PROGRAM:
                continue
            text = sources.get(frame.file, "")
            loop = source.outermost_loop(text, frame.line)
            skipped = polling_counters(text, frame.line) | source.made_anew(text, frame.line) if text else set()
            failures = source.failures(text)
            until = deadlines(text, frame.line) if text and works else set()
            # A counter that goes back and forth in a `while`, or in a `for` that calls nothing, shows no progress. Nor
            # does one in a function that such a loop calls, if there is nothing but Python to run.
            spins = isinstance(loop, ast.For) and not source.calls_of(loop)
            in_while = around or isinstance(loop, ast.While) or spins
            around = in_while and own
            place = CounterName(of, number, in_while, depth, frame.name, "")
            for name, value in frame.locals.items():
                hidden = name in skipped or name.removeprefix("self.") in skipped or last_name(name) in failures
                if re.fullmatch(r"-?\d{1,15}", value) and not WAITING_NAMES.search(name) and not hidden:
                    list_at = frame.addresses.get(name[4:-1], 0) if name.startswith("len(") else 0
                    found[place._replace(variable=name, list_at=list_at)] = int(value)
                elif name in until and re.fullmatch(r"\d{1,12}\.\d+", value):
                    deadline = place._replace(in_while=False, variable=f"{DEADLINE} {name} (in ms)")
                    found[deadline] = round(1000 * float(value))
    return found


def deadlines(text: str, line: int) -> set[str]:
    """Return the names with which the innermost `while` around a line compares the clock, unless it only polls.

    Such a loop ends by itself. If its deadline moves, it has ended and started again.
    """
    loop = source.loop_at(text, line)
    if not isinstance(loop, ast.While) or source.polls(loop, text):
        return set()
    asks_clock = any(source.CLOCK.search(source.dotted(call.func)) for call in source.calls_in(loop.test))
    return source.names_in(loop.test) if asks_clock else set()


@lru_cache(maxsize=4096)
def polling_counters(text: str, line: int) -> set[str]:
    """Return the names that show no progress: clocks, and what a polling, spinning or retrying loop changes."""
    loop, clocks = source.loop_at(text, line), source.clocks(text, line)
    if loop is None:
        return clocks
    clocks = clocks | source.missed(loop)
    if source.retries(loop):
        tested = set()
    elif isinstance(loop, ast.While) and (source.polls(loop, text) or not source.calls_of(loop)):
        tested = source.names_in(loop.test)
    elif isinstance(loop, ast.For) and source.asks_for_file(loop, text):
        tested = set()
    else:
        return clocks
    changed = source.counted(loop)
    if isinstance(loop, ast.For):
        changed |= source.names_in(loop.target)
    return (changed - tested) | clocks


def accepts(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether a counter of finished work grows."""
    names = [name.variable for name in moved_counters(process, sources)]
    # An attribute such as `batcher.rejected` is judged by its last name. The length of any list counts.
    names = [name if name.startswith("len(") else name.rpartition(".")[2] for name in names]
    return any(ACCEPTED.search(name) for name in names if not name.startswith(DEADLINE))
