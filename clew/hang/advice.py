"""Adds to a verdict what to do next, and whether a restart would hang again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clew.hang.verdict import SOUND, Actor, Verdict

AGAIN = "A restart will hang again at the same place: the code decides it."
MAYBE = "A restart may hang again: what it waits for has to come back first."
ONCE = "A restart would go on: nothing in the code asks for this wait."
RESTART = {
    "missing rank": AGAIN,
    "collective mismatch": AGAIN,
    "crossed groups": AGAIN,
    "send/receive cycle": AGAIN,
    "pipeline micro-batch mismatch": AGAIN,
    "shape mismatch": AGAIN,
    "cleanup deadlock": "A restart will hang again if the hidden exception is raised again.",
    "initialisation": AGAIN,
    "same collective everywhere": MAYBE,
    "dead": "A restart will end in the same way if the process that ended does so again: read its last lines first.",
    "stopped": ONCE,
    "data loading": "A restart will hang again if the same sample is drawn.",
    "lock or I/O": MAYBE,
    "cpu": "A restart will hang again if the same input is drawn.",
    "rollout blocked": "A restart will hang again if the same limit, filter or pause is reached.",
    "external wait": MAYBE,
    "event loop blocked": AGAIN,
}


def with_advice(verdict: Verdict, live: Sequence[Actor]) -> Verdict:
    """Return a verdict with its next command and a sentence about restarting."""
    if verdict.pattern in SOUND or verdict.pattern == "undetermined":
        pids = " ".join(f"--pid {a.pid}" for a in live[:1])
        again = "" if verdict.pattern in SOUND else f"clew hang {pids} again in a minute, and compare the lines."
        return replace(verdict, next=verdict.next or again)
    restart = RESTART.get(verdict.pattern, "")
    told = f"{verdict.explanation} {restart}".strip()
    return replace(verdict, explanation=told, next=verdict.next or _next(verdict), restart=restart)


def _next(verdict: Verdict) -> str:
    pids = " ".join(map(str, verdict.pids))
    first = verdict.pids[0] if verdict.pids else 0
    match verdict.pattern:
        case "stopped" if verdict.cause == "stopped":
            return f"kill -CONT {pids}"
        case "dead":
            return "Read the end of its log: it says why it ended."
        case "external wait" | "rollout blocked" if verdict.cause in ("http", "network", "paused"):
            return f"ss -tnp | grep 'pid={first},' shows the server; ask it: curl -s localhost:PORT/health"
        case "cpu" | "lock or I/O" | "data loading" | "event loop blocked" if first:
            return f"py-spy dump --native --pid {first}"
        case "same collective everywhere" | "shape mismatch":
            return "Run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL: it names both sides of a mismatch."
        case "missing rank" | "collective mismatch" | "crossed groups" | "cleanup deadlock" | "initialisation":
            return f"clew hang --stacks --pid {first or 'PID'}, and reproduce it with --nproc-per-node 2."
    return f"py-spy dump --locals --pid {first}" if first else "clew hang --stacks --pid PID"
