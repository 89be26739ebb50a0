"""Judges a snapshot: who waits for whom, whose fault it is, and how sure that is. No process is asked anything."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from clew.hang import source
from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.advice import with_advice
from clew.hang.between_ranks import cycle, with_callers
from clew.hang.collective_calls import record_lines
from clew.hang.ended import done, ended_inside, explains
from clew.hang.expressions import constants
from clew.hang.local_cause import device, local_cause
from clew.hang.locks import is_shared_lock, locked_by
from clew.hang.looks import cpu_share, recent
from clew.hang.observed import Snapshot
from clew.hang.progress import pace, seen, woken_once
from clew.hang.rejecting_loops import refuses
from clew.hang.roles import MAIN_TASK, WAITS_INSIDE, actors_of, world_of
from clew.hang.same_call import initialisation, missing_ranks, same_everywhere, two_threads
from clew.hang.verdict import SOUND, Actor, Sink, Verdict, names, sentences, verdict_about
from clew.hang.waits_for import TO_OTHERS, Edges, all_edges, collective_edges, key_of, reachable, reads_requests, sinks

STARTS = re.compile(r"health|Popen$|Process$|\.(start|terminate|kill)$|\.read\(")
"""Calls of a loop that looks after servers, beside those of any polling loop."""
SUPERVISING = ("process", "thread", "pool", "future", "tasks", "ray")
"""Kinds of waits of a main process that only waits for its children to end."""
UNTIL_END = re.compile(rf"\(\)$|{source.SAYS_END.pattern}", re.I)
"""Matches an event that has no name, so that nobody can set it, and the names of those that are set at the end."""
SOON_S = 60.0
"""Longest sleep, in seconds, whose end is worth waiting for: the process is slow then, not hung."""
RARELY = 0.2
"""Highest share of looks in which the slowest rank is in a collective. The others are in one in all but this share."""
ENOUGH_LOOKS = 4
"""Minimum number of looks to name the slowest rank."""
REAPED_S = 1.0
"""Seconds that a parent may take to notice that its child has ended."""


def judge(snapshot: Snapshot) -> Verdict:
    """Return the verdict about a snapshot: that of the first check that finds something.

    Stopped processes, servers that nobody asks, progress, missing ranks and initialisation are checked before the graph
    of waits: they are simpler facts, from which the waits of other processes follow.
    """
    actors = actors_of(snapshot)
    if not (snapshot.unseen or snapshot.alike) and (ended := _all_ended(actors)):
        return _hedged(ended, snapshot, [])
    working = [a for a in actors if a.role not in ("launcher", "idle") or (a.stopped and _is_missed(a, actors))]
    job = [actor for actor in working if not _ended_without_fault(actor, actors)]
    if not any(actor.threads or actor.dead or actor.stopped for actor in job):
        return _hedged(_unread(actors, job), snapshot, job)
    ranks = [actor for actor in job if actor.rank is not None]
    verdict = (
        _stopped(job)
        or _unasked(job, snapshot.sources)
        or _progress(job, ranks, snapshot)
        or missing_ranks(ranks, _absent(job, ranks, snapshot), _gone(actors, job, ranks), job)
        or initialisation(ranks)
        or _by_graph(job, ranks, snapshot)
    )
    if verdict.pattern not in SOUND:
        verdict = _perhaps_slow(_unless_asleep(verdict, job, snapshot), _mains(job, ranks), snapshot)
        verdict = replace(verdict, evidence=(*verdict.evidence, *record_lines(ranks)))
    return with_advice(_hedged(verdict, snapshot, job), job, snapshot.sources)


def _is_missed(stopped: Actor, actors: list[Actor]) -> bool:
    """Return whether somebody waits for a stopped launcher, which serves the store, or for a stopped idle worker."""
    if stopped.role == "launcher":
        return any(a.activity.kind in ("init", "store") for a in actors)
    parent = next((a for a in actors if a.pid == stopped.process.parent and not a.moving), None)
    waits = (parent.activity, *parent.threads) if parent else ()
    return any(each.kind in ("data_loader", "pool", "future") for each in waits)


def _unread(actors: list[Actor], job: list[Actor]) -> Verdict:
    """Return the verdict about a job of which no stack was read, or whose launcher alone was seen."""
    why = "No stack could be read, so nothing can be said about this job."
    if not job and any(a.role == "launcher" and a.threads for a in actors):
        why = "Only the launcher was seen: its ranks had not started yet, or had just started. Ask again."
    return Verdict(pattern="undetermined", confidence="none", explanation=why)


def _absent(job: list[Actor], ranks: list[Actor], snapshot: Snapshot) -> list[int]:
    """Return the ranks that no living process has, unless they may be on a node of which nothing was seen."""
    world = world_of(snapshot)
    if not world or not ranks:
        return []
    present = {a.rank for a in ranks if not a.dead} | snapshot.alike | set(snapshot.unseen)
    parents = {a.process.parent for a in ranks}
    if any(a.pid in parents and a.rank is None and a.activity.kind in DISTRIBUTED for a in job):
        present.add(0)  # a program that has started the other ranks, and takes part itself
    return sorted(set(range(world)) - present)


def _gone(actors: list[Actor], job: list[Actor], ranks: list[Actor]) -> str:
    """Return sentences about what has ended inside of processes, and about processes that were started beside ranks."""
    parents = {a.process.parent for a in ranks}
    inside = [f"{said} ended. " for a in actors if (said := ended_inside(a))]
    beside = [a for a in job if a.dead and a.rank is None and a.process.parent in parents]
    return "".join([*inside, *(f"{a.says}; it was started beside the ranks. " for a in beside)])


def _perhaps_slow(verdict: Verdict, mains: list[Actor], snapshot: Snapshot) -> Verdict:
    """Return the verdict, or "undetermined" if each main process was woken up only once: a round may take that long."""
    if verdict.structural or not mains:
        return verdict
    if not all(woken_once(a.process, snapshot.sources) for a in mains):
        return verdict
    labels = ", ".join(a.process.label for a in mains)
    why = f"{labels}: woken up only once in {snapshot.seconds:.0f} s. It may be slow. Ask again."
    return verdict_about("undetermined", [], why, mains, confidence="low")


def _unless_asleep(verdict: Verdict, job: list[Actor], snapshot: Snapshot) -> Verdict:
    """Return the verdict, or "slow" if each process at fault is in one short sleep, and goes on when that ends."""
    blamed = [a for a in job if a.pid in verdict.pids]
    times = [_sleeps_s(a, snapshot.sources) for a in blamed]
    if not blamed or not all(snapshot.seconds < seconds <= SOON_S for seconds in times):
        return verdict
    why = f"{sentences(blamed)} This ends by itself after {max(times):g} s at most. Run clew hang again then."
    return verdict_about("slow", blamed, why, job, confidence="medium", cause="slow")


def _sleeps_s(actor: Actor, sources: Mapping[str, str]) -> float:
    """Return the seconds of the one sleep that a process is in; infinity if it is in none, or nobody knows how long.

    A wait with a timeout for an event that is set at the end, such as stop.wait(20), is a sleep, too.
    """
    one = actor.activity
    stack = [f for each in actor.process.threads if each.name == one.thread for f in each.frames]
    frames = [f for f in stack if f.of_user]
    locked = {each.site for each in actor.threads if each.kind == "lock" and each.of_user}  # at two: each has another's
    again = any(source.may_ask_again(sources.get(f.file, ""), f.line) for f in frames[1:])
    if len(locked) > 1 or not frames or again:
        return math.inf
    text, loop = sources.get(one.file, ""), one.loop_in(sources)
    event = _event_within(text, one.line) if one.kind == "tasks" else None
    if one.kind == "condition":
        event = one.target
    if event is not None and UNTIL_END.search(event) and not (loop and source.polls(loop, text)):
        limits = (f.locals.get("timeout", "") for f in stack if not f.of_user)
        return next((float(limit) for limit in limits if re.fullmatch(r"\d+(\.\d+)?", limit)), math.inf)
    if one.kind != "sleep":
        return math.inf
    values = {name: str(value) for name, value in constants(text).items()} | frames[0].locals
    seconds = source.sleeps_s(text, one.line, values)
    return math.inf if seconds is None else seconds


def _event_within(text: str, line: int) -> str | None:
    """Return the name of the event in `asyncio.wait_for(event.wait(), 20)` at a line, or None."""
    limited = (c for c in source.calls_at(text, line) if source.dotted(c.func).endswith("wait_for"))
    inner = next((source.dotted(c.args[0].func) for c in limited if c.args and isinstance(c.args[0], ast.Call)), "")
    return inner.removesuffix(".wait") if inner.endswith(".wait") else None


def _all_ended(actors: list[Actor]) -> Verdict | None:
    """Judge a job of which nothing is left, unless a part of it has failed: it does not hang."""
    codes = {a.process.exit.rpartition(" ")[2] for a in actors}
    if not actors or not all(a.dead for a in actors) or codes - {"", "0"}:
        return None
    told = ", ".join(a.says for a in actors[:4])
    if codes == {"0"}:
        return verdict_about("healthy", [], f"{told}. Nothing of this job is left, so nothing hangs.", actors)
    why = f"{told}. Nothing of this job is left. Its exit code can no longer be read, so look into its log."
    return verdict_about("undetermined", [], why, actors, confidence="none")


def _ended_without_fault(actor: Actor, actors: list[Actor]) -> bool:
    """Return whether a process has ended, and that is no fault.

    Its parent is about to notice, or is a shell, or it was gone before anything of it could be read.
    """
    one = actor.process
    if one.looks and not (one.command or one.exit or one.name) and all(look.state == "X" for look in one.looks):
        return True
    parent = next((each for each in actors if each.pid == actor.process.parent), None)
    last = actor.process.last
    ended = next((look.at for look in actor.process.looks if look.state in "ZX"), last.at)
    just = last.state == "X" or (last.state == "Z" and last.at - ended < REAPED_S)
    if parent is None or parent.dead:
        return False
    command = actor.process.command
    if parent.role == "idle" and not parent.threads and command and "python" not in command[0]:
        return last.state in "ZX"  # a program of a shell, for example: they come and go
    return just and parent.activity.kind == "process"


def _hedged(verdict: Verdict, snapshot: Snapshot, job: list[Actor]) -> Verdict:
    """Lower the confidence if a process could not be read, and say which."""
    unread = [a for a in job if not a.threads and not a.dead and not a.stopped]
    notes = [*snapshot.notes, *(f"{a.process.label} could not be read: {a.process.last.error}" for a in unread)]
    lower = unread and verdict.confidence == "high" and verdict.pattern not in SOUND
    return replace(verdict, notes=tuple(notes), confidence="medium" if lower else verdict.confidence)


def _stopped(job: list[Actor]) -> Verdict | None:
    """Judge processes that a signal (SIGSTOP) or a debugger has stopped, unless a rank still moves."""
    stopped = [actor for actor in job if actor.stopped]
    if not stopped or any(a.moving and a.rank is not None for a in job):
        return None
    labels = ", ".join(a.process.label for a in stopped)
    how = "by a debugger" if all(a.process.last.state == "t" for a in stopped) else "by a signal (SIGSTOP or SIGTSTP)"
    parents = [a for a in job if a.rank is not None and a.pid in {each.process.parent for each in stopped}]
    of = f", started by rank {names(parents)}," if parents else ""
    be, them = ("is", "it") if len(stopped) == 1 else ("are", "them")
    why = f"{labels}{of} {be} stopped {how}. The others wait for {them}."
    return verdict_about("stopped", stopped, why, job, cause="stopped", structural=True)


def _mains(job: list[Actor], ranks: list[Actor]) -> list[Actor]:
    """Return the processes whose progress is that of the job: the ranks, or the main process, or what it supervises."""
    if ranks:
        return ranks
    serving = [a for a in job if a.process.listens and a.activity.kind in ("select", "network", "http")]
    servers = [a for a in serving if not _asks_its_child(a, job)]
    workers = [a for a in job if a not in servers and a.role == "other" and not a.dead] or job
    pids = {a.pid for a in workers}
    roots = [a for a in workers if a.process.parent not in pids]
    # A main process that only waits for its children shows no progress of its own: look at the children instead.
    while len(roots) < len(workers) and roots and all(_supervises(a, workers) and not a.moving for a in roots):
        parents = {a.pid for a in roots}
        roots = [a for a in workers if a.process.parent in parents]
    return roots or workers


def _asks_its_child(actor: Actor, job: list[Actor]) -> bool:
    """Return whether a process is a client of its own child: both listen at a port, and it is connected there."""
    shared = {*actor.process.listens} & {*actor.process.peers}
    return any(a.process.parent == actor.pid and shared & {*a.process.listens} for a in job)


def _supervises(actor: Actor, workers: list[Actor]) -> bool:
    return actor.activity.kind in SUPERVISING and any(a.process.parent == actor.pid for a in workers)


def _only_serves(actor: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether the main thread serves one connection after another, or waits while gRPC or a thread serves."""
    main, stack = actor.threads[0], actor.process.main_frames
    serving = [each.name for each in actor.process.threads if any(f.name == "serve_forever" for f in each.frames)]
    others = [each for each in actor.threads[1:] if each.thread not in serving and _may_work(each)]
    if any(frame.name == "wait_for_termination" and "grpc" in frame.file for frame in stack):
        return not others
    ended = [name for name in actor.process.inside.ended_threads if "process_request" not in name]
    if ended or actor.process.old_error:  # it may serve only beside its work, which has failed
        serving = []
    if serving and main.kind == "thread":  # it joins that thread, or has ended
        return not others
    forever = main.op.endswith(("pause", "sigwait")) or (main.kind == "condition" and UNTIL_END.search(main.target))
    waits = forever or main.thread in serving
    waiting = {each.kind for each in others if not _keeps_house(each, sources)}
    if serving and waits and waiting <= {"queue"}:
        return True
    loop = main.loop_in(sources)
    serves = main.op.endswith("accept") or (
        bool(serving) and main.kind == "sleep" and waiting <= {"queue", "condition"}
    )
    return (serves and source.goes_on_forever(loop)) or reads_requests(main, sources)


def _keeps_house(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a thread wakes up again and again and works then, for example to forget what is old."""
    text, loop = sources.get(one.file, ""), one.loop_in(sources)
    leaves = source.nodes_in((ast.Break, ast.Return), loop)
    return one.periodic and loop is not None and not leaves and not source.polls(loop, text)


def _may_work(one: Activity) -> bool:
    """Return whether a thread or coroutine runs the user's code, and is neither a heartbeat nor an idle event loop."""
    return one.of_user and not one.heartbeat and not one.idle_loop


def _unasked(job: list[Actor], sources: Mapping[str, str]) -> Verdict | None:
    """Judge servers that nobody asks anything. Their threads and children may wait for work: that is no fault."""
    free = [a for a in job if a.threads and _is_free(a, sources)]
    servers = [a for a in free if a.threads[0].idle_loop or _only_serves(a, sources)]
    pids = {a.pid for a in servers}
    rest = [a for a in job if a not in servers and not _supervises(a, servers) and not _checks(a, servers, sources)]
    fed = [a for a in rest if a.process.parent in pids and a.activity.kind in ("pipe", "queue")]
    if not servers or fed != rest:
        return None
    ports = ", ".join(map(str, sorted({port for a in servers for port in a.process.listens})))
    if not ports and any(own.startswith("socket") for a in fed for _, own, _ in a.process.awaits):
        return None  # a child that reads a Unix socket may be a client of this server
    at = f"at port {ports} of" if ports else "of"
    why = f"Nobody asks anything {at} {', '.join(a.process.label for a in servers)}."
    return verdict_about("healthy", [], why, job, confidence="medium")


def _checks(actor: Actor, servers: list[Actor], sources: Mapping[str, str]) -> bool:
    """Return whether a process does nothing but ask now and then if its children, which are servers, are well."""
    text, loop = sources.get(actor.activity.file, ""), actor.activity.loop_in(sources)
    if loop is None or not any(a.process.parent == actor.pid for a in servers) or not source.goes_on_forever(loop):
        return False
    asks = re.search(r"health|is_alive|\.poll\(", ast.unparse(loop))
    return asks is not None and source.polls(loop, text, also=STARTS)


def _is_free(server: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether a process has no clients, or its threads only wait for their next requests."""
    if server.activity.op == "acquire" or _has_rounds(server, sources):  # it waits for a semaphore, so it has work
        return False
    working = [one for one in server.threads if _may_work(one)]
    reading = [one for one in working if reads_requests(one, sources)]
    if not server.process.listens:
        return _free_at_unix_socket(server, reading, sources)
    # A client outside of this job may keep a connection open without asking for anything.
    return not server.process.peers or (bool(reading) and reading == working)


def _has_rounds(server: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether the main coroutine waits in a loop that counts, such as that over a trainer's steps."""
    mains = [one.thread for one in server.threads if one.thread == MAIN_TASK and one.kind in WAITS_INSIDE]
    frames = [f for each in server.process.threads if each.name in mains for f in each.user_frames]
    loops = [source.outermost_loop(sources.get(f.file, ""), f.line) for f in frames]
    return any(isinstance(loop, ast.While) and isinstance(loop.test, ast.Compare) for loop in loops) or any(
        isinstance(loop, ast.For) and "range" in source.dotted(getattr(loop.iter, "func", loop.iter)) for loop in loops
    )


def _free_at_unix_socket(server: Actor, reading: list[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether a process is in accept(), and its other threads only read requests or wait for jobs in a queue.

    Clients of a Unix socket are not seen, but a thread that runs what the loop around accept() names has one.
    """
    act = server.activity
    loop = act.loop_in(sources)
    names = {getattr(n, "attr", getattr(n, "id", "")) for n in source.nodes_in(ast.AST, loop)}
    asked = {t.name for t in server.process.threads if any(f.name in names for f in t.user_frames)}
    others = [one for one in server.threads if _may_work(one) and one is not act and one not in reading]
    return act.op.endswith("accept") and all(one.kind == "queue" and one.thread not in asked for one in others)


def _progress(job: list[Actor], ranks: list[Actor], snapshot: Snapshot) -> Verdict | None:
    """Return a verdict if the job's main processes (see `_mains`) move, or if that cannot be seen; otherwise None."""
    mains = _mains(job, ranks)
    moving = [a for a in mains if a.moving]
    if ranks and any(a.dead for a in mains):
        return None
    if found := _blind_loops(mains):
        return found
    if not moving or refuses(job, snapshot):
        return None
    waiting = [a for a in mains if a.activity.kind in ("collective", "recv", "send", "device")]
    if waiting and len(waiting) < len(mains) and not any(a.moving for a in waiting):
        if ranks:
            edges = all_edges(job, snapshot.sources)
            awaited = set[int]().union(*(reachable(each.pid, edges) for each in waiting))
            if awaited.isdisjoint(a.pid for a in moving):  # the others wait for one another alone
                return None
        how = _how(moving[0], snapshot, "it")
        label = ", ".join(a.process.label for a in moving)
        why = f"{label} is slow, not hung{how}; the others wait for it."
        return verdict_about("slow", moving, why, mains, cause="slow")
    edges = {} if ranks else all_edges(job, snapshot.sources)
    if not ranks and not all(a.moving or _between_rounds(a, edges, job, snapshot.sources) for a in mains):
        return None
    how = _how(moving[0], snapshot, moving[0].process.label)
    return verdict_about("healthy", [], f"The job moves{how}.{_straggler(ranks, snapshot.sources)}", mains)


def _straggler(ranks: list[Actor], sources: Mapping[str, str]) -> str:
    """Return a sentence about the one rank for which the others wait most of the time; "" if there is none."""
    looks = {a.rank: seen(a.process, sources) for a in ranks}
    shares = {rank: sum(one.kind in DISTRIBUTED for one in each) / max(1, len(each)) for rank, each in looks.items()}
    late, *others = sorted(shares, key=lambda rank: shares[rank]) if shares else [None]
    enough = len(looks.get(late, ())) >= ENOUGH_LOOKS and others

    def waits(one: Activity) -> bool:
        joined = one.group == "world" if one.members is None else late in one.members
        return one.kind in DISTRIBUTED and joined and (not one.peers or late in one.peers)

    often_waiting = all(sum(map(waits, looks[rank])) >= (1 - RARELY) * len(looks[rank]) for rank in others)
    if not enough or shares[late] > RARELY or not often_waiting:
        return ""
    [(site, often)] = Counter(one.site for one in looks[late] if one.kind not in DISTRIBUTED).most_common(1)
    return (
        f" All others waited for rank {late} in a collective most of the time. It was at {site} in {often} of "
        f"{len(looks[late])} looks."
    )


def _between_rounds(actor: Actor, edges: Edges, job: list[Actor], sources: Mapping[str, str]) -> bool:
    """Return whether a process sleeps in a loop that never ends, and nobody waits for it but a parent that joins it.

    A loop that ends when a file or a number is there may wait forever, whoever else moves.
    """
    one = actor.activity
    loop = one.loop_in(sources)
    if one.kind != "sleep" or one is not actor.threads[0] or not source.goes_on_forever(loop):
        return False
    waiters = [a for a in job if actor.pid in edges[a.pid]]
    return not edges[actor.pid] and all(a.pid == actor.process.parent and a.activity.kind == "process" for a in waiters)


def _how(actor: Actor, snapshot: Snapshot, subject: str) -> str:
    """Return words about how a process moves, by itself or by a program that it waits for."""
    return f": {subject} {actor.work}" if actor.work else pace(actor.process, snapshot.sources)


def _blind_loops(mains: list[Actor]) -> Verdict | None:
    """Judge event loops that are woken up, but whose coroutines could not be read, by CPU time and output."""
    blind = [a for a in mains if a.activity.idle_loop and not any(t.task for t in a.process.threads)]
    loops = [a for a in blind if recent(a.process).wakeups >= 2]
    if not loops or len(loops) < len(mains):
        return None
    if any(cpu_share(a.process) > 0.02 or a.process.last.written > a.process.first.written for a in loops):
        return verdict_about("healthy", [], "The event loop runs: it works or writes.", mains, confidence="medium")
    why = "The event loop is woken up, but its coroutines could not be read: it may only poll."
    return verdict_about("undetermined", [], why, mains, confidence="low")


def _by_graph(job: list[Actor], ranks: list[Actor], snapshot: Snapshot) -> Verdict:
    """Follow who waits for whom to where the waiting ends, and judge what is there."""
    edges = collective_edges(ranks)
    together = _together(ranks, edges)
    if together and sum(map(len, together)) == len(ranks):
        return _in_one_call(together)
    parted = [a for a in job if done(a) and not _awaited(a, job, snapshot.sources)]
    job = [a for a in job if a not in parted] or job
    edges = all_edges(job, snapshot.sources)
    by_pid = {a.pid: a for a in job}
    culprits = [by_pid[pid] for pid in sorted(_most_waited(edges, by_pid))]
    waiters = [a for a in job if a not in culprits]
    sink = Sink(culprits=culprits, waiters=waiters, job=job, snapshot=snapshot)
    if culprits[0].activity.members and (at_fault := [each for each in together if culprits[0] in each]):
        return _in_one_call(at_fault)
    between = any(a.activity.kind in (*DISTRIBUTED, "device") for a in culprits)
    if between and len(culprits) > 1 and all(a.rank is not None for a in culprits):
        return _unless_ready(device(sink) or locked_by(sink) or cycle(sink), culprits)
    found = _with_those_alike(local_cause(sink), culprits[0], ranks)
    beside = [a.says for a in parted] + [f"{said} ended" for a in culprits if (said := ended_inside(a))]
    if beside and found.cause != "dead" and found.pattern not in SOUND:
        found = replace(found, explanation=f"{found.explanation} Beside it, {'; '.join(beside[:4])}.")
    return with_callers(found, culprits) if found.pids == tuple(a.pid for a in culprits) else found


def _awaited(ended: Actor, job: list[Actor], sources: Mapping[str, str]) -> bool:
    """Return whether a process that ended normally could have ended the wait of a living one."""
    still = [a for a in job if not a.dead and not a.moving]
    waiting = [a for a in still if a.activity.kind in (*TO_OTHERS, "sleep")]
    locked = [a for a in still if a.activity.op == "acquire" and is_shared_lock(a.activity, sources)]
    if any(a.process.parent == ended.process.parent for a in locked):
        return True  # an exception may have skipped its release()
    return any(
        bool(one.process.outside) or one.process.awaited_child == ended.pid
        if one.activity.kind == "process"
        else explains(ended.process.name, one, job, sources)
        for one in waiting
    )


def _together(ranks: list[Actor], edges: Mapping[int, set[int]]) -> list[list[Actor]]:
    """Return the groups of ranks that are in one call of a collective, and wait for no other rank there."""
    found = defaultdict[object, list[Actor]](list)
    for a in ranks:
        if a.activity.kind == "collective" and not edges[a.pid]:
            found[key_of(a.activity), a.activity.op].append(a)
    return [each for each in found.values() if len(each) > 1]


def _in_one_call(groups: list[list[Actor]]) -> Verdict:
    """Judge groups of which all ranks have come to a collective: one with a fault of its own explains the others."""
    every = [_unless_ready(two_threads(each) or same_everywhere(each), each) for each in groups]
    return next((each for each in every if each.pattern != "same collective everywhere"), every[0])


def _unless_ready(verdict: Verdict, ranks: list[Actor]) -> Verdict:
    """Return the verdict, but not as structural if a rank is ready to run: it may be about to leave the collective.

    The ranks are then watched for longer.
    """
    ready = any(a.process.last.state == "R" for a in ranks)
    return replace(verdict, structural=verdict.structural and not ready)


def _with_those_alike(verdict: Verdict, culprit: Actor, ranks: list[Actor]) -> Verdict:
    """Extend the blame to other ranks that wait for the same thing at the same place: none is more at fault."""
    one = culprit.activity
    if verdict.ranks != (culprit.rank,) or culprit.dead or one.kind in (*DISTRIBUTED, "device", "compute", "unknown"):
        return verdict
    place = (one.kind, one.file, one.line)
    alike = [a for a in ranks if (a.activity.kind, a.activity.file, a.activity.line) == place and not a.moving]
    if len(alike) < 2:
        return verdict
    return replace(
        verdict,
        ranks=tuple(sorted({a.rank for a in alike if a.rank is not None})),
        pids=tuple(sorted({*verdict.pids, *(a.pid for a in alike)})),
        explanation=f"{verdict.explanation} Ranks {names(alike)} are all there.",
    )


def _most_waited(edges: Mapping[int, set[int]], by_pid: Mapping[int, Actor]) -> set[int]:
    """Return the sink for which most processes wait, of those that others wait for and that do not simply work on.

    A parent that only waits for its children to end decides nothing, unless nobody else waits.
    """
    ends = sinks(edges)
    waited = {pid for targets in edges.values() for pid in targets}
    found = [end for end in ends if len(end) > 1 or end & waited] or ends
    still = [end for end in found if not all(by_pid[pid].moving for pid in end)] or found
    waiting = {tuple(each): [pid for pid in edges if reachable(pid, edges) & each] for each in still}
    joins = {pid for pid, one in by_pid.items() if one.activity.kind == "process"}
    return {*max(waiting, key=lambda each: (len({*waiting[each]} - joins), len(waiting[each]), -min(each)))}
