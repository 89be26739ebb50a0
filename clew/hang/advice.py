"""Says what else a verdict could have been and why it is not, and what to do next."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence

from clew.hang.classes import ranges
from clew.hang.judge import Actor, Verdict

STANDS = (
    "missing rank", "lock or I/O", "data loading", "cpu", "external wait", "rollout blocked", "event loop blocked",
)  # fmt: skip
"""Patterns in which one process stands still while it could be slow."""
APART = (
    "collective mismatch", "crossed groups", "pipeline micro-batch mismatch", "send/receive cycle", "cleanup deadlock",
)  # fmt: skip
"""Patterns in which ranks are in different operations."""


def runner_up(verdict: Verdict, actors: Sequence[Actor]) -> str:
    """Return the next likely pattern, and the observation that speaks against it; "" if there is none."""
    culprits = [actor for actor in actors if actor.pid in verdict.pids]
    if verdict.pattern in STANDS and culprits:
        one = culprits[0]
        looks = one.process.looks
        woken = looks[-1].switches - looks[0].switches if looks else 0
        where = f" at {one.activity.site}" if one.activity.site else ""
        return (
            f"slow: {one.process.label} was{where} in the last of {len(looks)} looks, no counter of it advanced, and "
            f"its main thread was woken up {woken} times"
        )
    if verdict.pattern in APART:
        operations = defaultdict[str, list[int]](list)
        for actor in actors:
            if actor.rank is not None:
                operations[actor.activity.op or actor.activity.kind].append(actor.rank)
        said = ", ".join(f"{op} (rank {ranges(ranks)})" for op, ranks in operations.items())
        if len(operations) > 1:
            return f"same collective everywhere (network or device): the ranks are in different operations: {said}"
        return f"same collective everywhere (network or device): the ranks are in different calls of {said}"
    ranks = [actor for actor in actors if actor.rank is not None]
    against = {
        "same collective everywhere": f"missing rank: all {len(ranks)} ranks are in the operation",
        "dead": "same collective everywhere (network or device): a process that should take part is gone",
        "stopped": "lock or I/O: the kernel reports the process as stopped (state T or t), so it does not run at all",
        "initialisation": "same collective everywhere (network or device): not every rank has called it",
        "slow": "a hang: the process that the others wait for moved while it was watched",
    }
    return against.get(verdict.pattern, "")


def next_command(verdict: Verdict, actors: Sequence[Actor]) -> str:
    """Return a command that leads on from a verdict; "" if none is known."""
    if verdict.next or not verdict.exit_code:
        return verdict.next
    if verdict.pattern in APART and (script := _script(actors)):
        count = max(2, len(verdict.ranks))
        how = f"TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc-per-node {count} {script}"
        return f"{how}  # fewer ranks; a mismatch raises"
    if verdict.pattern == "same collective everywhere":
        return "NCCL_DEBUG=INFO and TORCH_FR_BUFFER_SIZE=20000 in the job's environment show the network and the shapes"
    pids = [actor.pid for actor in actors if actor.pid in verdict.pids and not actor.dead]
    return f"py-spy dump --locals --pid {pids[0]}" if pids else ""


def _script(actors: Sequence[Actor]) -> str:
    """Return the script of a rank with its arguments, as a shell takes it; "" if it was not started as a script."""
    for actor in actors:
        words = list(actor.process.command)
        at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
        if actor.rank is not None and at is not None:
            return shlex.join(words[at:])
    return ""
