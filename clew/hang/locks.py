"""Finds who has locked the lock or file that the culprit waits for, and locks that were left locked."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath

from clew.hang import source
from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.verdict import Actor, Sink, Verdict, sentences, words_of


def locked_outside(sink: Sink) -> Verdict | None:
    """Find a process outside of the job that has locked the file that a process of the job waits for."""
    one = next((a for a in [sink.one, *sink.waiters] if a.activity.kind == "file" and a.process.outside), None)
    if one is None or one.moving:
        return None
    why = f"{one.says}. {', '.join(one.process.outside[:4])} has locked it, and is no process of this job."
    return sink.blame("lock or I/O", [one], why, cause="file")


def locked_by_fork(sink: Sink) -> Verdict | None:
    """Find a process that keeps a file locked, without knowing it, for the process that forked it."""
    for waits in (a for a in (*sink.culprits, *sink.waiters) if a.activity.kind == "file"):
        kept = ((a, pid) for a in sink.job for file, pid in a.process.inherits if file in waits.process.wants)
        for by, pid in kept:
            taker = next((a for a in sink.job if a.pid == pid), None)
            why = (
                f"{waits.says}. {by.process.label} keeps that file locked: it was forked"
                f"{f' from {taker.process.label}' if taker else ''} while it was locked, and a lock by flock() lasts "
                "until each process that has the file open has closed it. Unlock it with LOCK_UN before the file is "
                "closed, or start that process before the lock is taken."
            )
            pids = tuple(a.pid for a in (by, taker) if a)
            return sink.blame("lock or I/O", [by], why, cause="file", pids=pids, structural=True).at(
                waits.activity.site
            )
    return None


def locked_by(sink: Sink) -> Verdict | None:
    """Find who has locked the file, or the lock of multiprocessing, that another one waits for."""
    waiting = [a for a in (*sink.culprits, *sink.waiters) if not a.dead]
    pairs = [(a, by) for a in waiting for by in sink.culprits if by.pid in lockers(a, sink.job, sink.sources)]
    if not pairs:
        return None
    waits, by = pairs[0]
    what = "file" if waits.activity.kind == "file" else "lock"
    why = f"{waits.says}. {by.process.label} has locked that {what}, and does not unlock it: {by.says}."
    if by.activity.kind in DISTRIBUTED and waits.rank is not None:
        why += " It is in a collective there, and waits for ranks that wait for this lock."
    return sink.blame("lock or I/O", [by], why, cause=what).at(waits.activity.site)


def kept_locked(sink: Sink) -> Verdict | None:
    """Find a process that waits for a lock of multiprocessing although it has locked it itself."""
    for one in (a for a in (*sink.culprits, *sink.waiters) if a.activity.kind == "lock" and not a.moving):
        count = f"{one.activity.target}._semlock.count"  # read from memory
        kept = any(frame.locals.get(count) == "1" for frame in one.process.user_frames)
        if kept and not lock_holders(one, one.activity, sink.sources):
            lock = one.activity.target
            why = f"{one.says}. This process has locked {lock} itself, and an exception may have skipped its release()."
            alone = sum(bool(thread.user_frames) for thread in one.process.threads) == 1
            return sink.blame("lock or I/O", [one], why, cause="lock", confidence="high" if alone else "medium")
    return None


def locked_crosswise(sink: Sink) -> Verdict | None:
    """Find processes of which each waits for a lock or a file that another one of them has locked."""
    circle = sink.culprits
    if len(circle) < 2 or any(a.moving for a in circle):
        return None
    if not all(is_shared_lock(a.activity, sink.sources) or lockers(a, circle, sink.sources) for a in circle):
        return None
    why = f"{sentences(circle)} Each has locked what another one of them waits for. Take these locks in one order."
    return sink.blame("lock or I/O", circle, why, cause="lock", structural=True)


def is_shared_lock(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a thread waits for a lock of multiprocessing, which another process can have locked.

    No frame tells whose `acquire()` it is. So there, each lock counts that the source does not make with threading or
    asyncio.
    """
    if one.kind != "lock" or not one.target:
        return False
    if not one.op.endswith("acquire"):
        return one.op == "__enter__"
    made = [(text, each) for text in sources.values() for each in source.assignments(text, one.target)]
    kinds = {source.origin(text, each) for text, each in made if isinstance(each, ast.Call)}
    return not kinds or bool(kinds - {"threading", "asyncio"})


def lockers(waiting: Actor, job: Sequence[Actor], sources: Mapping[str, str]) -> set[int]:
    """Return the pids of the other processes that have locked the file or shared lock that a process waits for."""
    one = waiting.activity
    if one.kind == "file":
        return {a.pid for a in job if a is not waiting and {*a.process.files} & {*waiting.process.wants}}
    if not is_shared_lock(one, sources):
        return set()
    return {a.pid for a in job if a is not waiting and lock_holders(a, one, sources)}


def releasers(waiting: Actor, job: Sequence[Actor], sources: Mapping[str, str]) -> set[int]:
    """Return the pids of the living processes that will release what a process waits for, and never acquire it.

    A semaphore that counts is used like that.
    """
    if not is_shared_lock(waiting.activity, sources):
        return set()
    found = set[int]()
    for actor in (a for a in job if a is not waiting and not a.dead):
        for frame in (f for thread in actor.process.running for f in thread.user_frames):
            text = sources.get(frame.file, "")
            around, loop = source.enclosing_function(text, frame.line), source.outermost_loop(text, frame.line)
            if around and _only_released(around, waiting.activity.target) >= (loop.lineno if loop else frame.line):
                found.add(actor.pid)
    return found


def _counts(lock: str, sources: Mapping[str, str]) -> bool:
    """Return whether some function only releases a lock and never acquires it, as with a semaphore that counts."""
    functions = source.nodes_in((ast.FunctionDef, ast.AsyncFunctionDef), *map(source.parse, sources.values()))
    return any(_only_released(each, lock) for each in functions)


def nobody_releases(sink: Sink) -> bool:
    """Return whether no living process is in a function that releases the semaphore which the culprit waits for."""
    living = [a for a in sink.job if not a.dead]
    frames = [frame for a in living for thread in a.process.running for frame in thread.user_frames]
    wait = {("lock", sink.act.target)}
    inside = any(source.ends_one_of(sink.sources.get(frame.file, ""), frame.line, wait) for frame in frames)
    return _counts(sink.act.target, sink.sources) and not inside


def _only_released(function: source.Function, lock: str) -> int:
    """Return the last line at which a function releases a lock that it never acquires; 0 if there is none."""
    calls = sorted(source.calls_in(function), key=lambda call: call.lineno)
    named = ((*source.dotted(n.func).rpartition("."), n.lineno) for n in calls)
    lines = {how: line for name, _, how, line in named if source.same_name(name, lock)}
    return 0 if "acquire" in lines else lines.get("release", 0)


def lock_holders(actor: Actor, waiting: Activity, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the threads of a process that have locked the lock for which `waiting` waits.

    Returns:
        The call site of each thread, by a sentence about it; "" if the waiting thread itself has locked it.
    """
    found: dict[str, str] = {}
    for thread in actor.process.running:
        for frame in thread.user_frames:
            for lock, line in _locked_at(sources.get(frame.file, ""), frame.line):
                does = next((a for a in actor.threads if a.thread == thread.name and a.site), actor.activity)
                waits = does.kind in ("condition", "signal") and does.op != "acquire"
                releases = waits and source.same_name(lock, does.target)  # until it is notified
                if releases or not source.same_name(lock, waiting.target):
                    continue
                place = f"{lock} at {PurePath(frame.file).name}:{line}"
                if does.thread == actor.activity.thread:
                    found[f"It has locked {place} itself"] = ""
                else:
                    words = f"{words_of(does)} at {does.place}"
                    who = "The" if thread.task else "Thread"  # a coroutine is named "task Task-3"
                    found[f"{who} {thread.name} has locked {place}, and {words}"] = does.site
    return found


@lru_cache(maxsize=4096)
def _locked_at(text: str, line: int) -> list[tuple[str, int]]:
    """Return the locks that a thread at a line has taken in its function, by `with` or `acquire`, and the lines."""
    blocks = [each for each in source.enclosing(text, line) if isinstance(each, (ast.With, ast.AsyncWith))]
    entered = [(each, line >= max(each.lineno + 1, each.body[0].lineno)) for each in blocks]
    items = [(i, each) for each, inside in entered for i in each.items[: len(each.items) if inside else -1]]
    taken = [(ast.unparse(item.context_expr), each.lineno) for item, each in items]
    calls = source.calls_in(source.enclosing_function(text, line))
    named = [(*source.dotted(each.func).rpartition(".")[::2], each.lineno) for each in calls if each.lineno < line]
    for lock, method, at in named:
        released = any(lock == other and how == "release" and at < later for other, how, later in named)
        if method == "acquire" and not released and source.follows(text, at, line):
            taken.append((lock, at))
    return taken


def left_locked(sink: Sink) -> str:
    """Return words about a lock that was left locked: nothing that was seen is inside a `with` of it."""
    if is_shared_lock(sink.act, sink.sources):
        # A semaphore has no owner. A lock that one function takes and another one releases cannot be followed.
        if _counts(sink.act.target, sink.sources) or any(lock_holders(a, sink.act, sink.sources) for a in sink.job):
            return ""
        return f" No process that was seen has locked {sink.act.target}: one that has ended left it locked."
    if sink.act.op not in ("with", "acquire") or not sink.act.target:
        return ""
    forked = sink.parent
    who = "coroutine" if sink.act.task else "thread"
    said = f" No {who} of {sink.one.process.label} is inside `with {sink.act.target}`."
    if not sink.act.task and forked is not None and forked.process.command == sink.one.process.command:
        return (
            f"{said} It was forked from {forked.process.label}, and a lock that another thread holds at that moment "
            "stays locked in the child. Start it with spawn, or before the threads."
        )
    return f"{said} Look for an acquire() whose release() is skipped by a return or an exception."
