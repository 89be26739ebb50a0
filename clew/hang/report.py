"""Shows a verdict: in the terminal and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from clew.hang.classes import classes_of, in_words
from clew.hang.judge import Verdict, actors_of
from clew.hang.observed import Snapshot


def as_json(verdict: Verdict, snapshot: Snapshot) -> dict[str, Any]:
    """Return the report as values that JSON knows. `snapshot` lets `clew hang --from` judge it again elsewhere."""
    processes = [
        {
            "pid": actor.pid,
            "rank": actor.rank,
            "host": actor.process.host,
            "role": actor.role,
            "moving": actor.moving,
            "doing": actor.activity.kind,
            "op": actor.activity.op,
            "group": actor.activity.group,
            "site": actor.activity.site,
            "line": actor.activity.text,
        }
        for actor in actors_of(snapshot)
    ]
    return {
        **asdict(verdict),
        "exit_code": verdict.exit_code,
        "processes": processes,
        "classes": [
            {"ranks": in_words(pairs), "stack": list(stack)}
            for stack, pairs in sorted(classes_of(_ranked(snapshot)).items(), key=lambda item: item[1])
        ],
        "seconds": snapshot.seconds,
        "snapshot": snapshot.as_dict(),
    }


def _ranked(snapshot: Snapshot) -> list[Any]:
    return [actor.process for actor in actors_of(snapshot)]


def in_text(verdict: Verdict, snapshot: Snapshot) -> str:
    """Return the report for a terminal."""
    lines = [f"{verdict.pattern}" + (f" (confidence: {verdict.confidence})" if verdict.exit_code else "")]
    if verdict.ranks:
        lines.append(f"ranks at fault: {', '.join(map(str, verdict.ranks))}")
    if verdict.pids and verdict.pattern != "healthy":
        lines.append(f"processes at fault: {', '.join(map(str, verdict.pids))}")
    if verdict.sites:
        lines.append(f"call site: {', '.join(verdict.sites)}")
    lines += ["", verdict.explanation, ""]
    lines += [f"  {each}" for each in verdict.evidence]
    if verdict.notes:
        lines += ["", "What limits this verdict:", *(f"  {note}" for note in verdict.notes)]
    if verdict.next:
        lines += ["", f"Next: {verdict.next}"]
    lines += ["", f"{len(snapshot.processes)} processes, watched for {snapshot.seconds:.1f} s"]
    return "\n".join(lines)


def stacks_in_text(snapshot: Snapshot) -> str:
    """Return the classes of stacks with their ranks, the innermost frame last."""
    parts = []
    for stack, pairs in sorted(classes_of(_ranked(snapshot)).items(), key=lambda item: item[1]):
        count = sum(last - first + 1 for first, last in pairs)
        parts += [f"{count} x {in_words(pairs)}", *(f"    {frame}" for frame in stack), ""]
    return "\n".join(parts)
