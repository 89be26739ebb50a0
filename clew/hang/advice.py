"""Adds to a verdict what else it could have been, what to do next, and whether a restart would hang again."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clew.hang.activity import POINT_TO_POINT
from clew.hang.equal_stacks import ranges
from clew.hang.verdict import SOUND, Actor, Verdict
from clew.hang.waits_for import all_edges, reachable

AGAIN = "A restart will hang again at the same place, unless the data or random numbers lead elsewhere."
UNLESS = "A restart will hang again unless what the job waits for is there by then."
CHANCE = "A restart succeeds if only chance led to this order, and hangs again if the same steps lead to it."
RESTART = {
    "cleanup deadlock": "A restart will hang again if the exception that led to the cleanup is raised again.",
    "same collective everywhere": "A restart may succeed if the network or a device failed only briefly.",
    "dead": "A restart will end in the same way unless the cause is removed.",
    "stopped": "A restart succeeds unless the process is stopped again.",
    "data loading": "A restart will hang again if the loader is given the same work.",
    "lock or I/O": UNLESS,
    "cpu": "A restart will hang again if the same input is drawn.",
    "rollout blocked": "A restart will hang again if the job gets to this place in the same way.",
    "external wait": UNLESS,
}
"""Sentence for each pattern that says whether the job would hang again after a restart; AGAIN for all others."""
BY_CHANCE = ("lock", "threads")
"""Causes that depend on the order in which threads run."""
STUCK = (
    "missing rank", "lock or I/O", "data loading", "cpu", "external wait", "rollout blocked", "event loop blocked",
)  # fmt: skip
"""Patterns in which one process is stuck. The runner-up is then that it is only slow."""
IN_DIFFERENT_CALLS = (
    "collective mismatch", "crossed groups", "pipeline micro-batch mismatch", "send/receive cycle", "cleanup deadlock",
)  # fmt: skip
"""Patterns in which ranks are in different operations."""
AGAINST = {
    "same collective everywhere": "missing rank: all ranks are in the operation",
    "dead": "slow: what should end the wait has ended",
    "stopped": "lock or I/O: the kernel reports the process as stopped (state T or t), so it does not run at all",
    "initialisation": "same collective everywhere (network or device): not every rank has called it",
}
"""Next likely pattern and what speaks against it, by pattern."""


def with_advice(verdict: Verdict, actors: Sequence[Actor], sources: Mapping[str, str]) -> Verdict:
    """Return a verdict with its runner-up, the next step, and a sentence about restarting."""
    if verdict.pattern in SOUND or verdict.pattern == "undetermined":
        pids = " ".join(f"--pid {actor.pid}" for actor in actors[:1])
        again = "" if verdict.pattern in SOUND else f"Run clew hang {pids} again in a minute, and compare the lines."
        return replace(verdict, next=verdict.next or again)
    restart = CHANCE if verdict.cause in BY_CHANCE else RESTART.get(verdict.pattern, AGAIN)
    if restart == UNLESS:
        edges = all_edges(actors, sources)
        if any(pid in reachable(pid, edges) for pid in verdict.pids):
            restart = AGAIN  # it waits for those that wait for it, so nothing can come in time
    return replace(
        verdict,
        explanation=f"{verdict.explanation} {restart}".strip(),
        restart=restart,
        next=verdict.next or _next(verdict, actors),
        runner_up=verdict.runner_up or _runner_up(verdict, actors),
    )


def _runner_up(verdict: Verdict, actors: Sequence[Actor]) -> str:
    """Return the next likely pattern, and the observation that speaks against it; "" if there is none."""
    culprits = [actor for actor in actors if actor.pid in verdict.pids]
    if verdict.pattern in STUCK and culprits:
        one = culprits[0]
        where = f" at {one.activity.site}" if one.activity.site else ""
        if verdict.cause == "refusing":
            return f"slow: what {one.process.label} counts are tries, and nothing comes of them"
        return (
            f"slow: {one.process.label} was{where} in the last of {len(one.process.looks)} looks, nothing "
            f"that shows progress advanced, and its main thread was woken up {one.process.wakeups} times"
        )
    if verdict.pattern in IN_DIFFERENT_CALLS:
        operations = defaultdict[str, list[int]](list)
        for actor in actors:
            if actor.rank is not None:
                operations[actor.activity.op or actor.activity.kind].append(actor.rank)
        listed = ", ".join(f"{op} (rank {ranges(ranks)})" for op, ranks in operations.items())
        if verdict.cause == "threads":
            return "same collective everywhere (network or device): two threads of one rank are in collectives"
        if operations.keys() <= POINT_TO_POINT:
            return ""
        if len(operations) > 1:
            return f"same collective everywhere (network or device): the ranks are in different operations: {listed}"
        return f"same collective everywhere (network or device): the ranks are in different calls of {listed}"
    return AGAINST.get(verdict.pattern, "")


def _next(verdict: Verdict, actors: Sequence[Actor]) -> str:
    """Return the next step after a verdict: a command, or a sentence."""
    first = verdict.pids[0] if verdict.pids else 0
    if verdict.pattern in IN_DIFFERENT_CALLS and (again := _run_with_detail(verdict, actors)):
        return again
    match verdict.pattern:
        case "stopped" if verdict.cause == "stopped":
            if all(a.process.last.state == "t" for a in actors if a.pid in verdict.pids):
                return "Let the debugger continue or detach: TracerPid in /proc/PID/status names it."
            return f"kill -CONT {' '.join(map(str, verdict.pids))}"
        case "rollout blocked" if verdict.cause == "paused":
            return "Resume the engine. The log of its client says why the client has not resumed it."
        case "dead":
            if any(a.pid in verdict.pids and "signal 9" in a.process.exit for a in actors):
                return "Check whether the kernel killed it for lack of memory: dmesg -T | grep -i killed"
            if not any(a.dead for a in actors if a.pid in verdict.pids):
                return "Look for a traceback in the log. A task or job writes none unless somebody asks for its result."
            if all(a.process.exit == "with exit code 0" for a in actors if a.pid in verdict.pids):
                return "It ended without an error: look for why, while the others still wait for it."
            return "Read the end of its log: it says why it ended."
        case "external wait" | "rollout blocked" if first and (other := _look_at_other_side(first, verdict, actors)):
            return other
        case "cpu" | "lock or I/O" | "data loading" | "event loop blocked" if first:
            return f"py-spy dump --native --pid {first}"
        case "same collective everywhere" | "shape mismatch":
            return (
                "Run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL, which names both sides of a mismatch. On GPUs, also "
                "set NCCL_DEBUG=INFO, which shows the network."
            )
    return f"py-spy dump --locals --pid {first}" if first else f"clew hang --stacks --pid {actors[0].pid}"


def _run_with_detail(verdict: Verdict, actors: Sequence[Actor]) -> str:
    """Return the command that runs the job with DETAIL; "" if it would not help, or no script is known."""
    # DETAIL compares the collectives of one group, but not messages, roots, or functional collectives (of DTensors).
    groups = {actor.activity.group for actor in actors if actor.rank is not None}
    operations = {actor.activity.op for actor in actors if actor.rank is not None}
    if len(groups) > 1 or len(operations) < 2 or operations & {*POINT_TO_POINT, "wait_tensor", "monitored_barrier"}:
        return ""
    ranks = [actor for actor in actors if actor.rank is not None]
    parents = {actor.process.parent for actor in ranks}
    if script := _script([actor for actor in actors if actor.pid in parents]):  # it starts its ranks itself
        return f"TORCH_DISTRIBUTED_DEBUG=DETAIL python {script}  # a mismatch raises"
    if not (script := _script(ranks)):
        return ""
    most = max([2, *(actor.process.local_world or 8 for actor in actors)])
    # The smallest job that still has the ranks at fault, if one node can hold it.
    count = min(most, max([2, *(rank + 1 for rank in verdict.ranks)]))
    world = max((actor.process.world or 0 for actor in actors), default=0)
    fewer = f"uses {count} of {world} ranks; " if count < world else ""
    return f"TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc-per-node {count} {script}  # {fewer}a mismatch raises"


def _look_at_other_side(pid: int, verdict: Verdict, actors: Sequence[Actor]) -> str:
    """Return how to look at the other side of a network wait; "" without such a wait, or if the process retries."""
    text = "".join(actor.activity.text for actor in actors if actor.pid == pid)
    if verdict.cause == "network" and "accept(" in text:
        return f"ss -ltnp | grep 'pid={pid},' shows the port on which it waits for a connection"
    if verdict.cause not in ("network", "http") or "sleep(" in text:
        return ""
    ports = {port for actor in actors if actor.pid == pid for port in actor.process.peers}
    servers = (a.pid for a in actors if a.rank is None and a.pid != pid and ports & {*a.process.listens})
    if server := next(servers, None):
        return f"py-spy dump --locals --pid {server}"
    return f"ss -tnp | grep 'pid={pid},' shows the other side. Read its log, and look at what it is doing."


def _script(actors: Sequence[Actor]) -> str:
    """Return the script and arguments of the first process that runs one, quoted for a shell; "" if none does."""
    for actor in actors:
        words = list(actor.process.command)
        at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
        if at is not None:
            return shlex.join(words[at:])
    return ""
