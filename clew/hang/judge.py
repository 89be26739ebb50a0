"""Judges a snapshot: who waits for whom, whose fault it is, and how sure that is. No process is asked anything."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from clew.hang.activity import Activity, activities
from clew.hang.collect import installed
from clew.hang.graph import sinks
from clew.hang.observed import Process, Snapshot
from clew.hang.progress import cpu_share, moved_counters, moves, recent, refusing

DISTRIBUTED = ("collective", "send", "recv", "init", "new_group", "destroy", "store")
LOCAL = {
    "sleep": ("missing rank", "sleeps"),
    "lock": ("lock or I/O", "waits for a lock"),
    "file": ("lock or I/O", "waits for a file"),
    "network": ("external wait", "waits for the network"),
    "http": ("external wait", "waits for an HTTP server"),
    "pipe": ("external wait", "reads from a pipe"),
    "stdin": ("stopped", "waits at a breakpoint or for input"),
    "process": ("external wait", "waits for another process"),
    "queue": ("rollout blocked", "waits for an item in a queue"),
    "queue_full": ("rollout blocked", "waits for room in a full queue"),
    "condition": ("rollout blocked", "waits for a condition that nobody signals"),
    "future": ("rollout blocked", "waits for a result"),
    "pool": ("rollout blocked", "waits for a worker pool"),
    "thread": ("rollout blocked", "waits for a thread"),
    "select": ("rollout blocked", "has an event loop with nothing to do"),
    "data_loader": ("data loading", "waits for its data loader"),
    "compute": ("cpu", "computes"),
    "store": ("missing rank", "waits for a key of the store"),
    "unknown": ("undetermined", "does something that its stack does not show"),
}
"""Pattern and words for each kind of activity of a process that others wait for."""
SOUND = ("healthy", "slow")
TO_OTHERS = (
    "queue",
    "queue_full",
    "pipe",
    "http",
    "network",
    "condition",
    "future",
    "pool",
    "process",
    "thread",
    "data_loader",
    "select",
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of judging one job."""

    pattern: str
    ranks: tuple[int, ...] = ()
    """Ranks at fault."""
    pids: tuple[int, ...] = ()
    """Processes at fault."""
    sites: tuple[str, ...] = ()
    """Call sites, as file:line, of the processes at fault."""
    cause: str = ""
    explanation: str = ""
    evidence: tuple[str, ...] = ()
    runner_up: str = ""
    confidence: str = "high"
    structural: bool = False
    """True if nothing outside could end the wait, so that longer watching cannot change the verdict."""
    next: str = ""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 0 if nothing is wrong, 1 after a diagnosed hang, 3 if nothing could be decided."""
        return 0 if self.pattern in SOUND else 3 if self.pattern == "undetermined" else 1


@dataclass(frozen=True, kw_only=True)
class Actor:
    """One process, with what it is doing."""

    process: Process
    activity: Activity
    threads: tuple[Activity, ...] = ()
    moving: bool = False
    role: str = "other"
    """rank, launcher, loader (a DataLoader's worker), idle (Python's own helpers) or other."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def rank(self) -> int | None:
        return self.process.rank if self.role == "rank" else None

    @property
    def dead(self) -> bool:
        return self.process.last.state in "ZX" or bool(self.process.exit)

    @property
    def stopped(self) -> bool:
        return self.process.last.state in "Tt"

    @property
    def says(self) -> str:
        """Return what the process does, in words."""
        one = self.activity
        if self.dead:
            return f"{self.process.label} has ended {self.process.exit}".rstrip()
        if self.stopped:
            return f"{self.process.label} is stopped"
        what = (
            f"is in {one.op} of group {one.group}"
            if one.kind in ("collective", "send", "recv")
            else (f"is in {one.op}" if one.kind in DISTRIBUTED else LOCAL[one.kind][1])
        )
        return f"{self.process.label} {what}" + (f" at {one.site}: {one.text}" if one.site else "")


RANK_NAMES = ("rank", "global_rank", "world_rank", "my_rank", "local_rank", "rank_id", "RANK")
WORLD_NAMES = ("world_size", "world", "nprocs", "num_ranks", "n_ranks", "WORLD_SIZE")


def local_integer(process: Process, names: Sequence[str]) -> int | None:
    """Return the first of these local variables that the main thread's frames have, the outermost frame first."""
    for thread in sorted(process.threads, key=lambda each: each.os_id != process.pid)[:1]:
        for name in names:
            for frame in reversed(thread.frames):
                if frame.locals.get(name, "").isdigit():
                    return int(frame.locals[name])
        for frame in thread.frames:
            if frame.name == "_wrap" and "multiprocessing/spawn" in frame.file and frame.locals.get("i", "").isdigit():
                return int(frame.locals["i"])
    return None


def _in_torch_distributed(process: Process) -> bool:
    return any(
        "torch/distributed/" in f.file
        or "Work" in " ".join(f.locals.values())
        or "ProcessGroup" in " ".join(f.locals.values())
        for t in process.threads
        for f in t.frames
    )


def with_ranks(processes: Sequence[Process], sources: Mapping[str, str]) -> list[tuple[Process, str]]:
    """Return the processes with their ranks and roles. A rank may be in the environment or only in a local variable."""
    by_pid = {process.pid: process for process in processes}
    uses = any("distributed" in text for text in sources.values())
    found = []
    for process in processes:
        command = " ".join(process.command)
        parent = by_pid.get(process.parent)
        files = [frame.file for thread in process.threads for frame in thread.frames]
        role, rank = "other", None
        if any(
            word in command for word in ("resource_tracker", "forkserver import main", "torch/_inductor/compile_worker")
        ):
            role = "idle"
        elif (
            re.search(r"torch\.distributed\.(run|launch)|torchrun|accelerate.*launch", command) and process.rank is None
        ):
            role = "launcher"
        elif any(file.endswith("torch/utils/data/_utils/worker.py") for file in files):
            role = "loader"
        elif process.rank is not None:
            inherited = parent is not None and parent.rank == process.rank and parent.threads
            other_python = inherited and parent is not None
            role, rank = ("other", None) if other_python else ("rank", process.rank)
        elif uses and (number := local_integer(process, RANK_NAMES)) is not None:
            role, rank = "rank", number
        elif (
            not (process.threads or process.exit)
            and process.last.state not in "ZXTtD"
            and not re.search(r"python", command)
        ):
            role = "idle"
        found.append((replace(process, rank=rank), role))
    taken = Counter(process.rank for process, role in found if role == "rank")
    if any(count > 1 for count in taken.values()):  # local_rank of several nodes, or not a rank at all
        environment = {process.pid for process in processes if process.rank is not None}
        found = [
            (p, r) if r != "rank" or p.pid in environment or taken[p.rank] == 1 else (replace(p, rank=None), "other")
            for p, r in found
        ]
    return found


def actors_of(snapshot: Snapshot) -> list[Actor]:
    """Return the processes of a snapshot with role, activity and progress."""
    found, world = [], world_of(snapshot)
    for process, role in with_ranks(snapshot.processes, snapshot.sources):
        every = activities(process, snapshot.sources, world)
        activity = effective(every)
        moving = moves(process, snapshot.sources, world)
        found.append(Actor(process=process, activity=activity, threads=tuple(every), moving=moving, role=role))
    return found


def world_of(snapshot: Snapshot) -> int | None:
    """Return how many ranks the job should have, as far as the launcher, environment or locals say."""
    if snapshot.world:
        return snapshot.world
    said = [each.world for each in snapshot.processes if each.world]
    said += [n for each in snapshot.processes if (n := local_integer(each, WORLD_NAMES)) is not None]
    return Counter(said).most_common(1)[0][0] if said else None


WORKER_PRIORITY = (
    "stdin",
    "lock",
    "http",
    "network",
    "file",
    "queue_full",
    "sleep",
    "process",
    "pipe",
    "compute",
    "select",
    "queue",
    "condition",
)


def effective(every: Sequence[Activity]) -> Activity:
    """Return the activity that decides: that of another thread of the user's if the main thread only waits for it."""
    if not every:
        return Activity(kind="unknown")
    main = every[0]
    if (
        main.kind not in ("queue", "condition", "thread", "future", "pool", "queue_full", "select")
        or main.cleanup == "destroy"
    ):
        return main
    others = [each for each in every[1:] if each.file and not installed(each.file) and each.kind != "unknown"]
    blocked = [each for each in others if each.in_loop and not each.idle_loop]
    for kind in WORKER_PRIORITY:
        blocked += [each for each in others if each.kind == kind and each not in blocked]
    return blocked[0] if blocked else main


def judge(snapshot: Snapshot) -> Verdict:
    """Return the verdict about a snapshot, in the order: coverage, progress, initialisation, cleanup, graph, cause."""
    actors = actors_of(snapshot)
    live = [actor for actor in actors if actor.role not in ("launcher", "idle")]
    ranks = [actor for actor in live if actor.rank is not None]
    world = world_of(snapshot)
    there = {a.rank for a in ranks if not a.dead} | snapshot.alike | set(snapshot.unseen)
    missing = sorted(set(range(world)) - there) if world and ranks else []
    if not [actor for actor in live if actor.threads or actor.dead or actor.stopped]:
        why = "No stack could be read, so nothing can be said about this job."
        return _hedged(Verdict(pattern="undetermined", confidence="none", explanation=why), snapshot, live)
    verdict = (
        _stopped(live)
        or _progress(live, ranks, snapshot)
        or _missing(ranks, missing)
        or _initialisation(ranks)
        or _by_graph(live, ranks, snapshot)
    )
    return _hedged(verdict, snapshot, live)


def _hedged(verdict: Verdict, snapshot: Snapshot, live: list[Actor]) -> Verdict:
    unread = [a for a in live if not a.threads and not a.dead and not a.stopped]
    notes = [*snapshot.notes, *(f"{a.process.label} could not be read: {a.process.last.error}" for a in unread)]
    lower = unread and verdict.confidence == "high" and verdict.pattern not in SOUND
    return replace(verdict, notes=tuple(notes), confidence="medium" if lower else verdict.confidence)


def _verdict(pattern: str, culprits: Sequence[Actor], why: str, others: Sequence[Actor] = (), **more) -> Verdict:
    return Verdict(
        pattern=pattern,
        ranks=tuple(sorted({a.rank for a in culprits if a.rank is not None})),
        pids=tuple(sorted(a.pid for a in culprits)),
        sites=tuple(sorted({a.activity.site for a in culprits if a.activity.site})),
        explanation=why,
        evidence=tuple(a.says for a in [*culprits, *(o for o in others if o not in culprits)])[:12],
        **more,
    )


def _stopped(live: list[Actor]) -> Verdict | None:
    stopped = [actor for actor in live if actor.stopped]
    if not stopped or any(a.moving and a.rank is not None for a in live):
        return None
    names = ", ".join(a.process.label for a in stopped)
    how = "by a debugger" if all(a.process.last.state == "t" for a in stopped) else "by a signal (SIGSTOP or SIGTSTP)"
    return _verdict(
        "stopped", stopped, f"{names} is stopped {how}. The others wait for it.", live, cause="stopped",
        structural=True, next=f"kill -CONT {' '.join(str(a.pid) for a in stopped)}",
    )  # fmt: skip


def _progress(live: list[Actor], ranks: list[Actor], snapshot: Snapshot) -> Verdict | None:
    """Return healthy or slow if those that the job is about move; None if they do not."""
    parents = {a.process.parent for a in live}
    mains = (
        ranks
        or [a for a in live if not _is_server(a) and a.role == "other" and a.pid in parents]
        or [a for a in live if not _is_server(a) and a.role == "other"]
        or live
    )
    waiting = [a for a in mains if a.activity.kind in ("collective", "recv", "send")]
    moving = [a for a in mains if a.moving]
    if any(a.dead for a in mains):
        return None
    loops = [a for a in mains if _wakes(a)]
    if loops and len(loops) == len(mains):
        busy = [a for a in loops if cpu_share(a.process) > 0.02 or a.process.last.written > a.process.looks[0].written]
        if busy:
            return _verdict("healthy", [], "The event loop runs: it works or writes.", mains, confidence="medium")
        why = "The event loop is woken up, but coroutines that wait cannot be seen from outside: it may only poll."
        return _verdict("undetermined", [], why, mains, confidence="low")
    if not moving:
        return None
    if waiting and not [a for a in waiting if a.moving] and len(waiting) < len(mains):
        slow = [a for a in moving if a not in waiting]
        pace = _pace(slow[0].process, snapshot) if slow else ""
        refused = [a for a in slow if refusing(a.process, snapshot.sources)]
        if slow and not refused:
            names = ", ".join(a.process.label for a in slow)
            return _verdict(
                "slow", slow, f"{names} is slow, not hung{pace}; the others wait for it.", mains, cause="slow"
            )
        return None
    if len(mains) > 1 and not ranks and len(moving) < len(mains):
        return None if not _all_fine(mains) else _verdict("healthy", [], "The processes move.", mains)
    still = [a for a in mains if not a.moving and a.activity.kind not in (*DISTRIBUTED, "compute")]
    if still and not waiting and len(still) == len(mains) - len(moving) and not ranks:
        return None
    if any(refusing(a.process, snapshot.sources) for a in moving) and len(mains) == 1:
        return None
    pace = _pace(moving[0].process, snapshot)
    return _verdict("healthy", [], f"The job moves{pace}.", mains)


def _wakes(actor: Actor) -> bool:
    """Return whether an idle event loop is woken up now and then: a timer may be all that runs, or the work itself."""
    looks = recent(actor.process).looks
    return actor.activity.idle_loop and len(looks) > 1 and looks[-1].switches - looks[0].switches >= 2


def _all_fine(mains: list[Actor]) -> bool:
    return all(a.moving or a.activity.kind in ("queue", "select", "condition", "pipe") for a in mains)


def _pace(process: Process, snapshot: Snapshot) -> str:
    seconds = process.last.at - process.looks[0].at if process.looks else 0.0
    for name, (first, last) in sorted(moved_counters(process, snapshot.sources).items()):
        if seconds > 0 and last > first:
            return f": {name.rpartition(':')[2].rpartition('.')[2]} went from {first} to {last} in {seconds:.1f} s"
    return ""


def _is_server(actor: Actor) -> bool:
    return bool(actor.process.listens) and actor.activity.kind in ("select", "network", "http")


def _missing(ranks: list[Actor], missing: list[int]) -> Verdict | None:
    alive = [a for a in ranks if not a.dead]
    dead = [a for a in ranks if a.dead]
    blocked = [a for a in alive if a.activity.kind in DISTRIBUTED]
    if not missing or not blocked:
        return None
    names = ", ".join(map(str, missing))
    first = blocked[0].activity
    starting = all(a.activity.kind == "init" for a in blocked)
    pattern = "initialisation" if starting and not dead else "dead"
    what = "never joined" if pattern == "initialisation" else "has ended"
    why = (
        f"Rank {names} {what}: there is no such process. The other ranks wait for it in {first.op} at "
        f"{first.site}, and will wait until their timeout."
    )
    found = _verdict(pattern, dead, why, blocked, cause="dead", structural=True)
    return replace(found, ranks=tuple(missing), next="Read the end of that rank's log: it says why the rank ended.")


def _initialisation(ranks: list[Actor]) -> Verdict | None:
    for kind, words in (("init", "init_process_group"), ("new_group", "new_group")):
        inside = [a for a in ranks if a.activity.kind == kind]
        outside = [a for a in ranks if a.activity.kind != kind and not a.dead]
        if inside and outside:
            names = ", ".join(str(a.rank) for a in outside)
            why = (
                f"Ranks {_names(inside)} are in {words}, which every rank has to call. Rank {names} is elsewhere: "
                f"{outside[0].says}."
            )
            return _verdict("initialisation", outside, why, inside, structural=outside[0].activity.kind in DISTRIBUTED)
        if inside and len(inside) == len(ranks) and len(ranks) > 1:
            sites = {a.activity.site for a in inside}
            why = f"All ranks are in {words} and none proceeds: they may use different addresses, ports or world sizes."
            return _verdict("initialisation", [] if len(sites) == 1 else inside, why, inside, confidence="low")
    return None


def _names(actors: Sequence[Actor]) -> str:
    from clew.hang.classes import ranges

    return ranges([a.rank for a in actors if a.rank is not None])


def _key(one: Activity) -> tuple[str, tuple[int, ...] | None]:
    return one.group, one.members


def collective_edges(ranks: Sequence[Actor]) -> dict[int, set[int]]:
    """Return which ranks each rank waits for in collectives and point-to-point operations, as pids."""
    by_rank = {a.rank: a for a in ranks}
    edges: dict[int, set[int]] = {}
    for actor in ranks:
        one = actor.activity
        if one.kind in ("send", "recv"):
            edges[actor.pid] = {by_rank[peer].pid for peer in one.peers if peer in by_rank}
        elif one.kind in ("collective", "destroy"):
            present = {
                a.pid
                for a in ranks
                if a.activity.kind == one.kind and _key(a.activity) == _key(one) and a.activity.op == one.op
            }
            if one.members is not None:
                members = {a.pid for a in ranks if a.rank in one.members}
            elif one.group == "world" or len(ranks) == 2:
                members = {a.pid for a in ranks}
            else:
                # The source does not say who belongs to it: those that are in no operation of a group are suspects.
                away = {a.pid for a in ranks if a.activity.kind not in DISTRIBUTED}
                members = present | (away or {a.pid for a in ranks})
            edges[actor.pid] = members - present
    return edges


def application_edges(live: Sequence[Actor]) -> dict[int, set[int]]:
    """Return which processes could end each process's application wait, as pids."""
    listening = {port: a for a in live for port in a.process.listens}
    edges: dict[int, set[int]] = defaultdict(set)
    for actor in live:
        one = actor.activity
        if one.kind not in (*TO_OTHERS, "sleep"):
            continue
        servers = {listening[port].pid for port in actor.process.peers if port in listening} - {actor.pid}
        children = {a.pid for a in live if a.process.parent == actor.pid and a.rank is None}
        piped = {
            a.pid
            for a in live
            if a.pid != actor.pid and a.rank is None and set(a.process.pipes) & set(actor.process.pipes)
        }
        if one.kind in ("http", "network", "select") and servers:
            edges[actor.pid] |= servers
        elif one.kind == "data_loader":
            edges[actor.pid] |= {a.pid for a in live if a.role == "loader" and a.process.parent == actor.pid}
        elif one.kind in ("queue", "queue_full", "pipe", "process", "condition", "pool", "future"):
            same_process = one.kind in ("condition",) and not children
            edges[actor.pid] |= set() if same_process else children or piped
        elif one.kind == "sleep" and actor.rank is None:
            edges[actor.pid] |= set(children)
    return edges


def _by_graph(live: list[Actor], ranks: list[Actor], snapshot: Snapshot) -> Verdict:
    by_pid = {a.pid: a for a in live}
    edges = collective_edges(ranks)
    if (
        edges
        and not any(edges.values())
        and len([a for a in ranks if a.activity.kind == "collective"]) == len(ranks) > 1
    ):
        return _everywhere(ranks)
    for pid, targets in application_edges(live).items():
        edges[pid] = edges.get(pid, set()) | targets
    for actor in live:
        edges.setdefault(actor.pid, set())
    ends = sinks(edges)
    waited = {pid for targets in edges.values() for pid in targets}
    # A process for which nobody waits and that waits for nobody is no part of the hang, unless it is alone.
    candidates = [end for end in ends if len(end) > 1 or end & waited] or ends
    moving_only = [end for end in candidates if not all(by_pid[p].moving for p in end)]
    component = _most_waited(moving_only or candidates, edges)
    culprits = [by_pid[pid] for pid in sorted(component)]
    waiters = [a for a in live if a not in culprits]
    if len(culprits) > 1 and all(a.rank is not None for a in culprits):
        return _cycle(culprits, waiters, ranks)
    return _local(culprits, waiters, snapshot, live)


def _most_waited(candidates: list[set[int]], edges: Mapping[int, set[int]]) -> set[int]:
    from clew.hang.graph import reachable

    def waiters(component: set[int]) -> int:
        return sum(bool(reachable(pid, edges) & component) for pid in edges)

    return max(candidates, key=lambda each: (waiters(each), -min(each)))


def _everywhere(ranks: list[Actor]) -> Verdict:
    first = ranks[0].activity
    drift = _drifted(ranks)
    if drift is not None:
        name, odd, values = drift
        why = (
            f"All ranks are in {first.op} of group {first.group}, but not in the same call of it: {name} is {values}. "
            f"Rank {_names(odd)} made a different number of calls."
        )
        return _verdict("collective mismatch", odd, why, ranks, structural=True, confidence="medium")
    why = (
        f"All {len(ranks)} ranks are in {first.op} of group {first.group} and it does not end. The cause is below "
        "Python: the network, a device that stands still, or shapes that differ."
    )
    return _verdict("same collective everywhere", [], why, ranks, confidence="medium")


def _drifted(ranks: list[Actor]) -> tuple[str, list[Actor], str] | None:
    """Return the loop counter whose values differ between ranks, and the ranks of the rarer value."""
    names = set.intersection(*(set(a.activity.counters) for a in ranks)) if ranks else set()
    for name in sorted(names):
        if re.search(r"\.(\w*step\w*|it|iter\w*|i|n|epoch|batch\w*|micro\w*|idx|index)$", name):
            values = Counter(a.activity.counters[name] for a in ranks)
            if len(values) > 1:
                common = values.most_common(1)[0]
                odd = [a for a in ranks if a.activity.counters[name] != common[0]] if common[1] > 1 else ranks
                said = ", ".join(f"{a.activity.counters[name]} on rank {a.rank}" for a in ranks[:6])
                return name.rpartition(".")[2], odd, said
    return None


def _cycle(culprits: list[Actor], waiters: list[Actor], ranks: list[Actor]) -> Verdict:
    kinds = {a.activity.kind for a in culprits}
    keys = {_key(a.activity) for a in culprits}
    told = " ".join(f"{a.says}." for a in culprits[:4])
    cleaning = [a for a in culprits if a.activity.cleanup or a.activity.kind == "destroy"]
    if cleaning and len(cleaning) < len(culprits):
        one = cleaning[0].activity
        why = (
            f"Rank {_names(cleaning)} is cleaning up (in {one.cleanup}) while the others still train. An exception may "
            f"be hidden there: it is shown only after the cleanup ends, and that waits. {told}"
        )
        return _verdict("cleanup deadlock", cleaning, why, waiters + culprits, structural=True)
    if kinds <= {"send", "recv"}:
        why = f"Ranks {_names(culprits)} wait for one another in send and recv, so none of them proceeds. {told}"
        return _verdict("send/receive cycle", culprits, why, waiters, structural=True)
    if kinds & {"send", "recv"}:
        why = (
            "One side expects a message that the other does not send (or the reverse): the other side has gone on to "
            f"another operation. The numbers of micro-batches may differ. {told}"
        )
        return _verdict("pipeline micro-batch mismatch", culprits, why, waiters, structural=True)
    if len(keys) > 1 and not _one_deviates(culprits):
        why = f"The ranks call collectives of different groups in different order, and wait for one another. {told}"
        return _verdict("crossed groups", culprits, why, waiters, structural=True)
    odd = _deviating(culprits)
    why = f"The ranks are in different collectives, which can never meet. {told}"
    return _verdict("collective mismatch", odd, why, culprits + waiters, structural=True)


def _one_deviates(culprits: list[Actor]) -> bool:
    counts = Counter((_key(a.activity), a.activity.op) for a in culprits)
    return len(culprits) > 2 and len(counts) == 2 and min(counts.values()) == 1 and len(culprits) > 3


def _deviating(culprits: list[Actor]) -> list[Actor]:
    """Return the ranks that left the common path: those on a branch of their own, or the rarer operation."""
    alone = [a for a in culprits if a.activity.branch == "alone"]
    if alone and len(alone) <= len(culprits) / 2:
        return alone
    counts = Counter((a.activity.op, a.activity.group) for a in culprits).most_common()
    if counts[0][1] > (counts[1][1] if len(counts) > 1 else 0):
        return [a for a in culprits if (a.activity.op, a.activity.group) != counts[0][0]]
    side = [a for a in culprits if a.activity.branch == "side"]
    return side if len(side) == 1 and len(culprits) > 2 else culprits


def _local(culprits: list[Actor], waiters: list[Actor], snapshot: Snapshot, live: list[Actor]) -> Verdict:
    """Return the verdict about processes that others wait for and that wait for no process that was seen."""
    one = culprits[0]
    act = one.activity
    several = f" It and {len(culprits) - 1} more wait for one another." if len(culprits) > 1 else ""
    ranked = [a for a in waiters if a.rank is not None and a.activity.kind in DISTRIBUTED]
    if one.dead:
        why = f"{one.process.label} has ended, and others still wait for it."
        return _verdict("dead", culprits, why, waiters, cause="dead", structural=True)
    dead = [a for a in live if a.dead and a.role != "idle"]
    if dead and act.kind in (*TO_OTHERS, "sleep"):
        why = f"{dead[0].process.label} has ended, so nothing can end the wait of {one.says}."
        return _verdict("dead", dead, why, culprits + waiters, cause="dead", structural=True)
    if one.process.waits:
        return _clew_wait(one, waiters)
    if (name := next((n for a in live if (n := refusing(a.process, snapshot.sources))), "")) and not act.in_loop:
        by = next(a for a in live if refusing(a.process, snapshot.sources))
        why = f"{by.process.label} rejects everything: {name} grows and nothing is accepted, so the wait can never end."
        return _verdict("rollout blocked", [by], why, waiters, cause="refusing", confidence="medium")
    if act.in_loop and not act.idle_loop and act.kind != "unknown":
        why = (
            f"The event loop of {one.process.label} is blocked at {act.site} ({act.text}): no coroutine on it can run."
        )
        return _verdict("event loop blocked", culprits, why, waiters, cause="event loop blocked")
    if one.moving:
        why = f"{one.process.label} moves, but slowly{_pace(one.process, snapshot)}; others wait for it."
        return _verdict("slow", culprits, why, waiters, cause="slow", confidence="medium")
    if act.kind in DISTRIBUTED and not ranked and len(live) > 1 and act.kind in ("collective", "recv", "send"):
        return _verdict(
            "undetermined", [], f"Nothing that was seen explains the wait: {one.says}.", waiters, confidence="low"
        )
    if act.kind == "store":
        others = [a for a in live if a.rank is not None and a not in culprits]
        why = f"{one.says}: no other rank sets this key."
        return _verdict("missing rank", others or culprits, why, culprits, confidence="low")
    if act.kind == "unknown" or act.kind not in LOCAL:
        return _verdict(
            "undetermined",
            [],
            f"The stack of {one.process.label} does not say what it waits for.",
            live,
            confidence="low",
        )
    pattern, words = LOCAL[act.kind]
    if one.role == "loader" and act.kind != "compute":
        pattern = "data loading"
    if one.role == "loader":
        rank = next((a for a in live if a.pid == one.process.parent), one)
        why = f"A worker of the data loader of {rank.process.label} {words} at {act.site}: {act.text}"
        found = _verdict("data loading", [rank], why, [*culprits, *waiters])
        return replace(
            found, sites=tuple(sorted({act.site, *found.sites})), pids=(rank.pid, *(c.pid for c in culprits))
        )
    if act.kind == "compute":
        share = cpu_share(one.process)
        if share < 0.05:
            return _verdict("undetermined", [], f"{one.says}, but uses no CPU time.", live, confidence="low")
        pattern = "cpu" if ranked or len(live) > 1 else "undetermined"
        words = f"has computed for the {snapshot.seconds:.0f} s of watching ({share:.0%} of a core)"
    if act.kind == "sleep" and not ranked:
        pattern = "external wait"
    if act.kind == "sleep" and re.search(r"exists|is_file|isfile|glob|stat\(", _loop_text(act, snapshot)):
        pattern, words = "external wait", "polls for a file that does not appear"
    why = f"{one.process.label} {words} at {act.site}: {act.text}.{several}"
    if ranked:
        why += f" Ranks {_names(ranked)} wait for it in {ranked[0].activity.op}."
    confidence = "high" if ranked and act.kind not in ("compute",) else "medium"
    return _verdict(pattern, culprits, why, waiters, confidence=confidence, cause=act.kind)


def _loop_text(act: Activity, snapshot: Snapshot) -> str:
    import ast

    from clew.hang.source import loop_at

    loop = loop_at(snapshot.sources.get(act.file, ""), act.line)
    return ast.unparse(loop) if loop is not None else ""


def _clew_wait(one: Actor, waiters: list[Actor]) -> Verdict:
    wait = one.process.waits[0]
    numbers = f" ({wait['numbers']})" if wait["numbers"] else ""
    why = f"{one.process.label} waits for {wait['what']}{numbers}; {wait['unblocks']} unblocks it."
    pattern = "rollout blocked" if "rollout" in wait["unblocks"] else "external wait"
    return _verdict(pattern, [one], why, waiters, confidence="medium")


def place_of(path: str) -> str:
    """Return the file name of a path."""
    return PurePath(path).name


__all__ = ["Actor", "Verdict", "actors_of", "field", "judge"]
