"""Judges waits for a process, thread or coroutine that has ended, or that cannot end before this wait does."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from clew.hang.locks import is_shared_lock, left_locked, nobody_releases
from clew.hang.roles import waits_for_work
from clew.hang.source import (
    ends_one_of,
    ends_wait,
    function_named,
    goes_on_forever,
    nodes_in,
    polls,
    started_before,
    taking,
)
from clew.hang.verdict import Actor, Sink, Verdict, sentences
from clew.hang.waits_for import THROUGH_PIPES, TO_OTHERS


def dead(sink: Sink) -> Verdict | None:
    """Find a process, thread or coroutine that has ended, so that nobody can end the wait."""
    if sink.one.dead:
        return _ended_itself(sink)
    kinds = (*TO_OTHERS, "sleep") if sink.one.rank is not None else (*TO_OTHERS, "sleep", "store")
    abandoned = is_shared_lock(sink.act, sink.sources) and (bool(left_locked(sink)) or nobody_releases(sink))
    opens_pipe = sink.one.process.waits_in == "wait_for_partner"  # nobody has it open for the other direction
    if sink.one.moving or not (abandoned or sink.act.kind in kinds or opens_pipe):
        return None
    found = _other_ended(sink, abandoned)
    if found or abandoned:
        return found
    checks = (_part_ended, _starves_waiter, _part_of_waiter_ended, _untaken, _runs_no_more)
    return next((found for check in checks if (found := check(sink))), None)


def _ended_itself(sink: Sink) -> Verdict:
    """Judge a culprit that has ended. If it ended normally, a sibling that has failed explains more."""
    blamed = sink.culprits
    if sink.one.process.exit.endswith("code 0"):
        siblings = [a for a in sink.job if a.process.parent == sink.one.process.parent and a.process.exit]
        blamed = [a for a in siblings if not a.process.exit.endswith("code 0")] or blamed
    others = ", and others still wait for it" if any(not a.dead for a in sink.job) else ""
    why = f"{', '.join(a.says for a in blamed[:4])}{others}."
    through_pipes = [a for a in sink.waiters if not a.dead and a.activity.kind in THROUGH_PIPES]
    name = sink.one.process.name
    starved = [a for a in through_pipes if done(sink.one) and explains(name, a, sink.job, sink.sources)]
    why += f" Nothing that lives can end this wait: {starved[0].says}." if starved else ""
    found = sink.blame("dead", blamed, why, cause="dead", structural=not all(map(done, blamed)))
    return found.at(*(a.activity.site for a in starved))


def _other_ended(sink: Sink, abandoned: bool) -> Verdict | None:
    """Find other processes that have ended. `abandoned` says that nobody alive releases the lock that is awaited."""
    # A process that ended normally left no lock locked that a `with` unlocks.
    unlocks = abandoned and sink.act.op == "__enter__"
    gone = [a for a in sink.job if a.dead and a.role != "idle" and not (unlocks and done(a))]
    awaits_server = sink.act.kind in ("http", "network") and not sink.act.op.endswith("accept")
    if not gone or awaits_server:
        return None
    why = f"{'. '.join(a.says for a in gone[:4])}. So nothing can end this wait: {sink.one.says}."
    if sink.one.rank is not None and all(a.process.exit.endswith("code 0") for a in gone):
        # They ended normally, so the rank may be at fault: it may wait for more than they had to give.
        pattern = "data loading" if sink.act.kind == "data_loader" else "dead"
        return sink.blame(pattern, [sink.one, *gone], why, cause="dead")
    why += " What has ended may have held that lock." if abandoned else ""
    found = sink.blame("dead", gone, why, cause="dead", structural=not all(map(done, gone)))
    return replace(found, sites=(sink.act.site,)) if abandoned else found


def _part_ended(sink: Sink) -> Verdict | None:
    """Find a child, task or thread that has failed, or that has ended and could have ended the wait."""
    if sink.one.process.waits or sink.act.kind in ("http", "network", "process"):
        return None

    def find(counts: Callable[[str], bool]) -> str:
        children = (ended_children(a, counts) for a in sink.job)
        return ended_inside(sink.one, counts, lambda job: _harmless(job, sink)) or next(filter(None, children), "")

    failed = find(lambda name: False)
    ended = failed or find(lambda name: explains(name, sink.one, sink.job, sink.sources))
    if not ended:
        return None
    why = f"What has ended: {ended}. So nothing can end this wait: {sink.one.says}."
    return sink.blame("dead", sink.culprits, why, cause="dead", structural=bool(failed))


def _harmless(job: str, sink: Sink) -> bool:
    """Return whether a failed job may have been tried again, or ends the wait in a `finally` or `except` anyway."""
    wait = (sink.act.kind, sink.act.target)
    every = [(each, text) for text in sink.sources.values() for each in nodes_in(ast.Try, function_named(text, job))]
    ends = [
        (ast.Module([*each.finalbody, *(n for h in each.handlers for n in h.body)], []), text) for each, text in every
    ]
    return any(".exception()" in each for each in sink.sources.values()) or any(ends_wait(*each, wait) for each in ends)


def _starves_waiter(sink: Sink) -> Verdict | None:
    """Find a thread of the culprit that has ended, while a process at the other end of a pipe waits for it."""
    reading = [a for a in sink.waiters if a.activity.kind in THROUGH_PIPES and not (a.moving or a.dead)]
    for by in reading:
        for name in sink.one.process.inside.ended_threads:
            if explains(name, by, sink.job, sink.sources):
                why = f"Thread {name} of {sink.one.process.label} has ended. So nothing can end this wait: {by.says}."
                return sink.blame("dead", sink.culprits, why, cause="dead", confidence="medium").at(by.activity.site)
    return None


def _part_of_waiter_ended(sink: Sink) -> Verdict | None:
    """Find a thread of another process that has ended, and that may have produced what the culprit polls for."""
    by = next((a for a in sink.waiters if a.process.inside.ended_threads and not a.moving), None)
    polling = sink.act.kind == "sleep" and explains("", sink.one, sink.job, sink.sources)
    if by is None or not polling or sink.blocked_ranks:  # ranks in a collective wait only for the culprit
        return None
    label, threads = by.process.label, ", ".join(by.process.inside.ended_threads[:4])
    why = f"A thread of {label} has ended: {threads}. It may have produced what is awaited here: {sink.one.says}."
    return sink.blame("dead", [by], why, cause="dead", confidence="medium")


def _targets_of(one: Actor, sources: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Return the functions that run in a process, and those that its running functions have started in threads."""
    running = {frame.name for thread in one.process.running for frame in thread.frames}
    places = [(sources.get(frame.file, ""), frame.line) for frame in one.process.user_frames]
    return running, set().union(*(started_before(text, line) for text, line in places))


def _runs_no_more(sink: Sink) -> Verdict | None:
    """Find a process whose thread should go on forever and has ended, while another one waits for what it did."""
    still = [a for a in (*sink.culprits, *sink.waiters) if not (a.moving or a.dead)]
    for by in (a for a in still if a.activity.kind in THROUGH_PIPES):
        for one in (a for a in still if a is not by):
            running, started = _targets_of(one, sink.sources)
            for name in sorted(started - running):
                functions = (function_named(text, name) for text in sink.sources.values())
                endless = any(map(goes_on_forever, nodes_in(ast.While, *functions)))
                if endless and explains(name, by, sink.job, sink.sources):
                    why = (
                        f"The thread of {one.process.label} that ran {name} has ended. So nothing can end this wait: "
                        f"{by.says}."
                    )
                    return sink.blame("dead", [one], why, cause="dead", confidence="medium").at(by.activity.site)
    return None


def _untaken(sink: Sink) -> Verdict | None:
    """Find a process with items in a queue whose only reader, a thread that it had started, has ended."""
    for one in (a for a in (*sink.culprits, *sink.waiters) if not a.moving):
        running, started = _targets_of(one, sink.sources)
        for frame in one.process.user_frames:
            text = sink.sources.get(frame.file, "")
            filled = [name for name, value in frame.locals.items() if name.endswith(".queue)") and value != "0"]
            for queue in (name.removeprefix("len(").removesuffix(".queue)") for name in filled):
                takers = taking(text, frame.line, queue)
                if takers and not takers & running and takers <= started:
                    why = (
                        f"No thread of {one.process.label} takes the items of {queue} any more: the one that ran "
                        f"{min(takers)} has ended. {sentences([one])}"
                    )
                    return sink.blame("dead", [one], why, cause="dead", confidence="medium")
    return None


def outlived(sink: Sink) -> Verdict | None:
    """Find a process whose main program has ended, and which Python keeps alive for its other threads."""
    if sink.act.op != "_shutdown" or sink.one.moving:
        return None
    kept = [each for each in sink.one.threads if each.of_user and each is not sink.act]
    at = f": {kept[0].thread} is at {kept[0].place}" if kept else ""
    why = (
        f"The main program of {sink.one.process.label} has ended, normally or with an exception. Python waits for its "
        f"non-daemon threads{at}.{sink.who_waits}"
    )
    pattern = "missing rank" if sink.blocked_ranks else "dead"  # the rank lives on, but will never join the collective
    text = sink.sources.get(kept[0].file, "") if kept else ""
    at_the_end = re.search(r"atexit\.register|weakref\.finalize\(|from weakref import .*finalize", text)
    if at_the_end and not sink.blocked_ranks:
        pattern = "cleanup deadlock"
        why += " Python calls atexit and weakref.finalize callbacks only after these threads have ended."
    found = sink.blame(pattern, sink.culprits, why, cause="dead")
    return replace(found, sites=tuple(sorted({each.site for each in kept})) or found.sites)


def lost_task(sink: Sink) -> Verdict | None:
    """Judge a wait for a pool of processes that all wait for work: the worker that had the task is gone."""
    if sink.act.kind != "pool":
        return None
    workers = [p for p in sink.snapshot.processes if p.parent == sink.one.pid and p.last.state not in "ZX"]
    if not workers or not all(waits_for_work(each) for each in workers):
        return None
    why = (
        f"{sink.one.says}. All {len(workers)} workers of the pool have nothing to do, so the result will never come: "
        f"the worker that had the task was killed (by a limit, or for memory), and the pool has put another one in its "
        f"place. A concurrent.futures pool would raise BrokenProcessPool."
    )
    return sink.blame("rollout blocked", [sink.one], why, cause="pool", confidence="medium")


def pipe_kept_open(sink: Sink) -> Verdict | None:
    """Find a process that an ended program started, and that may keep open the pipe that the program's parent reads."""
    still = [a for a in (sink.waiters if sink.one.dead else [sink.one]) if not a.moving]
    reading = [a for a in still if a.activity.kind in ("process", "pipe") and a.process.outside]
    if not reading:
        return None
    one = reading[0]
    ended = sink.one.says if sink.one.dead else f"{ended_children(one) or 'A program that it started'} has ended"
    why = (
        f"{one.says}. {ended}, but {', '.join(one.process.outside[:4])}, which it started, lives and keeps the "
        f"pipe open: the read ends only when that process ends."
    )
    return sink.blame("external wait", [one], why, cause="pipe")


def joined_too_early(sink: Sink) -> Verdict | None:
    """Find a process that joins a child before it has read the child's queue. Until then, the child cannot end."""
    for child in (a for a in sink.job if not a.moving):
        frames = (frame for thread in child.process.threads for frame in thread.frames)
        by = next((a for a in sink.job if a.pid == child.process.parent and a.activity.kind == "process"), None)
        if by is not None and any(f.name == "_finalize_join" and f.file.endswith("queues.py") for f in frames):
            why = (
                f"{by.says}. {child.process.label} has done its work, but ends only when the items that it has put "
                f"into a queue are read. Read the queue before you join the process."
            )
            return sink.blame("rollout blocked", [by], why, cause="process")
    return None


def ended_children(actor: Actor, counts: Callable[[str], bool] = bool) -> str:
    """Return words about reaped children that failed, or whose names `counts` takes; "" if there are none."""
    ended = [each for each in actor.process.inside.children if each[2] or counts(each[1])]
    every = [f"its child {name} (pid {pid}, exit code {code})" for pid, name, code in ended]
    return f"{actor.process.label}: {', '.join(every[:4])}" if every else ""


def ended_inside(
    actor: Actor, counts: Callable[[str], bool] = bool, harmless: Callable[[str], bool] = lambda _: False
) -> str:
    """Return words about children, tasks, threads and jobs that failed, or ended with a name that `counts` takes."""
    children = ended_children(actor, counts)
    handled = any(each.kind == "tasks" for each in actor.threads)
    failed = [
        f"{thread.name} (with {thread.ended}{''.join(f' at {frame.site}' for frame in thread.user_frames[:1])})"
        for thread in actor.process.threads
        if thread.ended
        and (not (handled or thread.asked) or counts(thread.frames[-1].name if thread.frames else thread.name))
    ]
    failed = [text for text in failed if "CancelledError" not in text]
    every = [each for each in actor.process.inside.failed_jobs if counts(each[0]) and not harmless(each[0])]
    jobs = [*dict.fromkeys(f"the job {f}() ({error} at {at})" for f, error, at in every)]
    threads = [f"its thread {name}" for name in actor.process.inside.ended_threads if counts(name)]
    return children or ", ".join((failed or [*jobs, *threads])[:4])


def done(actor: Actor) -> bool:
    """Return whether a process that is no rank has ended with exit code 0: it has probably done its part."""
    return actor.dead and actor.rank is None and actor.process.exit.endswith("code 0")


def explains(name: str, waiting: Actor, job: Sequence[Actor], sources: Mapping[str, str]) -> bool:
    """Return whether a thread or process that ended normally could have ended this wait, and nothing that lives can.

    The name "Thread-1 (collect)" says that it ran `collect`. A thread or process of another name may have run any
    target that does not run now.
    """
    act = waiting.activity
    if act.kind == "sleep":  # it counts as a wait only in a polling loop, while nobody makes progress
        loop = act.loop_in(sources)
        return loop is not None and polls(loop, sources[act.file]) and not any(a.moving for a in job)
    wait = (act.kind, act.target)

    def could(name: str) -> list[bool]:
        found = [(function_named(text, name), text) for text in sources.values()]
        return [ends_wait(function, text, wait) for function, text in found if function is not None]

    stacks = [t for a in job for t in a.process.running if a is not waiting or t.name != act.thread]
    every = [thread.user_frames for thread in stacks if thread.user_frames]
    # A thread that waits at this same place cannot end the wait.
    frames = [f for stack in every if (stack[0].file, stack[0].line) != (act.file, act.line) for f in stack]
    if any(ends_one_of(sources.get(frame.file, ""), frame.line, {wait}) for frame in frames):
        return False
    running = {frame.name for frame in frames}
    ran = could(name.partition("(")[2].rstrip(")") or name)
    text = "\n".join(sources.values())
    targets = [could(each) for each in {*re.findall(r"target=(?:\w+\.)*(\w+)", text)} - {*running, act.function}]
    if ran or (targets and all(targets)):
        return any(map(any, [ran] if ran else targets))
    # A function without source here can end the wait only if it was passed the object, or one that holds it.
    return not act.target or "." in act.target or bool(re.search(rf"[(,]\s*{re.escape(act.target)}\s*[,)]", text))
