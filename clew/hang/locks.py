"""Finds who has locked the lock or file that the culprit waits for, and locks that were left locked."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import replace
from pathlib import PurePath

from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.sink import Sink
from clew.hang.source import enclosing, same_name
from clew.hang.verdict import Actor, Verdict, sentences, words_of


def locked_outside(sink: Sink) -> Verdict | None:
    """Find a process outside of the job that has locked the file that a process of the job waits for."""
    one = next((a for a in [sink.one, *sink.waiters] if a.activity.kind == "file" and a.process.outside), None)
    if one is None or one.moving:
        return None
    why = f"{one.says}. {', '.join(one.process.outside[:4])} has locked it, and is no process of this job."
    return sink.blame("lock or I/O", [one], why, cause="file")


def locked_file(sink: Sink) -> Verdict | None:
    """Find who has locked the file that another one waits for."""
    pairs = [
        (waiting, by)
        for waiting in [*sink.culprits, *sink.waiters]
        if waiting.activity.kind == "file" and not waiting.dead
        for by in sink.culprits
        if by is not waiting and {*by.process.files} & {*waiting.process.wants}
    ]
    if not pairs:
        return None
    waiting, by = pairs[0]
    why = f"{waiting.says}. {by.process.label} has locked that file, and does not unlock it: {by.says}."
    if by.activity.kind in DISTRIBUTED and waiting.rank is not None:
        why += " It is in a collective there, and waits for ranks that wait for this lock."
    return sink.blame("lock or I/O", [by], why, cause="file").at(waiting.activity.site)


def locked_crosswise(sink: Sink) -> Verdict | None:
    """Find two processes of which each waits for a lock that the other one has locked."""
    one = sink.one
    for other in (a for a in sink.job if a is not one and not (a.dead or a.moving)):
        pairs = ((one, other), (other, one))
        if all(_is_shared_lock(a.activity) and "" in _holding(b, a, sink) for a, b in pairs):
            why = f"{sentences([one, other])} Each has locked what the other one waits for. Take both in one order."
            return sink.blame("lock or I/O", [one, other], why, cause="lock", structural=True)
    return None


def _is_shared_lock(one: Activity) -> bool:
    """Return whether a thread waits for a lock of multiprocessing, which another process can have locked."""
    return one.kind == "lock" and one.op == "__enter__" and bool(one.target)


def _holding(actor: Actor, waiting: Actor, sink: Sink) -> Collection[str]:
    """Return the places where threads of a process have locked what another process waits for; see `lock_holders`."""
    return lock_holders(actor, replace(sink, culprits=[waiting])).values()


def lock_holders(actor: Actor, sink: Sink) -> dict[str, str]:
    """Return the threads of a process that are inside `with` of the lock for which the culprit waits.

    Returns:
        The call site of each thread, by a sentence about it; "" if the waiting thread itself has locked it.
    """
    found: dict[str, str] = {}
    for thread in actor.process.threads:
        for frame in thread.user_frames:
            text = sink.sources.get(frame.file, "")
            for node in (each for each in enclosing(text, frame.line) if isinstance(each, (ast.With, ast.AsyncWith))):
                locks = [ast.unparse(item.context_expr) for item in node.items]
                named = [lock for lock in locks if same_name(lock, sink.act.target)]
                if not named or node.body[0].lineno > frame.line:
                    continue
                place = f"{named[0]} at {PurePath(frame.file).name}:{node.lineno}"
                does = next((a for a in actor.threads if a.thread == thread.name and a.site), actor.activity)
                if does.thread == actor.activity.thread:
                    found[f"It has locked {place} itself"] = ""
                else:
                    words = f"{words_of(does)} at {does.place}"
                    who = "The" if thread.task else "Thread"  # a coroutine is named "task Task-3"
                    found[f"{who} {thread.name} has locked {place}, and {words}"] = does.site
    return found


def left_locked(sink: Sink) -> str:
    """Return words about a lock that was left locked: nothing that was seen is inside a `with` of it."""
    if _is_shared_lock(sink.act):
        if any(lock_holders(a, sink) for a in sink.job):
            return ""
        return (
            f" No process that was seen is inside `with {sink.act.target}`: one that was killed there leaves it locked "
            "for ever."
        )
    if sink.act.op not in ("with", "acquire") or not sink.act.target:
        return ""
    forked = sink.parent
    who = "coroutine" if sink.act.task else "thread"
    said = f" No {who} of {sink.one.process.label} is inside `with {sink.act.target}`."
    if forked is not None and forked.process.command == sink.one.process.command:
        return (
            f"{said} It was forked from {forked.process.label}, and a lock that another thread holds at that moment "
            "stays locked in the child. Start it with spawn, or before the threads."
        )
    return f"{said} Look for an acquire() whose release() is skipped by a return or an exception."
