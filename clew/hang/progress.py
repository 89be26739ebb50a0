"""Says whether a process moves: it passes lines, advances counters, or is woken up in the calls in which it waits."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace

from clew.hang import source
from clew.hang.activity import Activity, activities, activity_of
from clew.hang.collect import installed
from clew.hang.observed import Look, Process, Thread

WAITING_NAMES = re.compile(
    r"wait|try|tries|attempt|retr|poll|spin|elapsed|deadline|timeout|time|now|heartbeat|beat|tick|pid|port|seed|fd",
    re.I,
)
"""Names of counters that a loop advances while it waits."""
REFUSING_NAMES = re.compile(r"reject|drop|skip|filter|discard|stale|refus|invalid|bad", re.I)
POLLS = re.compile(
    r"(^|\.)(sleep|time|monotonic|perf_counter|get|get_nowait|exists|is_file|empty|qsize|is_set|wait|print|info|"
    r"warning|debug|urlopen|read|json|loads|poll|is_alive|len|acquire|glob|stat|getsize|listdir|flush|check|test)$"
)
"""Calls of a loop that only asks again and again."""


UNLIMITED = re.compile(r"\.(get|wait|acquire|read)$")
"""Calls that do not poll unless they have an argument, such as a timeout."""
RECENT_S = 1.5
"""Seconds, or half of the watched time if that is longer, in which a process has to move: earlier it may have begun."""


def recent(process: Process) -> Process:
    """Return the process with its newest looks only: what moved before may stand still now."""
    if len(process.looks) < 3:
        return process
    last = process.last.at
    since = last - max(RECENT_S, (last - process.looks[0].at) / 2)
    kept = tuple(look for look in process.looks if look.at >= since)
    return replace(process, looks=kept if len(kept) > 1 else process.looks[-2:])


def moved_counters(process: Process, sources: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the counters that advanced between the first and the last look, without those of polling loops."""
    looks = [look for look in recent(process).looks if look.threads]
    if len(looks) < 2:
        return {}
    first, last = (_counters(look, process, sources) for look in (looks[0], looks[-1]))
    middle = [_counters(look, process, sources) for look in looks[1:-1]]
    found: dict[str, tuple[int, int]] = {}
    for name in first.keys() & last.keys():
        values = [each[name] for each in [first, *middle, last] if name in each]
        if len(set(values)) > 1 and (values == sorted(values) or not name.partition(":")[0].endswith("~")):
            found[name] = (values[0], values[-1])
    return found


def _counters(look: Look, process: Process, sources: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for thread in look.threads:
        for depth, frame in enumerate(reversed(thread.frames)):
            if installed(frame.file):
                continue
            text = sources.get(frame.file, "")
            loop = source.loop_at(text, frame.line)
            skipped = polling_counters(text, frame.line) if text else set()
            for name, value in frame.locals.items():
                if re.fullmatch(r"-?\d{1,15}", value) and not WAITING_NAMES.search(name) and name not in skipped:
                    where = "main" if thread.os_id == process.pid else str(thread.os_id)
                    # A counter that goes back and forth within one `while` shows no progress: marked with ~.
                    where += "~" if frame is thread.frames[0] and isinstance(loop, ast.While) else ""
                    found[f"{where}:{depth}:{frame.name}.{name}"] = int(value)
    return found


def polling_counters(text: str, line: int) -> set[str]:
    """Return the names that a polling or spinning `while` around this line changes: they do not show progress."""
    loop = source.loop_at(text, line)
    if not isinstance(loop, ast.While) or not (polls(loop, text) or not _calls(loop)):
        return set()
    tested = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    changed = {
        node.target.id
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    return changed - tested


def _calls(loop: ast.AST) -> list[str]:
    """Return the names of the calls in a loop; a call that waits without a limit has () after its name."""
    calls = [call for call in ast.walk(loop) if isinstance(call, ast.Call)]
    return [
        source.dotted(call.func)
        + ("()" if UNLIMITED.search(source.dotted(call.func)) and not call.args and not call.keywords else "")
        for call in calls
    ]


def polls(loop: ast.AST, text: str, depth: int = 2) -> bool:
    """Return whether a loop, or a function that it calls, only waits and asks again."""
    names = _calls(loop)
    if isinstance(loop, ast.For):
        names = [name for name in names if name != "range"]
        if all(name.endswith("sleep") for name in names):
            return False
    if not names:
        return False
    for name in names:
        if POLLS.search(name):
            continue
        function = source.function_named(text, name.rpartition(".")[2])
        if function is None or not depth or not polls(function, text, depth - 1):
            return False
    return True


def in_polling_loop(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the innermost loop around the main thread's place only waits and asks again."""
    thread = main_thread(process.last, process.pid)
    for frame in thread.frames if thread else ():
        text = sources.get(frame.file, "")
        if not installed(frame.file) and (loop := source.loop_at(text, frame.line)) is not None:
            return polls(loop, text)
    return False


def main_thread(look: Look, pid: int) -> Thread | None:
    """Return the main thread of a look."""
    return next((thread for thread in look.threads if thread.os_id == pid), look.threads[0] if look.threads else None)


def seen(process: Process, sources: Mapping[str, str], world: int | None) -> list[Activity]:
    """Return the activity of the main thread in each look."""
    found = []
    for look in process.looks:
        thread = main_thread(look, process.pid)
        if thread is not None and thread.frames:
            found.append(activity_of(replace(process, looks=(look,)), thread, sources, world))
    return found


def places(process: Process) -> list[tuple[tuple[str, str, int], ...]]:
    """Return where the user's frames of the main thread were in each look."""
    threads = [main_thread(look, process.pid) for look in process.looks]
    return [
        tuple((f.file, f.function, f.line) for f in thread.frames if not installed(f.file))
        for thread in threads
        if thread is not None and thread.frames
    ]


def moves(process: Process, sources: Mapping[str, str], world: int | None) -> bool:
    """Return whether the main thread makes progress.

    A main thread that is blocked in a collective makes progress if it was woken up. Any other one does if a counter
    advances, or if it passes lines that are not those of one polling loop.
    """
    advanced = any(name.startswith("main") for name in moved_counters(process, sources))
    process = recent(process)
    looks = process.looks
    if len(looks) < 2 or looks[-1].state in "TtZX":
        return False
    if advanced:
        return True
    every = seen(process, sources, world)
    waits = ("collective", "send", "recv", "destroy", "init", "new_group", "store")
    if every and all(each.kind in waits for each in every):
        if len({(each.op, each.group, each.line) for each in every}) > 1:
            return True
        works = [_work_address(look, process.pid) for look in looks]
        return len({each for each in works if each}) > 1 and looks[-1].switches > looks[0].switches
    if every and not every[-1].idle_loop and all(each.kind not in ("compute", "unknown") for each in every):
        # Woken up again and again in one call, and it is not a loop that polls: it passes through something.
        woken = looks[-1].switches - looks[0].switches
        if woken >= 2 and not in_polling_loop(process, sources) and in_loop(process, sources):
            return True
    return _passes_lines(process, sources)


def in_loop(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether any of the user's frames of the main thread is within a loop."""
    thread = main_thread(process.last, process.pid)
    frames = thread.frames if thread else ()
    return any(source.loop_at(sources.get(frame.file, ""), frame.line) is not None for frame in frames)


def _work_address(look: Look, pid: int) -> int:
    thread = main_thread(look, pid)
    return next((frame.addresses["work"] for frame in thread.frames if "work" in frame.addresses), 0) if thread else 0


def _passes_lines(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the stacks differ between looks, other than by the lines of one polling or spinning loop."""
    found = {place for place in places(process) if place}
    if len(found) < 2:
        return False
    depth, shortest = 0, min(len(place) for place in found)
    while depth < shortest and len({place[-1 - depth] for place in found}) == 1:
        depth += 1
    # The first frame, from the outside, in which the stacks differ. If one of them ends before, its caller decides.
    at = depth if depth < shortest else depth - 1
    differing = [place[-1 - at] for place in found]
    if len({(file, function) for file, function, _ in differing}) > 1:
        if at == 0:
            return True
        differing = [place[-at] for place in found]
    loops = [source.loop_at(sources.get(file, ""), line) for file, _, line in differing]
    one = loops[0]
    if one is not None and all(loop is one for loop in loops):
        if polls(one, sources.get(differing[0][0], "")):
            return False
        # Without calls, or with one core busy in a `while`, it is a loop that spins.
        return bool(_calls(one)) and not (isinstance(one, ast.While) and cpu_share(process) > 0.5)
    return cpu_share(process) < 0.5 or any(loop is not one for loop in loops)


def cpu_share(process: Process) -> float:
    """Return the share of one core that a process used while it was watched."""
    seconds = process.last.at - process.looks[0].at if process.looks else 0.0
    return (process.last.cpu_s - process.looks[0].cpu_s) / seconds if seconds > 0 else 0.0


def refusing(process: Process, sources: Mapping[str, str]) -> str:
    """Return the counter that shows that everything is rejected: it grows while no accepted one does; or ""."""
    moved = moved_counters(process, sources)
    names = {name.rpartition(".")[2]: name for name in moved}
    grown = [short for short in names if REFUSING_NAMES.search(short)]
    good = [short for short in names if re.search(r"accept|kept|keep|good|ready|done|put|sent|emitted|passed", short)]
    return grown[0] if grown and not good else ""


__all__ = ["activities", "cpu_share", "moves", "refusing", "seen"]
