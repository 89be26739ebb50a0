"""Judges the culprit: the process that others wait for, and that itself waits for no other process that was seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import PurePath

from clew.hang import source
from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.between_ranks import with_callers
from clew.hang.collective_calls import behind, different_counts, first_different_call
from clew.hang.counters import moved_counters
from clew.hang.ended import dead, done, joined_too_early, lost_task, outlived, pipe_kept_open
from clew.hang.expressions import Unknown, evaluate
from clew.hang.locks import (
    kept_locked,
    left_locked,
    lock_holders,
    locked_by,
    locked_by_fork,
    locked_crosswise,
    locked_outside,
)
from clew.hang.looks import STEADY_LOOKS, busy, cpu_share, mains_of, own_code_only, places
from clew.hang.observed import Look
from clew.hang.polls import asks_again, asks_as_told, both_poll, polling, retrying, threads_poll
from clew.hang.progress import pace
from clew.hang.rejecting_loops import never_filled, never_holds, rejecting, rounds_without_put, starved, takes_in_vain
from clew.hang.roles import MAIN_TASK, WAITS_INSIDE
from clew.hang.store_keys import missing_key
from clew.hang.verdict import LOCAL, MESSAGES, Actor, Sink, Verdict, names, sentences, subject, words_of
from clew.hang.waits_for import THROUGH_PIPES, TO_OTHERS, fills_alone, ports_named, surely_awaits

NUMERIC = {"numpy", "torch", "scipy", "sklearn", "pandas"}
"""Libraries whose calls compute, and end by themselves."""
WRITES = 1 << 16
"""Bytes per second from which the output of a program counts as its work, and not as a log of its waiting."""
LEAST_CPU = 0.05
"""Share of a core below which a process that seems to compute may be blocked in native code."""


def local_cause(sink: Sink) -> Verdict:
    """Return the verdict of the first rule that knows what the culprit does."""
    return next(verdict for rule in RULES if (verdict := rule(sink)) is not None)


def _own_waits(sink: Sink) -> Verdict | None:
    """Judge by the wait that a process of Clew reports itself, in its status file."""
    if not sink.one.process.waits:
        return None
    wait = sink.one.process.waits[0]
    numbers = f" ({wait['numbers']})" if wait["numbers"] else ""
    why = f"{sink.one.process.label} waits for {wait['what']}{numbers}; {wait['unblocks']} unblocks it."
    pattern = "rollout blocked" if "rollout" in wait["unblocks"] else "external wait"
    return sink.blame(pattern, [sink.one], why, confidence="medium")


def _blocked_loop(sink: Sink) -> Verdict | None:
    """Find a coroutine that calls something that blocks: nothing else on that event loop can run."""
    blocked = [a for a in sink.culprits if a.activity.blocks_loop and a.activity.kind != "unknown" and not a.moving]
    if not blocked:
        return None
    one = blocked[0]
    why = f"The event loop of {one.process.label} is blocked at {one.activity.place}: no coroutine on it can run."
    why += _own_coroutine(one, sink.sources) or _own_server(one)
    return sink.blame("event loop blocked", [one], why, cause="event loop blocked")


def _own_coroutine(one: Actor, sources: Mapping[str, str]) -> str:
    """Return words if a blocked event loop, the only one of its process, waits for a coroutine of its own; else ""."""
    near = "".join(sources.get(one.activity.file, "").splitlines()[max(0, one.activity.line - 2) : one.activity.line])
    loops = [thread for thread in one.process.threads if any(frame.name == "_run_once" for frame in thread.frames)]
    if len(loops) != 1 or "run_coroutine_threadsafe(" not in near:
        return ""
    return " It waits for a coroutine that it has given to this same loop, which cannot run it now. Await it instead."


def _own_server(one: Actor) -> str:
    """Return words if a blocked event loop waits for an answer of a server of its own process; else ""."""
    ends = {other for _, _, other in one.process.awaits} & {*one.process.ends}  # another server may have the same port
    ports = sorted({*one.process.peers} & {*one.process.listens}) if one.activity.kind in ("http", "network") else []
    return f" It waits for an answer of its own server, at port {ports[0]}." if ends and ports else ""


def _not_woken(sink: Sink) -> Verdict | None:
    """Find an event loop that sleeps although a task could go on: a thread set its result without waking the loop."""
    for one in (a for a in sink.culprits if not a.moving):
        loops = [thread for thread in one.threads if not thread.task and (thread.idle_loop or thread.in_loop)]
        # Only the switches of the main thread are counted.
        if one.process.wakeups or [(loop.thread, loop.idle_loop) for loop in loops] != [("MainThread", True)]:
            continue
        if task := next((thread for thread in one.threads if thread.woken and thread.of_user), None):
            why = (
                f"{task.thread} of {one.process.label} could go on at {task.place}, because what it awaits is done. "
                f"But its event loop sleeps: another thread set the result without waking the loop. Use "
                f"loop.call_soon_threadsafe in that thread."
            )
            return sink.blame("rollout blocked", [one], why, cause="condition", sites=(task.site,))
    return None


def _held_already(sink: Sink) -> Verdict | None:
    """Find a thread that waits for a condition which holds: `notify()` has woken another thread."""
    for one in (a for a in sink.culprits if not a.moving and len(a.process.looks) >= STEADY_LOOKS):
        for thread in one.threads:
            loop = thread.loop_in(sink.sources)
            if thread.kind != "condition" or not isinstance(loop, ast.While) or not _only_waits(loop):
                continue
            waits = (f for each in one.process.threads if each.name == thread.thread for f in each.frames)
            if any(frame.locals.get("gotit") == "True" for frame in waits if frame.name == "wait"):
                continue  # it was notified, and waits for the condition's lock
            if lock_holders(one, thread, sink.sources):
                continue  # whoever has the lock may still notify it
            numbers = [_numbers_at(look, thread) for look in one.process.looks]
            with suppress(Unknown):
                if not any(evaluate(loop.test, names) for names in numbers):
                    why = (
                        f"{thread.thread} of {one.process.label} waits at {thread.place}, although `while "
                        f"{ast.unparse(loop.test)}` does not hold any more: it was not woken up. If several threads "
                        f"wait for this condition, notify() may wake another one of them. Use notify_all()."
                    )
                    return sink.blame("rollout blocked", [one], why, cause="condition", sites=(thread.site,))
    return None


def _only_waits(loop: ast.While) -> bool:
    """Return whether the body of a loop is one call of `wait` without a time limit."""
    (first, *rest) = loop.body
    call = first.value if isinstance(first, ast.Expr) and not rest else None
    if not isinstance(call, ast.Call) or call.args or call.keywords:
        return False
    return source.dotted(call.func).endswith(".wait")


def _numbers_at(look: Look, at: Activity) -> dict[str, int]:
    """Return the numbers in a thread's frame, by name. Other threads in methods of the object add those of `self`."""
    inner = [thread.user_frames[0] for thread in look.threads if thread.user_frames]
    own = (thread.user_frames[0] for thread in look.threads if thread.user_frames and thread.name == at.thread)
    here = next((frame for frame in own if (frame.file, frame.line) == (at.file, at.line)), None)
    if here is None:
        return {}
    of_class = here.function.rpartition(".")[0]
    beside = [f for f in inner if f.file == at.file and f.function.rpartition(".")[0] == of_class]
    beside = [f for f in beside if not f.locals.get("self", "<cell").startswith("<cell")]
    if not of_class or len({f.addresses.get("self") for f in beside}) > 1:
        beside = []  # they belong to several objects
    every = {name: value for f in beside for name, value in f.locals.items() if "self." in name} | here.locals
    return {name: int(value) for name, value in every.items() if re.fullmatch(r"-?\d{1,15}", value)}


def _unscheduled(sink: Sink) -> Verdict | None:
    """Find a wait for a result of Ray while none of its actors and tasks that were seen runs anything."""
    if sink.act.kind != "ray" or len(sink.culprits) > 1:
        return None
    if not any(each.of_ray for each in sink.snapshot.processes):
        why = f"{sink.one.says}. No actor or task of Ray was seen. If Ray was started before this program, name their "
        why += "processes with --pid."
        return sink.blame("undetermined", [], why, confidence="low", next="pgrep -f ray::")
    why = (
        f"{sink.one.says}. None of the actors and tasks that were seen runs: Ray may not have started the one that is "
        f"awaited, because it needs more CPUs, GPUs or memory than are free, or it is on another node."
    )
    how = "ray status; ray list actors; ray list tasks"
    return sink.blame("external wait", sink.culprits, why, cause="ray", confidence="medium", next=how)


def _joins_its_producer(sink: Sink) -> Verdict | None:
    """Find a main thread that joins a thread which waits for room in a queue that nobody empties any more."""
    joining = next((t for t in sink.one.threads if t.thread == "MainThread" and t.kind == "thread"), None)
    if joining is None or sink.act.kind != "queue_full" or sink.one.moving:
        return None
    where = f" in its cleanup ({joining.cleanup})" if joining.cleanup else ""
    hidden = f" {sink.one.hidden_exception} was raised, and is hidden until then." if sink.one.hidden_exception else ""
    why = (
        f"{sink.one.process.label} waits{where} at {joining.site} for the end of thread {sink.act.thread}, which waits "
        f"for room in a full queue at {sink.act.place}. Whoever emptied the queue has stopped, so both "
        f"wait forever.{hidden}{sink.who_waits}"
    )
    pattern = "cleanup deadlock" if joining.cleanup else "lock or I/O"
    return sink.blame(pattern, [sink.one], why, cause="thread").at(joining.site)


def _paused(sink: Sink) -> Verdict | None:
    """Find an engine that says that it is paused."""
    paused = [a for a in sink.job if a.process.answers.get("is_paused") == "true"]
    if not paused or sink.one.moving:
        return None
    one = paused[0]
    why = f"The engine in {one.process.label} answers that it is paused, so no request ends: nobody has resumed it."
    return sink.blame("rollout blocked", [one], why, cause="paused")


def _slow(sink: Sink) -> Verdict | None:
    """Judge a process that makes progress as slow, not as hung."""
    generates = sink.one.process.answers.get("metrics") == "moving"
    # In a circle, a process that moves is only slow, unless it is certain for whom it waits.
    moving = [a for a in sink.culprits if a.moving]
    moving = [a for a in moving if a is sink.one or (a.rank is None and not surely_awaits(a, sink.job))]
    if not moving and not generates:
        return None
    one = sink.one if generates else moving[0]
    work = f": it {one.work}" if one.work else ""
    how = ": its counters of tokens grow" if generates else work or pace(one.process, sink.sources)
    queue, site, rounds = rounds_without_put(one.process, sink.sources)
    barren = f" It has not put anything into {queue} yet, and {site} may reject everything." if rounds else ""
    why = f"{one.process.label} moves, but slowly{how}; others wait for it.{barren}"
    return sink.blame("slow", [one] if generates else moving, why, cause="slow", confidence="medium")


def _joins_alone(sink: Sink) -> Verdict | None:
    """Judge a rank that waits in init_process_group, or in the rendezvous of a further group, for somebody else."""
    if sink.act.kind != "init":
        return None
    why = f"{sink.one.says}. Whoever has to join that group, too, such as an inference engine, has not come."
    return sink.blame("initialisation", sink.culprits, why + sink.who_waits, confidence="medium")


def _unexplained(sink: Sink) -> Verdict | None:
    """Abstain if the culprit is in a collective whose peers were not seen, or if its stack says nothing."""
    if sink.act.kind in ("collective", *MESSAGES, "init", "new_group", "destroy"):
        why = f"Nothing that was seen explains the wait: {sink.one.says}."
        return sink.blame("undetermined", [], why, confidence="low")
    if _started_without_source(sink):
        return None
    if sink.act.kind == "unknown" or sink.act.kind not in LOCAL:
        why = f"The stack of {sink.one.process.label} does not say what it waits for."
        return sink.blame("undetermined", [], why, confidence="low")
    return None


def _silent_server(sink: Sink) -> Verdict | None:
    """Judge a server that a rank has started, and that leaves another rank, or its data loader, without an answer."""
    by = sink.parent
    if by is None or by.activity.kind not in DISTRIBUTED or sink.one.rank is not None or sink.act.kind == "compute":
        return None
    ports = set(sink.one.process.listens)
    asking = [a for a in sink.waiters if a.activity.kind in ("http", "network") and ports & set(a.process.peers)]
    if not asking:
        return None
    rank = next((a for a in sink.job if a.pid == asking[0].process.parent and a.rank is not None), asking[0])
    why = f"{asking[0].says}. The server {sink.one.process.label}, which {by.process.label} has started, is silent."
    pids = (rank.pid, *(c.pid for c in sink.culprits))
    return sink.blame("external wait", [rank], why, cause="http", pids=pids).at(asking[0].activity.site)


def _started_without_source(sink: Sink) -> bool:
    """Return whether the culprit is a program such as `python -c ...`, whose parent waits for it."""
    return _without_source(sink.act) and sink.parent is not None and sink.parent.activity.kind == "process"


def _without_source(one: Activity) -> bool:
    return not one.site or one.site.startswith("<")


def _outside(sink: Sink) -> Verdict | None:
    """Judge a program that a process started, and that does not end."""
    by = sink.parent
    if by is None or sink.one.rank is not None or sink.act.kind == "data_loader":
        return None
    serves = sink.act.kind == "compute" and bool(sink.one.process.listens)
    if serves or (by.rank is None and not _started_without_source(sink)):
        return None
    first, last = sink.one.process.first, sink.one.process.last
    written = last.written - first.written
    if written > WRITES * (last.at - first.at):
        why = f"{by.says}: its program {sink.one.process.label} has written {written:,} bytes meanwhile."
        return sink.blame("slow", [by], why, cause="slow", confidence="medium")
    words = LOCAL.get(sink.act.kind, ("", "does not answer"))[1]
    site = "" if _without_source(sink.act) else sink.act.site
    why = f"{by.says}: its program {sink.one.process.label} {words}{f' at {site}' if site else ''}."
    return sink.blame("external wait", [by], why, pids=(by.pid, *(c.pid for c in sink.culprits))).at(site)


def _cleaned_up(sink: Sink) -> Verdict | None:
    """Judge ranks in `destroy_process_group` while another rank waits for something that they no longer provide."""
    cleaning = [a for a in sink.blocked_ranks if a.activity.kind == "destroy"]
    outside = sink.act.kind in ("sleep", "store", "http", "network", "pipe", "queue", "condition", "collective")
    if not cleaning or sink.one.rank is None or not outside:
        return None
    why = (
        f"{subject(cleaning, 'is', 'are')} in destroy_process_group, which waits for operations that have not ended, "
        f"while {sink.one.says}."
    )
    return sink.blame("cleanup deadlock", cleaning, why, confidence="medium")


def _loader(sink: Sink) -> Verdict | None:
    """Judge a worker of a data loader that does not bring its batch."""
    if sink.one.role != "loader":
        return None
    rank = sink.parent or sink.one
    words = LOCAL[sink.act.kind][1]
    workers = ", ".join(str(each.pid) for each in sink.culprits)
    numbers = f"{'pid' if len(sink.culprits) == 1 else 'pids'} {workers}"
    why = f"A worker ({numbers}) of the data loader of {rank.process.label} {words} at {sink.act.place}."
    if sink.act.kind == "lock":
        why += "".join(f" {held}." for held in lock_holders(sink.one, sink.act, sink.sources)) or left_locked(sink)
    pids = (rank.pid, *(each.pid for each in sink.culprits))
    return sink.blame("data loading", [rank], why, cause=sink.act.kind, pids=pids).at(sink.act.site)


def _computing(sink: Sink) -> Verdict | None:
    """Judge a process that computes at one place for the whole time of watching."""
    if sink.act.kind != "compute":
        return None
    moved = moved_counters(sink.one.process, sink.sources)
    if sink.act.thread != "MainThread" and any(name.of == "thread" and not name.in_while for name in moved):
        how = pace(sink.one.process, sink.sources)
        why = f"A thread of {sink.one.process.label} computes and moves{how}; others wait for it."
        return sink.blame("slow", sink.culprits, why, cause="slow", confidence="medium")
    share = cpu_share(sink.one.process)
    alone = not sink.blocked_ranks and len(sink.job) == 1
    text = sink.sources.get(sink.act.file, "")
    # A library may call the user's function, as a data loader calls a sampler. What matters is the loop in there.
    inner = {(t.frames[0].file, t.frames[0].name) for t in mains_of(sink.one.process)}
    loops = inner == {(sink.act.file, sink.act.function)} and isinstance(sink.act.loop_in(sink.sources), ast.While)
    endless = busy(sink.one.process) and (loops or own_code_only(sink.one.process, sink.act.thread))
    numeric = [call for call in source.calls_at(text, sink.act.line) if source.origin(text, call) in NUMERIC]
    # The same line at every look, and not in a `while`: this is one long call, not a loop of many calls.
    looks = set(places(sink.one.process))
    once = len(looks) == 1 and not isinstance(source.outermost_loop(text, sink.act.line), ast.While)
    gpu = bool(sink.one.process.gpus)  # the call may wait for a GPU, which may never end
    if endless and numeric and not gpu and (alone or (once and sink.act.thread == "MainThread")):
        name = source.dotted(numeric[0].func)
        why = f"{sink.one.says}. It is slow, not hung: {name} ends by itself, but does not show how far it has come."
        return sink.blame("slow", sink.culprits, why, cause="slow", confidence="low")
    if share < LEAST_CPU or (alone and not endless):
        return sink.blame("undetermined", [], f"{sink.one.says} ({share:.0%} of a core).", confidence="low")
    seconds = sink.snapshot.seconds
    why = f"{sink.one.says}. It has computed there for the {seconds:.0f} s of watching ({share:.0%} of a core)."
    confidence = "low" if alone else "medium"
    return sink.blame("cpu", sink.culprits, why + sink.who_waits, confidence=confidence, cause="compute")


def device(sink: Sink) -> Verdict | None:
    """Judge a wait for a GPU. It stays undetermined, because no Python stack shows what a GPU does."""
    waiting = [a for a in sink.culprits if a.activity.kind == "device"]
    if not waiting:
        return None
    ranks = [a for a in sink.job if a.rank is not None]
    inside = [a for a in ranks if a.activity.kind in ("device", *DISTRIBUTED)]
    late, told = behind(inside) or ([], "")
    there = {a.activity.site for a in inside if a not in late}
    if late and all(a.activity.kind == "device" and a.activity.site not in there for a in late):
        why = f"{late[0].says}, and the others wait for it in NCCL. {told}"
        return sink.blame("missing rank", late, why, cause="device", confidence="medium")
    if parted := first_different_call(inside) or different_counts(inside):
        why = f"The ranks wait for their GPUs, which wait for one another in NCCL. {parted[1]}"
        return sink.blame("collective mismatch", parted[0], why, cause="device", confidence="medium")
    why = f"{waiting[0].says}. Its kernels have not ended: one of them may never end, or take longer than was watched."
    if len(ranks) > 1:
        why += (
            " Or the GPU is in a collective of NCCL that another rank has not entered; torch's flight recorder or "
            "NCCL's RAS show which."
        )
    why += " A GPU that is 100 % busy but draws little power is probably only waiting."
    pid = waiting[0].process.pid
    how = f"clew hang --pid {pid} again in a minute; cuda-gdb -p {pid} shows the kernel (info cuda kernels)."
    return sink.blame("undetermined", [], why, confidence="low", next=how)


def _one_at_a_time(sink: Sink) -> Verdict | None:
    """Judge a server without threads that reads from one connection while a client waits on another one.

    The client whose connection it reads may wait for that other one in a collective: all three wait in a circle then.
    """
    for server in (a for a in sink.culprits if a.activity.kind in ("http", "network")):
        served = [t.frames for t in server.process.threads if any(f.name == "serve_forever" for f in t.frames)]
        stacks = [list(takewhile(lambda f: f.name != "serve_forever", frames)) for frames in served]
        # Between requests, no function of the user's is called within the handler.
        between = [frames for frames in stacks if not any(frame.of_user for frame in frames)]
        reads = any(frame.name == "handle_one_request" for frames in between for frame in frames)
        clients = [a for a in sink.job if a.activity.kind in ("http", "network") and a is not server]
        asking = [a for a in clients if set(server.process.listens) & set(a.process.peers)]
        if reads and asking:
            why = (
                f"{asking[0].says}. Its server {server.process.label} serves one connection at a time, at "
                f"{server.activity.site}. It reads from one that is idle and kept alive, and does not accept the next. "
                f"Close idle connections, or serve each in a thread of its own (ThreadingHTTPServer).{sink.who_waits}"
            )
            return sink.blame("external wait", [server], why, cause="http").at(asking[0].activity.site)
    return None


def _unflushed(sink: Sink) -> Verdict | None:
    """Find which of a parent and its program, which read from each other, leaves its output in a buffer."""
    if [a.activity.kind for a in sink.culprits] != ["pipe", "pipe"]:
        return None
    pids = {a.pid for a in sink.culprits}
    lazy = list[tuple[Actor, str]]()
    for one, other in zip(sink.culprits, reversed(sink.culprits), strict=True):
        process, text = one.process, sink.sources.get(one.activity.file, "")
        written = source.STDOUT if process.parent in pids else source.STDIN
        # A program answers only if it was asked. One that has written before may keep no buffer.
        unbuffered = "-u" in process.command or process.last.written
        if written is source.STDOUT and (unbuffered or not other.process.last.written):
            continue
        if line := source.unflushed(text, one.activity.line, written):
            lazy.append((one, f"{PurePath(one.activity.file).name}:{line}"))
    if len(lazy) != 1:
        return None
    [(one, site)] = lazy
    why = (
        f"{sink.says} No flush() follows what {one.process.label} writes at {site}: it may still be in the buffer of "
        f"that process, while the other one waits for it."
    )
    return sink.blame("external wait", [one], why, cause="pipe", confidence="medium").at(site)


def _without_orders(sink: Sink) -> Verdict | None:
    """Judge ranks without orders from a main process, which waits for ranks that wait for them in a collective."""
    inside = [a for a in sink.culprits if a.rank is not None and a.activity.kind in DISTRIBUTED]
    away = [a for a in sink.culprits if a.rank is not None and a.activity.kind in THROUGH_PIPES]
    drivers = [a for a in sink.culprits if a.rank is None]
    if not inside or not away or len(drivers) != 1:
        return None
    if source.goes_on_forever(drivers[0].activity.loop_in(sink.sources)):
        return None  # it serves whoever asks, and drives nobody
    ranks = f"rank{'s' * (len(away) > 1)} {names(away)}"
    driver, blamed = drivers[0].process.label, [*away, *drivers]
    if all(a.process.unread for a in away):
        missed = f"But {driver} has not read what {ranks} sent last, which may be an error"
    else:
        missed = f"So {driver} has not told {ranks} to take part, or has not read an error of {ranks}"
    why = f"{sentences(inside)} {sentences(away)} {missed}. It waits for the others: {drivers[0].says}."
    pids = tuple(a.pid for a in blamed)
    return sink.blame("missing rank", away, why, pids=pids, structural=True)


def _asks_on(sink: Sink) -> Verdict | None:
    """Judge a process that sleeps and asks again for what never comes."""
    if sink.act.kind != "sleep":
        return None
    pattern, circle, sites = LOCAL["sleep"][0], "", list[str]()
    if sink.one.rank is None or not sink.blocked_ranks:
        pattern = "external wait"
        if not sink.one.process.peers and (other := _waits_beside(sink)):
            pattern, circle = "rollout blocked", f" Meanwhile {other.thread} {words_of(other)} at {other.place}."
            sites = [other.site] if sink.act.thread == "MainThread" else []
    why = f"{sink.one.says}.{_others_in_circle(sink)}{sink.who_waits}{_condition(sink)}{circle}"
    confidence = "high" if sink.blocked_ranks else "medium"
    return sink.blame(pattern, _without_workers(sink), why, confidence=confidence, cause="sleep").at(*sites)


def _blocked(sink: Sink) -> Verdict | None:
    """Name the call in which the culprit is blocked."""
    pattern, alone = LOCAL[sink.act.kind][0], _pool_waits_for_itself(sink)
    why = f"{sink.one.says}.{'' if alone else _others_in_circle(sink)}{sink.who_waits}"
    unasked = sink.act.kind == "select" or sink.act.op == "main_loop"
    if unasked and sink.one.rank is not None and sink.blocked_ranks:
        pattern = "missing rank"
        why += " What should have led it into that call may have failed: look into its log and its answers."
    locking = sink.act.kind == "lock" or (sink.act.task and sink.act.op == "acquire")
    holders = lock_holders(sink.one, sink.act, sink.sources) if locking else {}
    if fills_alone(sink.one, sink.job):
        why += " No other process has an end of this queue's pipe: the one that should fill it may have ended."
    why += _parties(sink) + (_asked(sink) or _beside(sink))
    why += "".join(f" {held}." for held in [*holders][:2]) or left_locked(sink)
    confidence = "high" if sink.blocked_ranks else "medium"
    sites = [*holders.values(), *(each.site for each in _signallers(sink))]
    return sink.blame(pattern, _without_workers(sink), why, confidence=confidence, cause=sink.act.kind).at(*sites)


def _without_workers(sink: Sink) -> list[Actor]:
    """Return the first culprit alone if all others are workers that wait for jobs or for room in a queue.

    Then whoever should give them these is at fault.
    """
    others = sink.culprits[1:]
    only_workers = bool(others) and all(_waits_for_its_next_job(a, sink.sources) for a in others)
    only_workers |= _pool_waits_for_itself(sink) and all(a.activity.kind == "queue_full" for a in others)
    return [sink.one] if only_workers else sink.culprits


def _waits_beside(sink: Sink) -> Activity | None:
    """Return the thread that waits while another one of its process asks again and again: they wait for one another.

    It is the main thread, or one that waits for a condition or for room if the main thread asks.
    """
    if sink.act.thread == "MainThread":
        own = (t for t in sink.one.threads if t.of_user and not (t.task or t.heartbeat))
        own = (t for t in own if t.kind in ("condition", "queue_full"))
    else:
        own = (t for t in sink.one.threads if t.thread in ("MainThread", MAIN_TASK) and t.kind in WAITS_INSIDE)
        own = sorted(own, key=lambda t: t.idle_loop)  # the main coroutine says more than its event loop
    return next((t for t in own if t is not sink.act and t.site), None)


def _others_in_circle(sink: Sink) -> str:
    """Return words about the other processes of a circle; "" if the culprit is alone."""
    others = sink.culprits[1:]
    if not others:
        return ""
    guessed = any(a.activity.kind in THROUGH_PIPES and not surely_awaits(a, sink.job) for a in sink.culprits)
    more = ["", " One more does, too.", f" {len(others) - 1} more do, too."][min(len(others) - 1, 2)]
    return f" Meanwhile {others[0].says}. They {'may ' if guessed else ''}wait for one another.{more}"


def _waits_for_its_next_job(actor: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether a process waits for an item in a queue as the first thing that an endless loop does."""
    loop = actor.activity.loop_in(sources)
    if not isinstance(loop, ast.While) or not isinstance(loop.test, ast.Constant):
        return False
    first = source.covers(loop.body[0], actor.activity.line)
    return first and actor.activity.kind == "queue" and "put(" not in actor.activity.text


def _condition(sink: Sink) -> str:
    """Return words about the loop that sleeps and asks again: its condition, and who waits meanwhile."""
    loop = sink.act.loop_in(sink.sources)
    if not isinstance(loop, ast.While):
        return ""
    asks = "" if isinstance(loop.test, ast.Constant) else f" It sleeps and asks again while {ast.unparse(loop.test)}."
    # The thread or process that should end the wait may have failed long before: its error then ends the log.
    if error := sink.one.process.old_error:
        asks += f" Its log ends with {error!r}: perhaps what should end this wait has failed."
    others = [a for a in sink.waiters if a.rank is None and a.activity.kind in TO_OTHERS and a.activity.site]
    return asks + (f" Meanwhile {others[0].says}." if others else "")


def _asked(sink: Sink) -> str:
    """Return words about the process of this job that listens at the address which the culprit's variables name."""
    if sink.act.kind != "http":
        return ""
    ports = ports_named(sink.one.process)
    asked = next((a for a in sink.job if a is not sink.one and ports & set(a.process.listens)), None)
    return f" That server is in this job: {asked.says}." if asked else ""


def _through_server(sink: Sink) -> Verdict | None:
    """Judge clients that all wait for a server whose handlers wait for what another of these clients should bring.

    A client that asks the server again and again may be among them.
    """
    server, ports = sink.one, set(sink.one.process.listens)
    waiting = [a for a in sink.waiters if a.activity.kind in ("http", "network") and not a.moving]
    asking = [a for a in waiting if ports & set(a.process.peers)]
    again = [a for a in sink.job if not a.moving and asks_again(a.activity, sink.sources)]
    places = {tuple((f.file, f.line) for f in a.process.user_frames) for a in (*again, *asking)}
    others = [a for a in sink.waiters if a not in (*asking, *again) and a.activity.kind not in ("process", "thread")]
    handlers = [each for each in server.threads if each.kind == "condition" and _waits_as_asked(each, sink.sources)]
    working = [each for each in server.threads if each.of_user and each not in handlers and each.kind != "select"]
    reading = [each for each in working if each.kind == "network"][: len(again)]  # the connections of `again`
    working = [each for each in working if "serve_forever(" not in each.text and each not in reading]
    if len(places) < 2 or len(handlers) < len(asking) or not all(map(done, others)) or working or sink.blocked_ranks:
        return None
    blamed = [*again, *asking]
    why = " ".join(
        [
            f"{', '.join(a.process.label for a in blamed)} wait for one another through {server.process.label}: its "
            f"handlers wait at {handlers[0].place} for what a client should bring, and no client is left to bring it.",
            *(f"It is asked again and again at {a.activity.place}." for a in again),
        ]
    )
    found = sink.blame("rollout blocked", blamed, why, cause="condition", confidence="medium")
    return with_callers(found, asking).at(*(a.activity.site for a in again), handlers[0].site)


def _waits_as_asked(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a handler waits without a limit for a condition that depends on its request."""
    text = sources.get(one.file, "")
    calls = source.calls_at(text, one.line)
    for call, name in ((each, source.dotted(each.func)) for each in calls):
        if name.endswith((".wait", ".wait_for")) and (call.keywords or len(call.args) > name.endswith("wait_for")):
            return False
    handler, loop = source.enclosing_function(text, one.line), one.loop_in(sources)
    given = {each.arg for each in handler.args.args} - {"self"} if handler is not None else set[str]()
    tests = [loop.test] if isinstance(loop, ast.While) else []
    tests += [each for call in calls for each in call.args if isinstance(each, ast.Lambda)]
    return bool(given & source.names_in(*tests))


def _parties(sink: Sink) -> str:
    """Return words about how many threads have come to the barrier at which the culprit waits, if variables say it."""
    names = [f"{sink.act.target}.{name}" for name in ("_parties", "_count")]
    here = [f for t in sink.one.process.threads for f in t.frames if (f.file, f.line) == (sink.act.file, sink.act.line)]
    wanted, come = next(([f.locals[n] for n in names] for f in here if {*names} <= {*f.locals}), ("", ""))
    return f" It opens when {wanted} threads have come, and {come} have." if wanted else ""


def _signallers(sink: Sink) -> list[Activity]:
    """Return the threads that would signal the culprit's condition if they came out of the call that they wait in."""
    if sink.act.kind != "condition" or sink.act.task:
        return []
    wait = {(sink.act.kind, sink.act.target)}
    callers = {thread.name: thread.user_frames[1:] for thread in sink.one.process.threads if not thread.task}
    may = {
        name
        for name, frames in callers.items()
        if any(source.ends_one_of(sink.sources.get(f.file, ""), f.line, wait, by_argument=False) for f in frames)
    }
    every = [each for each in sink.one.threads if each.thread in may and each is not sink.act]
    every = [each for each in every if not source.SAYS_END.search(each.target)]  # at the end, it lets all others out
    return [each for each in every if each.kind in WAITS_INSIDE and each.site == every[0].site]


def _pool_waits_for_itself(sink: Sink) -> bool:
    """Return whether each thread of a pool waits for the result of another job, and no process runs such a job."""
    jobs = [each for each in sink.one.threads if each.is_job]
    outermost = (frame for a in sink.culprits[1:] for frame in a.process.main_frames)
    elsewhere = any(re.search(r"concurrent/futures/process\.py$|multiprocessing/pool\.py$", f.file) for f in outermost)
    return len(jobs) > 1 and not elsewhere and all(each.kind in ("future", "pool") for each in jobs)


def _beside(sink: Sink) -> str:
    """Return words about the other threads and coroutines of the culprit that wait, too: often for one another."""
    if _pool_waits_for_itself(sink):
        jobs = sum(each.is_job for each in sink.one.threads)
        return f" All {jobs} threads that run jobs wait for results of other jobs: none is left to run those."
    if sink.act.kind not in WAITS_INSIDE:
        return ""
    words_by_site = {sink.act.site: ""}
    if signallers := _signallers(sink):
        one, more = signallers[0], len(signallers) - 1
        also = f" ({more} more threads are there)" if more else ""
        words_by_site[one.site] = f" Its thread {one.thread} could set it, but {words_of(one)} at {one.place}{also}."
    waiting = [each for each in sink.one.threads if each.kind in WAITS_INSIDE and each.kind != "select"]
    for each in waiting:
        if each.of_user and not (each.heartbeat or each.dispatches):
            name = each.thread or "a coroutine"
            words_by_site.setdefault(each.site, f" Beside it, {name} {words_of(each)} at {each.place}.")
    return "".join(list(words_by_site.values())[:3])


RULES: tuple[Callable[[Sink], Verdict | None], ...] = (
    _paused, _blocked_loop, _not_woken, _held_already, rejecting, starved, never_filled, takes_in_vain, outlived,
    locked_outside, locked_by_fork, kept_locked, pipe_kept_open, joined_too_early, _joins_its_producer, dead,
    _own_waits, never_holds, _slow, locked_crosswise, locked_by, _cleaned_up, missing_key, _joins_alone, _one_at_a_time,
    _unexplained, _loader, _silent_server, _outside, retrying, device, _unscheduled, _computing, both_poll,
    threads_poll, asks_as_told, polling, _through_server, lost_task, _unflushed, _without_orders, _asks_on,
    _blocked,
)  # fmt: skip
"""Rules in the order in which they are tried: the first that answers decides, so facts come before guesses.

Those after `dead` and `_slow` judge a culprit that lives and does not move, and those after `_unexplained` one with a
kind of wait that `LOCAL` has. `_blocked` always answers.
"""
