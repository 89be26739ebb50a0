"""Says which process waits for which: an edge leads from one that waits to one that could end its wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clew.hang import source
from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.locks import lockers, releasers
from clew.hang.observed import Process
from clew.hang.verdict import MESSAGES, Actor

CLIENT = re.compile(r"/(http|urllib|urllib3|requests|aiohttp|httpx|httpcore)/")
URL = re.compile(r"https?://[\w.\-]+:(\d{2,5})\b")
HOST = re.compile(r"(?:https?://)?[\w.\-]+:(\d{2,5})\b")
Edges = dict[int, set[int]]
TO_OTHERS = (
    "queue", "queue_full", "pipe", "http", "network", "condition", "signal", "future", "pool", "process", "thread",
    "data_loader", "select", "tasks", "rpc", "ray", "barrier",
)  # fmt: skip
"""Kinds of waits that another process may end."""
FROM_SOURCE = ("broadcast", "scatter")
"""Beginnings of the names of collectives in which one rank gives the others something."""
THROUGH_PIPES = ("queue", "queue_full", "pipe")
"""Kinds of waits for whoever is at the other end of a pipe or socket."""


def key_of(one: Activity) -> tuple[str, tuple[int, ...] | None]:
    """Return a key that is equal for all operations of one process group."""
    return one.group, one.members


def collective_edges(ranks: Sequence[Actor]) -> Edges:
    """Return which ranks each rank waits for in collectives and point-to-point operations, as pids."""
    by_rank = {a.rank: a for a in ranks}
    edges: Edges = {}
    for actor in ranks:
        one = actor.activity
        if one.kind in MESSAGES:
            # Which message is awaited may be unknown, as in a list of requests: any other rank may have to send it.
            others = {a.pid for a in ranks} - {actor.pid}
            edges[actor.pid] = {by_rank[peer].pid for peer in one.peers if peer in by_rank} or others
        elif one.kind in ("collective", "destroy"):
            absent = _members(one, ranks) - _present(one, ranks)
            # As long as the source has something else to do, it does not matter who else is absent.
            away = {a.pid for a in ranks if one.root == str(a.rank) and a.activity.kind not in DISTRIBUTED}
            edges[actor.pid] = (away & absent if one.op.startswith(FROM_SOURCE) else set()) or absent
        elif one.kind == "device":  # with NCCL the GPU waits for the others, and the host for the GPU
            edges[actor.pid] = {a.pid for a in ranks if a.activity.kind != "device"}
    return edges


def _present(one: Activity, ranks: Sequence[Actor]) -> set[int]:
    """Return the pids of the ranks that are in the same operation of the same group."""
    same = [a for a in ranks if (a.activity.kind, a.activity.op) == (one.kind, one.op)]
    return {a.pid for a in same if key_of(a.activity) == key_of(one)}


def _members(one: Activity, ranks: Sequence[Actor]) -> set[int]:
    if one.members is not None:
        return {a.pid for a in ranks if a.rank in one.members}
    if one.group == "world" or len(ranks) == 2:
        return {a.pid for a in ranks}
    # Nothing says who belongs to it: those that are in no operation of a group are suspects.
    away = {a.pid for a in ranks if a.activity.kind not in DISTRIBUTED}
    return _present(one, ranks) | (away or {a.pid for a in ranks})


def all_edges(job: Sequence[Actor], sources: Mapping[str, str]) -> Edges:
    """Return which processes could end each process's wait, for a lock, a collective or another one, as pids."""
    edges, collective = application_edges(job), collective_edges([actor for actor in job if actor.rank is not None])
    idle = {a.pid for a in job if a.rank is None and _only_reads_requests(a, sources)}
    for a in job:
        edges[a.pid] |= collective.get(a.pid, set()) | lockers(a, job, sources) | releasers(a, job, sources)
        if a.activity.kind not in ("http", "network", "pipe"):  # a server that awaits requests ends no other wait
            edges[a.pid] -= idle
    return edges


def application_edges(job: Sequence[Actor]) -> Edges:
    """Return which processes could end each process's application wait, as pids."""
    # A forked client has its parent's listening sockets, too, but it does not serve the port that it is connected to.
    own = {(a.pid, port) for a in job for port in a.process.listens}
    forked = {(a.pid, port) for a in job for port in a.process.peers if (a.process.parent, port) in own}
    servers = [(port, a) for a in job for port in a.process.listens if (a.pid, port) not in forked]
    # Peers are known by port alone: a server on the client's own host comes before one on another host.
    listening = {(host, port): a for port, a in servers for host in ("", a.process.host)}
    return {actor.pid: _could_end(actor, job, listening) - {actor.pid} for actor in job}


PROCESSES = {"clew serve": "server", "the inference engine": "server", "the trainer": "trainer"}
"""Roles of processes that end the waits which Clew reports, if the first word of their name is not the role."""


def _could_end(actor: Actor, job: Sequence[Actor], listening: Mapping[tuple[str, int], Actor]) -> set[int]:
    """Return the pids of the processes that could end the wait of `actor`.

    `listening` has the servers, by host ("" for any) and port.
    """
    process, pids = actor.process, set[int]()
    match actor.activity.kind:
        case "queue" | "queue_full" | "pipe" as kind:
            pids = at_other_end(actor, job) - _at_other_queues(actor, job)
            if kind == "pipe" and process.waits_in.endswith("pipe_write") and actor.rank is None:
                # A program's parent should read what it writes. One that only waits for the program to end never does.
                pids |= {a.pid for a in job if a.pid == process.parent and a.activity.kind in ("process", "tasks")}
        case "data_loader":
            pids = {a.pid for a in job if a.role == "loader" and a.process.parent == actor.pid}
        case "http" | "network" | "select" | "tasks":
            pids = _serving(actor, job, listening)
        case "rpc":  # ranks that run a remote call; if none does, as at shutdown, those that are in no rpc yet
            running = [a for a in job if a.activity.is_job] or [a for a in job if a.activity.kind != "rpc"]
            pids = {a.pid for a in running if a.rank is not None}
        case "ray":
            pids = _running_methods(actor, job)
        case "process":
            pids = _children(actor, job) or _users_of_pipe(actor, job)
        case "pool" | "future":
            pids = (_children(actor, job) or _piped(actor, job)) - _asking(actor, job)
        case "signal":
            siblings = [a for a in job if a is not actor and a.process.parent == process.parent]
            awake = {a.pid for a in siblings if a.activity.kind not in ("signal", "process")}
            pids = _children(actor, job) or awake
        case "sleep" if actor.rank is not None:  # it may ask whether a server that it has started is ready
            working = {a.pid for a in job if a.moving and a.role != "loader" and not a.activity.periodic}
            pids = _children(actor, job) & working
        case "store" if actor.rank is None:  # those that still start may set the key that it waits for
            pids = _children(actor, job) & {a.pid for a in job if a.moving}
        case "condition" | "sleep":
            pids = _children(actor, job) - _asking(actor, job)
    reported = {PROCESSES.get(wait["unblocks"], wait["unblocks"].partition(" ")[0]) for wait in process.waits}
    roles = {a.pid: a.process.name.partition("-")[0] for a in job}
    # A server reports waits for its own engine. Other processes wait for the server that they are connected to.
    reported -= {roles[actor.pid], "server" if pids else ""}
    return pids | {pid for pid, role in roles.items() if role in reported}


def reads_requests(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a thread or coroutine waits for requests: on a connection that it has accepted or was given."""
    text = sources.get(one.file, "")
    handler, loop = source.enclosing_function(text, one.line), source.outermost_loop(text, one.line)
    if handler is not None and re.search(rf"start_server\(\s*(\w+\.)*{one.function}\b", text):
        return one.target in {each.arg for each in handler.args.args}
    accepts = loop is not None and any(name.endswith("accept") for name in source.calls_of(loop))
    name = re.escape(one.target)
    accepted = re.search(rf"\b{name}\b.* = .*accept\(|accept\(.*\bas\b.*\b{name}\b", text) is not None
    return one.op == "serve_forever" or (accepts and accepted and one.kind in ("pipe", "network"))


def _only_reads_requests(actor: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether each thread and task of the user's in a server waits for requests."""
    own = [each for each in actor.threads if each.of_user and not each.idle_loop]
    serves = bool(own) or (bool(actor.process.listens) and any(each.task for each in actor.threads))
    return serves and all(reads_requests(each, sources) for each in own)


def _children(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of the children of a process that are not ranks."""
    return {a.pid for a in job if a.process.parent == actor.pid and a.rank is None}


def _running_methods(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of Ray's actors and tasks that run a method that this line calls; of all if none does."""
    others = [a for a in job if a is not actor and a.process.of_ray]
    called = re.findall(r"(\w+)\.remote\(", actor.activity.text)
    running = [a for a in others if re.split(r"::|\.", a.process.command[0].strip())[-1] in called]
    return {a.pid for a in running or others}


def _serving(actor: Actor, job: Sequence[Actor], listening: Mapping[tuple[str, int], Actor]) -> set[int]:
    """Return the pids of the processes that serve the connections of a client."""
    process = actor.process
    # A parent whose main thread joins this process serves it from another thread, which may be fine.
    joining = {a.pid for a in job if a.activity.kind == "process" and process.parent == a.pid}
    if users := _users(_known_ends(actor), actor, job) - joining:
        return users
    if actor.activity.kind == "http" and not process.peers:  # between two attempts it has no connection
        asked = ports_named(process)
        servers = [a for a in job if a is not actor and asked & set(a.process.listens)]
    else:
        peers = (listening.get((process.host, port)) or listening.get(("", port)) for port in process.peers)
        servers = [a for a in peers if a is not None]
    # A connection from a rank, or from its fork, to another rank is for their collectives: it is no request.
    if actor.rank is not None or any(a.pid == process.parent and a.rank is not None for a in job):
        servers = [a for a in servers if a.rank is None]
    return {a.pid for a in servers} - joining


def _users_of_pipe(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of the users of the pipe that a process reads; if that is not known, of all of its pipes."""
    ends = _known_ends(actor)
    return _users(ends, actor, job) - {a.pid for a in job if a.rank is not None} if ends else _piped(actor, job)


def ports_named(process: Process) -> set[int]:
    """Return the ports of the addresses that variables of a client name."""
    found = set[int]()
    for frame in (frame for thread in process.threads for frame in thread.frames):
        # Only a client's frames name hosts without a scheme for requests. Elsewhere it may be torch's own address.
        address = HOST if CLIENT.search(frame.file) else URL
        found |= {int(port) for text in frame.locals.values() for port in address.findall(text)}
    return found


def _asking(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of children that wait for this process, at a pipe or a port: they cannot end its other waits."""
    children = [a for a in job if a.process.parent == actor.pid and a.rank is None]
    unasked = {a.pid for a in children if a.process.listens and not a.process.peers and a.activity.kind == "select"}
    reading = {a.pid: at_other_end(a, job) for a in children if a.activity.kind in THROUGH_PIPES and _known_ends(a)}
    # Later forks have copies of the ends, but they wait for this process, too.
    kin = {actor.pid, *reading}
    return unasked | {pid for pid, others in reading.items() if actor.pid in others and others <= kin}


def at_other_end(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of the processes that can write what a process reads, or read what it writes.

    If its descriptor was not seen, these are its children, or else all that share any pipe with it.
    """
    process, children = actor.process, _children(actor, job)
    ends = {other for _, other in _awaited(actor)}
    joins = {a.pid for a in job if a.activity.kind in ("process", "thread")} - children  # these only join the rest
    if "" in ends:  # a socket whose peer is not known leads to kin, but not to those that only have pipes with it
        kin = [a for a in job if a is not actor and a.process.host == process.host and a.rank is None]
        kin = [a for a in kin if a.pid == process.parent or a.pid in children]
        users = {a.pid for a in kin if not set(process.pipes) & set(a.process.pipes)}
    else:
        users = _users(ends, actor, job)
    dead = {a.pid for a in job if a.dead and a.pid in children}
    if fills_alone(actor, job):
        return dead
    if not ends or not (users or actor.activity.kind == "pipe"):  # a manager may serve a queue
        return children or _piped(actor, job)
    return dead | users - joins


def fills_alone(actor: Actor, job: Sequence[Actor]) -> bool:
    """Return whether only a process itself could fill the queue that it reads: no other has an end of its pipe."""
    ends = {other for _, other in _awaited(actor)}
    alone = bool(ends) and ends <= {*actor.process.ends} and not _users(ends, actor, job)
    return actor.activity.kind == "queue" and alone


def _users(ends: set[str], actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of the other processes that have one of these ends open.

    A fork has copies of its parent's descriptors. If one of them is in a system call with the end, that is its user.
    """
    others = [a for a in job if a is not actor and a.process.host == actor.process.host]
    holders = [a for a in others if ends & set(a.process.ends)]
    users = [a for a in holders if ends & {own for own, _ in _awaited(a)}]
    return {a.pid for a in users or holders}


def surely_awaits(actor: Actor, job: Sequence[Actor]) -> bool:
    """Return whether the pipe or socket that a process reads or writes is known, and one process has its other end."""
    return bool(_known_ends(actor)) and len(at_other_end(actor, job)) == 1


def _awaited(actor: Actor) -> list[tuple[str, str]]:
    """Return both ends of the pipes and sockets that the thread of `actor.activity` uses; empty if not seen."""
    threads = {each.os_id for each in actor.process.threads if each.name == actor.activity.thread and not each.task}
    return [(own, other) for thread, own, other in actor.process.awaits if thread in threads]


def _known_ends(actor: Actor) -> set[str]:
    """Return the other ends of the pipes and sockets that a process uses, as far as they are known."""
    return {other for _, other in _awaited(actor) if other}


def _piped(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of the processes that share a pipe with this one: they can fill or empty its queues."""
    pipes = set(actor.process.pipes)
    here = [a for a in job if a is not actor and a.rank is None and a.process.host == actor.process.host]
    others = [a for a in here if pipes & set(a.process.pipes)]
    return {a.pid for a in others if a.activity.kind not in ("process", "thread")}  # not one that only joins the rest


def _at_other_queues(actor: Actor, job: Sequence[Actor]) -> set[int]:
    """Return the pids of the processes that wait for an item in another queue than the one of this process.

    A function that has both under their names shows that they are two. The names may come from any process of the job.
    """
    mine = actor.activity.target
    beside = [f.addresses for a in job for f in a.process.user_frames if mine in f.addresses]
    others = {name for each in beside for name in each if each[name] != each[mine]}
    return {a.pid for a in job if a.activity.kind == "queue" and a.activity.target in others}


def reachable(start: int, edges: Mapping[int, set[int]]) -> set[int]:
    """Return the nodes that can be reached from `start` along at least one edge."""
    found, waiting = set[int](), list(edges.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += edges.get(node, ())
    return found


def sinks(edges: Mapping[int, set[int]]) -> list[set[int]]:
    """Return the sink components: sets of nodes that reach one another and nothing else. There the waiting ends."""
    nodes = set(edges) | {node for targets in edges.values() for node in targets}
    reach = {node: reachable(node, edges) for node in nodes}
    found: list[set[int]] = []
    for node in sorted(nodes):
        component = {node} | {other for other in reach[node] if node in reach[other]}
        if component not in found and reach[node] <= component:
            found.append(component)
    return found
