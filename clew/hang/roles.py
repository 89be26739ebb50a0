"""Says which process is which: ranks and their numbers, launchers, workers of data loaders, and helpers."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clew.hang.activity import C10D, DISTRIBUTED, Activity, activities
from clew.hang.looks import with_missed_tasks, without_torn
from clew.hang.observed import Group, Process, Snapshot
from clew.hang.programs import awaited_work, with_python_parents
from clew.hang.progress import moves, moves_inside
from clew.hang.source import (
    enclosing_function,
    ends_one_of,
    goes_on_forever,
    loop_variables,
    nodes_in,
    outermost_loop,
)
from clew.hang.verdict import Actor

RANK_NAMES = ("rank", "global_rank", "world_rank", "my_rank", "local_rank", "rank_id", "RANK", "self.rank")
WORLD_NAMES = ("world_size", "world", "nprocs", "num_ranks", "n_ranks", "WORLD_SIZE", "WORLD", "self.world_size")
WORKERS = re.compile(
    r"multiprocess(ing)?/(pool|managers)\.py$|concurrent/futures/process\.py$|torch/utils/data/_utils/worker\.py$"
)
"""Files whose loops run a user's function, or wait for one to run."""
WORKER_LOOPS = ("worker", "_process_worker", "_worker_loop", "serve_forever")
HELPERS = (
    "resource_tracker", "forkserver import main", "torch/_inductor/compile_worker",
    "/ray/autoscaler/", "/ray/dashboard/", "/ray/_private/log_monitor",
    "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE",
)  # fmt: skip
LAUNCHER = re.compile(r"torch\.distributed\.(run|launch)|torchrun|accelerate.*launch|deepspeed\.launcher|/deepspeed ")
WORKER_PRIORITY = (
    "stdin", "lock", "ray", "http", "network", "file", "process", "connections", "sleep", "pipe",
    "compute", "collective", "recv", "send", "init", "store", "condition", "queue_full", "signal", "future", "select",
    "queue", "barrier", "tasks",
)  # fmt: skip
"""Kinds of waits of threads and tasks, in the order in which they explain why the main thread waits for them."""
WAITS_INSIDE = ("queue", "condition", "barrier", "thread", "future", "pool", "queue_full", "select", "tasks", "rpc")
"""Kinds of waits that another thread or task of the same process may end."""
MAIN_TASK = "task Task-1"
"""Name of the thread that stands for the first task of an event loop: asyncio.run makes it of the main coroutine."""


def local_integer(process: Process, wanted: Sequence[str], sources: Mapping[str, str]) -> int | None:
    """Return the first of these local variables that the main thread's frames have, the outermost frame first.

    The variable of a `for` loop is left out: a program that goes over all ranks is not one of them.
    """
    frames = process.main_frames
    for name in wanted:
        for frame in reversed(frames):
            value, text = frame.locals.get(name, ""), sources.get(frame.file, "")
            if value.isdigit() and name not in loop_variables(text, frame.line):
                return int(value)
    return None


def _spawned_rank(process: Process) -> int | None:
    """Return the rank that torch.multiprocessing.spawn gave: it calls fn(i, ...), where i is the rank."""
    starting = (f for f in process.main_frames if f.name == "_wrap" and "multiprocessing/spawn" in f.file)
    return next((int(number) for frame in starting if (number := frame.locals.get("i", "")).isdigit()), None)


def joins_as(process: Process) -> tuple[int, int, str] | None:
    """Return rank, world size and address if a thread is in init_process_group; None if none is.

    An inference server joins the trainer's group in the thread that handles the request to do so.
    """
    for frame in (frame for thread in process.threads for frame in thread.frames):
        rank, world = (frame.locals.get(name, "") for name in ("rank", "world_size"))
        if frame.name == "init_process_group" and frame.file.endswith(C10D) and rank.isdigit() and world.isdigit():
            return int(rank), int(world), frame.locals.get("init_method", "").strip("'\"")
    return None


def world_group(process: Process) -> Group | None:
    """Return the default process group of a process, as its memory has it."""
    return next((group for group in process.inside.groups if group.name == "world"), None)


def waits_for_work(process: Process) -> bool:
    """Return whether a worker of a pool or data loader has nothing to do: then it is not at fault."""
    main, frames = process.main, process.main_frames
    if frames and frames[0].file.endswith("ray/_private/worker.py") and frames[0].name == "main_loop":
        # An actor's coroutines, and the methods of one with threads, run outside of the main thread. Others may
        # wait for an actor that is a rank, too, though it has nothing to do.
        return not any(thread.user_frames for thread in process.threads) and world_group(process) is None
    for place, frame in enumerate(frames):
        if frame.name in WORKER_LOOPS and WORKERS.search(frame.file):
            return place > 0 and not any(inner.of_user for inner in frames[:place]) and not (main and main.active)
    return False


def role_of(process: Process, parent: Process | None, sources: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the role and rank of one process.

    `sources` is empty if no source file mentions "distributed": then local variables do not give the rank.
    """
    command = "" if _forked_by_server(process) else " ".join(process.command)
    files = [frame.file for thread in process.threads for frame in thread.frames]
    if any(word in command for word in HELPERS) or waits_for_work(process):
        return "idle", None
    if LAUNCHER.search(command) and process.rank is None:
        return "launcher", None
    if any(file.endswith("torch/utils/data/_utils/worker.py") for file in files):
        return "loader", None
    rank = _rank_of(process, sources)
    # A process that a rank starts inherits its environment and, after a fork, its memory.
    inherited = parent is not None and parent.threads and _rank_of(parent, sources) == rank
    if rank is not None and not inherited:
        return "rank", rank
    dead_or_stopped = process.exit or process.last.state in "ZXTtD"
    program = Path(process.command[0]).name if process.command else ""
    if not process.threads and not dead_or_stopped and "python" not in program:
        return "idle", None  # for example a shell, even with Python among its arguments
    return "other", None


def _forked_by_server(process: Process) -> bool:
    """Return whether a process does the work of a forkserver's child, which has the command of the forkserver."""
    return any(frame.name == "_serve_one" and "multiprocess" in frame.file for frame in process.main_frames)


def _rank_of(process: Process, sources: Mapping[str, str]) -> int | None:
    group = world_group(process)
    if group is not None and group.rank is not None:
        return group.rank
    if joined := joins_as(process):  # more certain than the environment, or a local variable of the user's
        return joined[0]
    if process.rank is not None:
        return process.rank
    if not sources:
        return None
    rank = local_integer(process, RANK_NAMES, sources)
    return rank if rank is not None else _spawned_rank(process)


def with_ranks(processes: Sequence[Process], sources: Mapping[str, str]) -> list[tuple[Process, str]]:
    """Return the processes with their ranks and roles: from memory, the environment, or a local variable."""
    processes = with_python_parents(with_drivers(processes))
    by_pid = {process.pid: process for process in processes}
    names_ranks = sources if any("distributed" in text for text in sources.values()) else {}
    found = []
    for process in processes:
        role, rank = role_of(process, by_pid.get(process.parent), names_ranks)
        found.append((replace(process, rank=rank), role))
    taken = Counter(process.rank for process, role in found if role == "rank")
    if any(count > 1 for count in taken.values()):  # local_rank of several nodes, or not a rank at all
        sure = {process.pid for process in processes if process.rank is not None or world_group(process)}
        found = [
            (p, r) if r != "rank" or p.pid in sure or taken[p.rank] == 1 else (replace(p, rank=None), "other")
            for p, r in found
        ]
    return _by_order(found)


def with_drivers(processes: Sequence[Process]) -> list[Process]:
    """Return the processes. Those that a forkserver or Ray's raylet started become children of its parent."""
    servers = {
        each.pid: each.parent
        for each in processes
        if (each.command[:1] and each.command[0].endswith("/raylet"))
        or ("forkserver import main" in " ".join(each.command) and not _forked_by_server(each))
    }
    return [replace(each, parent=servers.get(each.parent, each.parent)) for each in processes]


def _by_order(found: list[tuple[Process, str]]) -> list[tuple[Process, str]]:
    """Give ranks, in the order of pids, to processes that were started beside the ranks but do not name their own."""
    ranks_by_pid = {p.pid: p.rank for p, role in found if role == "rank"}
    parents = {p.parent for p, role in found if role == "rank"}
    kin = [p for p, role in found if role == "other" and p.parent in parents and p.pid not in parents]
    beside = [p for p in kin if p.threads or p.last.state in "ZX"]
    worlds = {p.world for p, _ in found if p.world}
    worlds |= {len(group.members) for p, _ in found if (group := world_group(p))}
    # Only if they and the known ranks make up the world, and the known ranks are in the order of their pids, too.
    order = sorted([*ranks_by_pid, *(p.pid for p in beside)])
    if not beside or worlds != {len(order)} or any(ranks_by_pid.get(pid, n) != n for n, pid in enumerate(order)):
        return found
    number = {pid: n for n, pid in enumerate(order)}
    return [(replace(p, rank=number[p.pid]), "rank") if p.pid in number else (p, role) for p, role in found]


def world_of(snapshot: Snapshot) -> int | None:
    """Return how many ranks the job should have, as far as groups, the launcher, environment or locals say."""
    for said in (
        [len(group.members) for each in snapshot.processes if (group := world_group(each))],
        [joined[1] for each in snapshot.processes if (joined := joins_as(each))],
        [each.world for each in snapshot.processes if each.world],
        [n for each in snapshot.processes if (n := local_integer(each, WORLD_NAMES, snapshot.sources)) is not None],
    ):
        if said:
            return Counter(said).most_common(1)[0][0]
    return None


def actors_of(snapshot: Snapshot) -> list[Actor]:
    """Return the processes of a snapshot with role, activity and progress."""
    found, world = [], world_of(snapshot)
    for process, role in with_ranks(snapshot.processes, snapshot.sources):
        process = with_missed_tasks(without_torn(process))
        every = activities(process, snapshot.sources, world)
        act = effective(_without_idle_readers(every, process, snapshot), snapshot.sources)
        work = awaited_work(process, act, snapshot.processes, snapshot.sources)
        moving = moves(process, snapshot.sources) or bool(work)
        moving = moving or (bool(every) and moves_inside(process, every[0], act, snapshot.sources))
        found.append(Actor(process=process, activity=act, threads=tuple(every), moving=moving, role=role, work=work))
    return _with_group_of_waits([_without_shared_thread(actor, found, snapshot.sources) for actor in found])


def _with_group_of_waits(actors: list[Actor]) -> list[Actor]:
    """Return the processes. Ranks that wait for a tensor of a collective get the group that has exactly these ranks.

    No frame of such a wait names the collective's group, as in a DTensor. They may also wait in other groups, of which
    a member is missing: then all ranks are assumed.
    """
    waiting = [a for a in actors if a.rank is not None and a.activity.op == "wait_tensor"]
    ranks = {a.rank for a in waiting}
    known = [g for a in waiting for g in a.process.inside.groups if a.rank in g.members and g.name != "world"]
    entered = {(a.rank, a.activity.members) for a in actors}
    missing = [(rank, each.members) for each in known for rank in each.members if rank not in ranks]
    group = next((each for each in known if set(each.members) == ranks), None)
    with_all = any(a.activity.kind == "collective" and a.activity.group == "world" for a in actors if a not in waiting)
    if group is None or with_all or not entered.issuperset(missing):
        return actors
    name = f"{group.name} of ranks {list(group.members)}"
    found = {a.pid: replace(a.activity, group=name, members=group.members) for a in waiting}
    return [replace(a, activity=found.get(a.pid, a.activity)) for a in actors]


def _without_shared_thread(actor: Actor, actors: Sequence[Actor], sources: Mapping[str, str]) -> Actor:
    """Return a rank with its main thread's wait, not that of a sleeping thread that ranks in a collective have, too.

    These ranks have come further in spite of that thread, so it holds up nobody.
    """
    act = actor.activity
    if actor.rank is None or act.kind != "sleep" or act.task or not actor.threads or act is actor.threads[0]:
        return actor
    loop = outermost_loop(sources.get(act.file, ""), act.line)
    inside = [a for a in actors if a.rank is not None and a.threads and a.threads[0].kind in DISTRIBUTED]
    places = {(each.thread, each.file, each.line) for a in inside for each in a.threads[1:]}
    shared = (act.thread, act.file, act.line) in places
    return replace(actor, activity=actor.threads[0]) if shared and goes_on_forever(loop) else actor


def _without_idle_readers(every: list[Activity], process: Process, snapshot: Snapshot) -> list[Activity]:
    """Return the activities of a server, without those of threads that only wait for a client's next request.

    A thread only does that if nobody waits at the other end of its connection. All activities are returned if none of
    the rest is in the user's code: then no other thread can owe an answer.
    """
    used = {own for each in snapshot.processes for _, own, _ in each.awaits}
    idle = {end for each in snapshot.processes for end in each.ends if end.startswith("socket:")} - used
    readers = {thread for thread, _, other in process.awaits if other in idle and process.listens}
    names = {thread.name for thread in process.threads if thread.os_id in readers}
    kept = [each for each in every[1:] if each.thread not in names or each.task]
    return [*every[:1], *kept] if any(each.of_user for each in kept) else every


def _idles_forever(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a thread or task sleeps, or waits for its next job, in a loop that never ends."""
    return one.kind in ("sleep", "queue") and goes_on_forever(outermost_loop(sources.get(one.file, ""), one.line))


def _is_bystander(one: Activity, every: Sequence[Activity], sources: Mapping[str, str]) -> bool:
    """Return whether a thread or task idles, serves or only reads, while others have waits that it could not end."""
    text = sources.get(one.file, "")
    loop, function = outermost_loop(text, one.line), enclosing_function(text, one.line)
    serves = "serve_forever(" in one.text or one.op.endswith("accept")
    gives = any(node.value for node in nodes_in((ast.Return, ast.Yield), function))
    serves = serves or (one.kind in ("process", "pipe") and loop is not None and not gives)
    if not serves and not _idles_forever(one, sources):
        return False
    others = (each for each in every if each is not one and each.target and each.kind in ("queue", "condition"))
    waits = {(each.kind, each.target) for each in others}
    return bool(waits) and not ends_one_of(text, one.line, waits)


def effective(every: Sequence[Activity], sources: Mapping[str, str]) -> Activity:
    """Return the activity that decides: that of a thread or task of the user's if the main thread only waits for it."""
    main = every[0] if every else Activity(kind="unknown")
    # Connections that it has accepted have threads of their own, and so have the requests to a server of gRPC.
    accepts = main.op.endswith("accept") or "wait_for_termination(" in main.text
    keeps_alive = main.heartbeat or main.op.endswith("pause")  # it has left all work to threads
    waits_inside = main.kind in WAITS_INSIDE or accepts or keeps_alive
    if not waits_inside or main.cleanup == "destroy" or main.blocks_loop or main.op == "_shutdown":
        return main
    others = _that_may_decide(every, accepts or keeps_alive, sources)
    blocked = _by_priority(others, main)
    if not blocked:
        return main
    first = blocked[0]
    # queue.join() waits until all jobs are done: a worker that waits for its next job is not the reason.
    if main.op == "join" and main.kind == "condition":
        return main if first.kind == "queue" else first
    # A thread in the same kind of wait explains nothing, unless it runs the job whose result is awaited, is a task, or
    # blocks the event loop that should bring the result, perhaps until a job of a pool is done.
    if first.kind == main.kind in ("future", "pool"):
        working = [each for each in others if each.is_job and each.kind not in ("future", "pool", "queue")]
        blocking = [first] if first.blocks_loop else []
        waiting = [each for each in blocked if each.is_job and each.kind == main.kind]
        return [*working, *blocking, *waiting, main][0]
    return main if first.kind == main.kind and not first.task and not accepts else first


def _that_may_decide(every: Sequence[Activity], accepts: bool, sources: Mapping[str, str]) -> list[Activity]:
    """Return the threads and tasks of the user's whose waits may explain that of the main thread, which is the first.

    `accepts` says that the main thread accepts connections or requests, for which other threads work, or only sleeps.
    """
    others = [each for each in every[1:] if each.of_user]
    if accepts:  # one that idles forever beside it owes no client an answer
        others = [each for each in others if not each.periodic and not _idles_forever(each, sources)]
    kept = [each for each in others if not _is_bystander(each, every, sources)]
    if kept or every[0].kind in ("queue", "condition"):  # otherwise it only joins or awaits them: one of them decides
        others = kept
    if every[0].kind == "future":  # an idle event loop brings no result, but does not keep it back either
        others = [each for each in others if not (each.kind == "select" and each.idle_loop)]
        # Nor does one that hands out results as they come: none has come.
        others = [each for each in others if not (each.dispatches and _idles_forever(each, sources))]
    # A task that waits for its future says more than one that sets the results of others' futures.
    if any(each.kind == "future" and not each.dispatches for each in others):
        others = [each for each in others if not each.dispatches]
    return others


def _by_priority(others: Sequence[Activity], main: Activity) -> list[Activity]:
    """Return the threads and tasks that may keep the main thread waiting, the likeliest first."""
    blocked = [each for each in others if each.blocks_loop]
    for kind in WORKER_PRIORITY:
        blocked += [each for each in others if each.kind == kind and each not in blocked and not each.heartbeat]
    return blocked + [each for each in others if each.heartbeat and main.kind in ("select", "tasks")]
