"""Says whether a process moves: it passes lines, advances counters, or is woken up in the calls in which it waits."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, takewhile

from clew.hang import source
from clew.hang.activity import DATABASE, DISTRIBUTED, Activity, activity_of, importing
from clew.hang.counters import ACCEPTED, WAITING_NAMES, accepts, last_name, moved_counters, polling_counters
from clew.hang.looks import (
    STEADY_LOOKS,
    busy,
    cpu_share,
    mains_of,
    never_woken,
    own_code_only,
    places,
    recent,
    without_torn,
)
from clew.hang.observed import Frame, Look, Process, Thread

BACKWARD_HZ = 3.0
"""Wake-ups a second from which a rank in the backward pass of DDP makes progress: 200 in training, 0 in a hang."""
DATA_PER_S = 1_000_000
"""Bytes read or written a second from which a process moves data: logs and heartbeats are smaller."""
IN_VAIN = 20
"""Minimum number of wake-ups to say that a condition never held: a thread that had gone on would show it by then."""
GIL_HZ = 50
"""Wake-ups per second from which a thread may be asking for the GIL, at most every 5 ms."""
RETRYING = re.compile(r"/(tenacity|backoff|retrying)(/.*)?\.py$")
"""Files of libraries that call a function again after a pause if it has failed."""


def in_polling_loop(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the innermost loop around the main thread's place only waits and asks again."""
    for frame in process.main_frames:
        text = sources.get(frame.file, "")
        if frame.of_user and (loop := source.loop_at(text, frame.line)) is not None:
            return source.polls(loop, text) or _tries_forever(loop)
    return False


def _tries_forever(loop: ast.AST) -> bool:
    """Return whether a `while` ends only when an attempt succeeds. A `for` limits its attempts, and most succeed."""
    return isinstance(loop, ast.While) and source.retries(loop)


def seen(process: Process, sources: Mapping[str, str]) -> list[Activity]:
    """Return the activity of the main thread in each look."""
    mains = [(look, thread) for look in process.looks if (thread := look.main(process.pid)) and thread.frames]
    return [activity_of(replace(process, looks=(look,)), thread, sources) for look, thread in mains]


LONG_WAIT_S = 10.0
"""Seconds from which a wait that a process of Clew reports counts as no progress."""


def moves(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the main thread makes progress.

    It does if a counter advances, if it goes through several collectives, if it passes lines that are not those of one
    polling loop, or if it moves much data. Being woken up is enough only in a few kinds of waits.
    """
    newest = recent(process)
    if len(newest.looks) < 2 or newest.last.state in "TtZX" or _signals_pile_up(process, sources):
        return False
    if any(wait.get("for_s", 0.0) > LONG_WAIT_S for wait in newest.waits):
        return False  # a process of Clew reports that it has been in one wait for long, while it polls
    every = seen(newest, sources)
    finds_nothing = _finds_nothing(newest, every, sources)
    moved = moved_counters(process, sources, must_grow=finds_nothing)
    if every and all(each.kind in (*DISTRIBUTED, "data_loader") for each in every):
        # No other thread ends this wait, so what one counts in an object that both have is no progress of the main one.
        others = {name.last for name in moved if name.of == "thread"}
        moved = {name: ends for name, ends in moved.items() if "." not in name.variable or name.last not in others}
    asleep = sleeps_on(process, every, sources)
    # Only other threads changed its variables then. Tasks of asyncio still count: such a thread may run their loop.
    own = {"task"} if asleep else {"task", "main"}
    if any(name.of in own for name in moved) or _tasks_end(process):
        return True
    if (not asleep and busy(process) and _goes_steadily(process)) or _imports_on(newest):
        return True
    if (moved and _threads_advance(newest, every[-1:], sources)) or _gets_lock(newest, every[-1:], sources):
        return True
    if (messages := _by_wakeups(process, newest, every)) is not None:
        return messages
    if every and every[-1].kind == "sleep" and _threads_get_through(newest, sources):
        return True
    if finds_nothing or goes_round(newest, every, sources):
        return False
    in_vain = asleep or process.wakeups < 2 or _waits_for_gil(newest)
    if newest.wakeups and not in_vain and _waits_in_loop(newest, every, sources):
        return True  # a round may take longer than half of the watch
    if _passes_lines(newest, sources) or _works_in_library(newest, sources):
        return True
    # A rank whose data loader has workers reads nothing itself: other threads read or write.
    loads = all(any(f.name == "_get_data" for f in main.frames) for main in mains_of(newest))
    return not loads and _moves_data(newest, sources)


def _waits_for_gil(process: Process) -> bool:
    """Return whether another thread has been in one call in each look, and the main thread only asks for the GIL."""
    seconds = process.last.at - process.first.at
    main = {each.os_id for each in mains_of(process)}
    stacks = (
        {(t.os_id, t.frames[0].file, t.frames[0].line) for t in look.threads if t.active and t.frames and not t.task}
        for look in process.looks
    )
    constant = set.intersection(*stacks)
    often = seconds > 0 and process.wakeups / seconds >= GIL_HZ
    return often and len(process.looks) >= STEADY_LOOKS and any(each[0] not in main for each in constant)


def _imports_on(process: Process) -> bool:
    """Return whether the main thread imports modules, and was elsewhere in an earlier look."""
    mains = mains_of(process)
    lines = {tuple((frame.file, frame.line) for frame in main.frames) for main in mains}
    return len(lines) > 1 and importing(mains[-1])


def _by_wakeups(process: Process, newest: Process, every: Sequence[Activity]) -> bool | None:
    """Return whether wake-ups show that a process exchanges data with others; None if it does something else."""
    woken, ops = newest.wakeups, [each.op for each in every]
    if "backward" in ops and woken >= BACKWARD_HZ * (newest.last.at - newest.first.at):
        return True  # the work that it waits for is within torch and has no address here; in a hang nothing wakes it up
    if every and all(each.kind in DISTRIBUTED for each in every):
        return _goes_through_collectives(newest, every, woken)
    if process.wakeups > 0 and ops and all(op.endswith("sendall") for op in ops):
        return True  # it is woken up only when the other side has taken a third of a buffer, seconds apart
    return None


def moves_inside(process: Process, main: Activity, decides: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a task, the thread that decides, or a job that the main thread waits for makes progress."""
    alone: dict[int, list[Look]] = {}  # each thread or task in place of the main thread; its wake-ups are not known
    for look in process.looks:
        for t in look.threads:
            key, state = t.at or t.os_id, look.state if look.state in "TtZX" else "R" if t.active else "S"
            only = (replace(t, os_id=key),)
            alone.setdefault(key, []).append(replace(look, switches=-1, state=state, threads=only))
    starved = main.kind in ("queue", "condition") and sleeps_on(process, seen(process, sources), sources)
    # Threads without a number, as in dumps of py-spy from Python 3.10, cannot be told apart.
    for thread in (t for t in process.threads if t.os_id != process.pid and (t.at or t.os_id)):
        key = thread.at or thread.os_id
        one = without_torn(replace(process, pid=key, waits_in="", looks=tuple(alone[key])))
        if thread.task and not ((main.idle_loop or decides.task) and len(set(places(recent(one)))) > 1):
            continue
        how = activity_of(one, thread, sources)
        awaited = thread.task or thread.name == decides.thread or (how.is_job and main.kind in ("future", "pool"))
        if not awaited or how.heartbeat or how.periodic:
            continue
        # The rounds of a `while` may put nothing into the queue that the main thread reads.
        if starved and all(name.in_while for name in moved_counters(one, sources)):
            continue
        if moves(one, sources):
            return True
    return False


def woken_once(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the wait of a loop that does not poll has returned exactly once: each round may take that long.

    A return in the first third of the watch does not count: the next wait has already taken twice as long.
    """
    if not process.looks:
        return False
    begun, last = process.first, process.last
    early = [look.switches for look in process.looks if look.at - begun.at <= (last.at - begun.at) / 3]
    once = begun.switches == early[-1] == last.switches - 1
    return once and _waits_in_loop(process, seen(process, sources), sources)


def sleeps_on(process: Process, every: Sequence[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether the main thread has been in one wait during the whole watch."""
    kinds = {each.kind for each in every}
    joins = any("/multiprocessing/" in frame.file for thread in mains_of(process) for frame in thread.frames)
    asleep = never_woken(process) and (kinds == {"queue"} or (kinds == {"process"} and joins))
    return asleep or woken_in_vain(process, every, sources)


def woken_in_vain(process: Process, every: Sequence[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether the main thread was woken up often, each time to find that its condition does not hold.

    Had it held, a variable of the main thread would have changed. Besides, what the condition compares stands still.
    """
    threads = mains_of(process)
    if {each.kind for each in every} != {"condition"} or process.wakeups < IN_VAIN or len(threads) < STEADY_LOOKS:
        return False
    own: dict[tuple[str, str, str], set[str]] = {}
    for frame in (frame for thread in threads for frame in thread.user_frames):
        if _may_go_round(frame, sources.get(frame.file, "")):
            return False
        for name, value in frame.locals.items():
            if "." not in name and not WAITING_NAMES.search(name):
                own.setdefault((frame.file, frame.function, name), set()).add(value)
    return all(len(each) == 1 for each in own.values()) and _stands_still(process, sources)


def _may_go_round(frame: Frame, text: str) -> bool:
    """Return whether rounds of a loop around a frame's line may leave no trace among its local variables.

    Those of a `while` may, unless it only waits, and those of a `for` over values that are not seen.
    """
    for loop in (node for node in source.enclosing(text, frame.line) if isinstance(node, source.Loop)):
        if isinstance(loop, ast.While):
            hidden_rounds = any(name != "len" and ".wait" not in name for name in source.calls_of(loop))
        else:
            names = source.names_in(loop.target)
            hidden_rounds = any(frame.locals.get(name, "<cell").startswith("<cell") for name in names)
        if hidden_rounds:
            return True
    return False


def _stands_still(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether numbers that the main thread's condition names are seen, and none of them has changed.

    One that is always 0 does not count: each round may find 0, and wait for more.
    """
    frame = next(iter(mains_of(process)[-1].user_frames), None)
    if frame is None:
        return False
    lines, loop = sources.get(frame.file, "").splitlines(), source.loop_at(sources.get(frame.file, ""), frame.line)
    numbers = {frame.line, loop.lineno if loop is not None else frame.line}
    condition = " ".join(lines[number - 1] for number in numbers if number <= len(lines))
    values: dict[str, set[str]] = {}
    for each in (each for look in process.looks for thread in look.threads for each in thread.user_frames):
        for name, value in each.locals.items():
            last = name.removesuffix(")").rpartition(".")[2]
            if "." in name and value.isdigit() and re.search(rf"\b{re.escape(last)}\b", condition):
                values.setdefault(name, set()).add(value)
    return any(each != {"0"} for each in values.values()) and all(len(each) == 1 for each in values.values())


def _threads_advance(process: Process, newest: Sequence[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether threads whose counters advance work for the main thread.

    If the main thread only joins them, everything they do counts; otherwise only what they finish.
    """
    kind = "thread" if newest and newest[0].heartbeat else newest[0].kind if newest else ""
    by_result = kind in ("pool", "future", "queue", "condition", "barrier")
    return kind == "thread" or (by_result and accepts(process, sources))


def _threads_get_through(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether another thread gets through rounds of a loop that will end, such as the turns of an episode."""
    found = defaultdict[tuple[int, int, str], set[str]](set)
    for thread in (t for look in process.looks for t in look.threads if t.os_id != process.pid and not t.task):
        for depth, frame in enumerate(reversed(thread.user_frames)):
            for name in source.rounds(sources.get(frame.file, ""), frame.line):
                value = frame.locals.get(name, "")
                if re.fullmatch(r"-?[\d.]+", value) and not WAITING_NAMES.search(name):
                    found[thread.os_id, depth, f"{frame.name}.{name}"].add(value)
    return any(len(values) > 2 for values in found.values())


def _goes_through_collectives(process: Process, every: Sequence[Activity], woken: int) -> bool:
    """Return whether a rank that every look found in a collective went through several of them."""
    if len({(each.op, each.group, each.line) for each in every}) > 1:
        return True
    # A different address means a different work, but a new work can get the address of the last one. For messages, two
    # wake-ups are enough: nothing but a message wakes up a rank that waits for one.
    addresses = ([f.addresses["work"] for f in main.frames if "work" in f.addresses] for main in mains_of(process))
    works = {each[0] for each in addresses if each} - {0}
    messages = all(each.kind in ("send", "recv") for each in every)
    return (woken > 0 and len(works) > 1) or (messages and woken >= 2)


def _waits_in_loop(process: Process, every: Sequence[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether the main thread waits in a loop that does not poll: each wake-up means that its call returned."""
    # Ray itself wakes up a thread in ray.get every second.
    if not every or every[-1].idle_loop or any(each.kind in ("compute", "unknown", "ray") for each in every):
        return False
    asks = has_limit(process) or in_polling_loop(process, sources) or every[-1].op in DATABASE
    asks = asks or source.selects_for_a_time(sources.get(every[-1].file, ""), every[-1].line)
    # These libraries wake up by themselves, and ask whether what they wait for has come.
    files = (frame.file for thread in mains_of(process) for frame in thread.frames)
    asks = asks or any("/filelock/" in file or "/grpc/_" in file for file in files)
    return not asks and in_loop(process, sources)


def _signals_pile_up(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether stacks only grow on top of a wait for a lock: signal handlers run there, and wait for it, too."""
    stacks = [[(f.file, f.function, f.line) for f in reversed(thread.frames)] for thread in mains_of(process)]
    if all(len(first) >= len(stacks[-1]) for first in stacks[:3]):
        return False
    every = seen(process, sources)
    for first, activity in zip(stacks[:3], every[:3], strict=True):  # one may have been read within a handler
        if activity.kind == "lock" and len(first) < len(stacks[-1]):
            return all(stack[: len(first)] == first for stack in stacks[stacks.index(first) :])
    return False


def _tasks_end(process: Process) -> bool:
    """Return whether fewer and fewer coroutines run one function of the user's: they finish one by one.

    A single one counts only if the process writes meanwhile: it may be a helper that comes and goes.
    """
    counts: list[Counter[str]] = []
    for look in (each for each in process.looks if each.threads):
        own = ([f.function for f in t.user_frames] for t in look.threads if t.task and not t.ended)
        counts.append(Counter(functions[-1] for functions in own if functions))
    every = [[count[name] for count in counts] for name in (counts[0] if counts else ())]
    every = [numbers for numbers in every if numbers == sorted(numbers, reverse=True)]
    writes = process.last.written > recent(process).first.written
    return any(n[0] - n[-1] >= (1 if writes else 2) and (writes or n[-1] < n[len(n) // 2]) for n in every)


def _gets_lock(process: Process, newest: Sequence[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether the main thread awaits others, and one that waited for a lock was elsewhere in a later look."""
    if not newest or newest[0].kind not in ("thread", "pool", "future"):
        return False
    waited: dict[int, int] = {}
    for look in process.looks:
        for thread in look.threads:
            one = activity_of(replace(process, looks=(look,)), thread, sources)
            if one.heartbeat:  # it goes on beside any hang
                continue
            if one.kind == "lock" and one.op == "with":
                waited[thread.os_id] = one.line
            elif thread.frames and waited.get(thread.os_id, one.line) != one.line and one.kind != "thread":
                return True
    return False


def goes_round(process: Process, every: list[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether a loop sleeps, asks again, and no variable of the user's frames changes.

    It sleeps at one line in each look, or in some looks and asks in the others. Or it is mostly in `except`: then each
    attempt has failed, however many were counted and logged.
    """
    threads = mains_of(process)
    sleeping = [each for each in every if each.kind == "sleep"]
    if len({each.line for each in sleeping}) != 1:
        return False
    loop = sleeping[0].loop_in(sources)
    if len(sleeping) >= max(3, len(every) / 3) and all(each.kind == "sleep" or _asks_in(loop, each) for each in every):
        threads = [thread for thread, each in zip(threads, every, strict=True) if each.kind == "sleep"]
        every = sleeping
    failed = [fails_in_loop(thread, sources) for thread in threads]
    failing = 2 * len(sleeping) > len(every) and 2 * sum(failed) > len(failed)
    quiet = process.last.written == process.first.written or source.asks(loop)
    silent = len(sleeping) == len(every) and quiet
    if not failing and not silent:
        return False
    values = [
        {
            (frame.function, name): value
            for frame in thread.user_frames
            for text in [sources.get(frame.file, "")]
            for skipped in [polling_counters(text, frame.line)]
            for name, value in frame.locals.items()
            if not WAITING_NAMES.search(name) and name not in skipped and " at 0x" not in value and value != "?"
            if last_name(name) not in source.failures(text)
        }
        for thread in threads
    ]
    shared = set.intersection(*map(set, values))
    return all(_stays([each[key] for each in values]) for key in shared)


def _finds_nothing(process: Process, every: list[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether each round of a loop slept and ended early, and no round has reached what the loop counts.

    Then numbers that other threads change show no progress, unless they only grow.
    """
    if len({(each.kind, each.file, each.line) for each in every}) != 1 or every[0].kind != "sleep":
        return False
    counts = source.skipped_counts(sources.get(every[0].file, ""), every[0].line)
    inner = [thread.user_frames[0].locals for thread in mains_of(process) if thread.user_frames]
    seen_all = len(inner) >= STEADY_LOOKS and counts and all(counts <= each.keys() for each in inner)
    quiet = process.last.written == process.first.written
    return bool(seen_all) and quiet and all(len({each[name] for each in inner}) == 1 for name in counts)


def _stays(values: Sequence[str]) -> bool:
    """Return whether a variable kept its value. A dict or list may differ once: it was read while being made."""
    [(usual, times), *others] = Counter(values).most_common()
    torn = usual.startswith(("{", "[")) and len(values) - times == 1 and len(values) >= STEADY_LOOKS
    return not others or (torn and usual == values[0] == values[-1])


def _asks_in(loop: source.Loop | None, one: Activity) -> bool:
    """Return whether a thread asks a server, from a line of this `while` itself."""
    return isinstance(loop, ast.While) and one.kind == "http" and source.covers(loop, one.line)


def _goes_steadily(process: Process) -> bool:
    """Return whether a number in a user's frame only rises, or only falls, from each look to the next."""
    values: dict[tuple[str, str], list[float]] = {}
    threads = mains_of(process)
    for frame in (frame for thread in threads for frame in thread.user_frames):
        for name, text in frame.locals.items():
            with suppress(ValueError):
                values.setdefault((frame.function, name), []).append(float(text))
    for series in (each for each in values.values() if len(each) >= max(STEADY_LOOKS, 0.8 * len(threads))):
        steps = [after - before for before, after in pairwise(series)]
        if all(step > 0 for step in steps) or all(step < 0 for step in steps):
            return True
    return False


def fails_in_loop(thread: Thread, sources: Mapping[str, str]) -> bool:
    """Return whether a thread is in an `except` within a loop: it handles a failure, and will try again."""
    pauses = any(RETRYING.search(frame.file) for frame in thread.frames[:1])
    places = ((sources.get(frame.file, ""), frame.line) for frame in thread.user_frames)
    return pauses or any(source.in_handler(*place) and source.loop_at(*place) is not None for place in places)


def has_limit(process: Process) -> bool:
    """Return whether the main thread waits with a timeout: being woken up may only mean that it passed."""
    inside = takewhile(lambda frame: not frame.of_user, process.main_frames)
    return any(re.fullmatch(r"\d+(\.\d*)?", frame.locals.get("timeout", "")) for frame in inside)


def in_loop(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether any of the user's frames of the main thread is within a loop."""
    places = ((sources.get(frame.file, ""), frame.line) for frame in process.main_frames)
    return any(source.loop_at(*place) is not None for place in places)


def _works_in_library(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether a library is busy at changing places, called from outside any `while` of the user's."""
    threads = mains_of(process)
    stacks = {tuple(f.function for f in thread.frames if not f.of_user) for thread in threads}
    running = sum(look.state == "R" for look in process.looks) > len(process.looks) / 2
    if len(stacks) < 2 or not (running or busy(process)):
        return False
    users = (frame for thread in threads for frame in thread.user_frames[:1])
    loops = (source.outermost_loop(sources.get(frame.file, ""), frame.line) for frame in users)
    return not any(isinstance(loop, ast.While) for loop in loops)


def _passes_lines(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the stacks differ between looks, other than by the lines of one polling or spinning loop."""
    stacks = {place[::-1] for place in places(process) if place}  # the outermost frame first
    if len(stacks) < 2:
        return False
    levels = list(zip(*stacks, strict=False))
    common = list(takewhile(lambda level: len({*level}) == 1, levels))
    if busy(process) and own_code_only(process):  # functions that an endless `while` calls pass lines forever
        callers = (source.outermost_loop(sources.get(file, ""), line) for (file, _, line), *_ in common)
        if any(isinstance(loop, ast.While) for loop in callers):
            return False
    # The first frame, from the outside, in which the stacks differ. If one of them ends before, its caller decides.
    at = min(len(common), len(levels) - 1)
    if len({(file, function) for file, function, _ in levels[at]}) > 1:
        if at == 0:
            return True
        at -= 1  # other functions: compare the lines of their common caller
    lines = [(sources.get(file, ""), line) for file, _, line in levels[at]]
    outer = {source.outermost_loop(*line) for line in lines}
    if len(outer) == 1 and isinstance(outer.pop(), ast.While) and busy(process):
        return False  # Lines of one `while` that is busy, and nothing in it advances: it goes round.
    loops = {source.loop_at(*line) for line in lines}
    if len(loops) > 1:
        return True
    loop = loops.pop()
    if loop is None:
        return cpu_share(process) < 0.5
    if _tries_forever(loop):
        return False  # an attempt that takes long, and the pause after it
    if source.polls(loop, lines[0][0]):
        return _tests_new_text(process, loop)
    # Without calls, or with one core busy in a `while`, it is a loop that spins.
    return bool(source.calls_of(loop)) and not (isinstance(loop, ast.While) and busy(process))


def _tests_new_text(process: Process, loop: source.Loop) -> bool:
    """Return whether a text that the test of a `while` reads has changed: then it does not just ask the same again."""
    names = source.names_in(loop.test) if isinstance(loop, ast.While) else set[str]()
    frames = [f for t in mains_of(process) for f in t.user_frames]
    return any(len({f.locals[n] for f in frames if re.match("['\"]", f.locals.get(n, ""))}) > 1 for n in names)


def _moves_data(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether a process reads or writes much, and is not in a loop that only polls."""
    first, last = process.first, process.last
    if first.children_faults != last.children_faults:
        return False  # a child that has ended may have done so, for example one that looks at the GPUs now and then
    moved = max(last.read - first.read, last.written - first.written)
    return moved >= DATA_PER_S * (last.at - first.at) > 0 and not in_polling_loop(process, sources)


def pace(process: Process, sources: Mapping[str, str]) -> str:
    """Return words about a counter that advances, or what else a process did meanwhile; "" if nothing is seen."""
    seconds = process.last.at - process.first.at
    moved = moved_counters(process, sources)
    for name in sorted(moved, key=lambda each: (not ACCEPTED.search(each.variable), each)):  # finished work first
        (first, last), counter = moved[name], name.variable
        if seconds > 0 and last > first:
            return f": {'a loop' if counter == '_' else counter} went from {first} to {last} in {seconds:.1f} s"
    if _imports_on(process):
        return ": it imports modules"
    if (written := process.last.written - process.first.written) > 0:
        return f": it wrote {written:,} bytes in {seconds:.1f} s"
    if process.wakeups > 0:
        return f": its main thread was woken up {process.wakeups} times in {seconds:.1f} s"
    return ""
