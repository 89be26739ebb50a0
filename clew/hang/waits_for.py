"""Says which process waits for which: the edges of the graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from clew.hang.activity import Activity
from clew.hang.verdict import DISTRIBUTED, MESSAGES, Actor

Edges = dict[int, set[int]]
TO_OTHERS = (
    "queue", "queue_full", "pipe", "http", "network", "condition", "signal", "future", "pool", "process", "thread",
    "data_loader", "select", "tasks", "rpc",
)  # fmt: skip
"""Kinds of waits that another process may end."""


def key_of(one: Activity) -> tuple[str, tuple[int, ...] | None]:
    """Return what is equal for operations of one process group."""
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
            edges[actor.pid] = _members(one, ranks) - _present(one, ranks)
        elif one.kind == "device":  # with NCCL the GPU waits for the others, and the host for the GPU
            edges[actor.pid] = {a.pid for a in ranks if a.activity.kind != "device"}
    return edges


def _present(one: Activity, ranks: Sequence[Actor]) -> set[int]:
    """Return the pids of the ranks that are in the same operation of the same group."""
    return {
        a.pid
        for a in ranks
        if a.activity.kind == one.kind and key_of(a.activity) == key_of(one) and a.activity.op == one.op
    }


def _members(one: Activity, ranks: Sequence[Actor]) -> set[int]:
    if one.members is not None:
        return {a.pid for a in ranks if a.rank in one.members}
    if one.group == "world" or len(ranks) == 2:
        return {a.pid for a in ranks}
    # Nothing says who belongs to it: those that are in no operation of a group are suspects.
    away = {a.pid for a in ranks if a.activity.kind not in DISTRIBUTED}
    return _present(one, ranks) | (away or {a.pid for a in ranks})


def application_edges(live: Sequence[Actor]) -> Edges:
    """Return which processes could end each process's application wait, as pids."""
    listening = {port: a for a in live for port in a.process.listens}
    ranks = {a.pid for a in live if a.rank is not None}
    edges: Edges = defaultdict(set)
    for actor in live:
        named = {wait["unblocks"].partition(" ")[0] for wait in actor.process.waits}  # of Clew's own processes
        edges[actor.pid] |= {a.pid for a in live if a.process.name.partition("-")[0] in named} - {actor.pid}
        kind = actor.activity.kind
        if kind == "pipe" and actor.process.waits_in.endswith("pipe_write") and actor.rank is None:
            # What a program writes is read by its parent. One that only waits for the program's end never does.
            edges[actor.pid] |= {
                a.pid for a in live if a.pid == actor.process.parent and a.activity.kind in ("process", "tasks")
            }
        if kind == "file":
            edges[actor.pid] |= {a.pid for a in live if set(a.process.files) & set(actor.process.wants)} - {actor.pid}
        if kind not in (*TO_OTHERS, "sleep"):
            continue
        if kind == "rpc":  # for those that run a remote call; at the end, for those that still do something else
            serving = {a.pid for a in live if a.activity.is_job} or {a.pid for a in live if a.activity.kind != "rpc"}
            edges[actor.pid] |= serving & ranks - {actor.pid}
            continue
        children = {a.pid for a in live if a.process.parent == actor.pid and a.rank is None}
        asked = [listening[port] for port in actor.process.peers if port in listening]
        # Ranks, and what they fork, hold connections to other ranks for their collectives.
        kin = actor.pid in ranks or actor.process.parent in ranks
        servers = {a.pid for a in asked if not (kin and a.rank is not None)} - {actor.pid}
        if kind in ("http", "network", "select", "tasks") and servers:
            edges[actor.pid] |= servers
        elif kind == "data_loader":
            edges[actor.pid] |= {a.pid for a in live if a.role == "loader" and a.process.parent == actor.pid}
        elif kind in ("queue", "queue_full", "pipe", "process", "condition", "pool", "future"):
            edges[actor.pid] |= children or (set() if kind == "condition" else _piped(actor, live))
        elif kind == "signal":
            beside = [a for a in live if a is not actor and a.process.parent == actor.process.parent]
            edges[actor.pid] |= children or {a.pid for a in beside if a.activity.kind not in ("signal", "process")}
        elif kind == "sleep" and actor.rank is None:
            edges[actor.pid] |= children
    return edges


def _piped(actor: Actor, live: Sequence[Actor]) -> set[int]:
    """Return the processes that share a pipe with one: those that can fill or empty its queues."""
    pipes = set(actor.process.pipes)
    others = [a for a in live if a is not actor and a.rank is None and pipes & set(a.process.pipes)]
    return {a.pid for a in others if a.activity.kind not in ("process", "thread")}  # not one that only joins the rest
