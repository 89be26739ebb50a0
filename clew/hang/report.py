"""Shows a verdict: in the terminal and as JSON. `html_report` shows it as HTML."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from clew.hang.equal_stacks import RanksByStack, ranges, ranges_text, ranks_by_stack
from clew.hang.judge import judge
from clew.hang.observed import PIDS_PER_NODE, Snapshot
from clew.hang.reduce import reduced, to_judge
from clew.hang.roles import actors_of
from clew.hang.verdict import Actor, Verdict

CONTEXT = 2
"""Number of source lines that are shown before and after the one in question."""
TASKS_SHOWN = 8


@dataclass(frozen=True)
class Report:
    """A snapshot, and everything that is said about it."""

    seen: Snapshot

    @cached_property
    def judged(self) -> Snapshot:
        """Return the snapshot with the processes that are judged one by one."""
        return to_judge(self.seen)

    @cached_property
    def verdict(self) -> Verdict:
        """Return the verdict, with less confidence if nodes were not seen."""
        verdict, unseen = judge(self.judged), self.seen.unseen
        if not (unseen or self.seen.absent) or not verdict.exit_code:
            return verdict
        where = f" (no report from {', '.join(self.seen.absent)})" if self.seen.absent else ""
        who = f"ranks {ranges(unseen)}" if unseen else "some processes"
        note = f"{who} were not seen{where}"
        if verdict.pattern == "same collective everywhere":
            why = f"All ranks that were seen wait in the same collective, and {note}: the cause may be there."
            verdict = replace(verdict, pattern="undetermined", explanation=why, confidence="low")
        lower = {"high": "medium"}.get(verdict.confidence, verdict.confidence)
        return replace(verdict, confidence=lower, notes=(*verdict.notes, note))

    @cached_property
    def actors(self) -> list[Actor]:
        return actors_of(self.judged)

    @cached_property
    def classes(self) -> RanksByStack:
        """Return the stacks of the main threads with their ranks, those of the lowest ranks first."""
        found = ranks_by_stack([actor.process for actor in self.actors])
        return dict(sorted(found.items(), key=lambda item: item[1]))

    @property
    def next(self) -> str:
        # Pids of merged nodes are shifted by multiples of PIDS_PER_NODE: print them as their node numbers them.
        shifted = {str(actor.pid) for actor in self.actors if actor.pid > PIDS_PER_NODE}
        return re.sub(r"\d+", lambda n: str(int(n[0]) % PIDS_PER_NODE) if n[0] in shifted else n[0], self.verdict.next)

    @property
    def pids(self) -> list[int]:
        """Return the processes at fault, as their nodes number them."""
        return [pid % PIDS_PER_NODE for pid in self.verdict.pids]

    @property
    def hosts(self) -> list[str]:
        """Return the hosts of the processes at fault."""
        return sorted({actor.process.host for actor in self.actors if actor.pid in self.verdict.pids} - {""})

    @property
    def count(self) -> int:
        """Return how many processes were seen."""
        return len(self.seen.processes) + sum(len(process.alike) for process in self.seen.processes)

    def source(self) -> list[tuple[str, list[tuple[int, str, bool]]]]:
        """Return each call site at fault with its line and those around it: number, text, True for the line itself."""
        # The callers of an operation are sites, too, but have no activity: only the names of their files are known.
        files = {PurePath(file).name: file for file in self.seen.sources}
        files |= {actor.activity.site: actor.activity.file for actor in self.actors}
        found: list[tuple[str, list[tuple[int, str, bool]]]] = []
        for site in self.verdict.sites:
            name, _, line = site.rpartition(":")
            if (text := self.seen.sources.get(files.get(site, files.get(name, "")))) and line.isdigit():
                first = max(1, int(line) - CONTEXT)
                around = text.splitlines()[first - 1 : int(line) + CONTEXT]
                found.append((site, [(first + n, each, first + n == int(line)) for n, each in enumerate(around)]))
        return found

    def tasks(self) -> list[tuple[str, str]]:
        """Return the asyncio tasks of Clew's processes: the label of the process, and the stack of the task."""
        return [(each.label, task) for each in self.seen.processes for task in each.tasks]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values. `snapshot` lets `clew hang --from` judge it again elsewhere."""
        return {
            **asdict(self.verdict),
            "pids": self.pids,
            "next": self.next,
            "exit_code": self.verdict.exit_code,
            "hosts": self.hosts,
            "processes": [_described(actor) for actor in self.actors],
            "classes": [{"ranks": ranges_text(pairs), "stack": list(stack)} for stack, pairs in self.classes.items()],
            "seconds": self.seen.seconds,
            "snapshot": reduced(self.seen).as_dict(),
        }

    def in_text(self) -> str:
        """Return the report for a terminal."""
        verdict = self.verdict
        lines = [verdict.pattern + (f" (confidence: {verdict.confidence})" if verdict.exit_code else "")]
        role = "at fault" if verdict.exit_code else "that move slowly"
        if verdict.ranks:
            lines.append(f"ranks {role}: {', '.join(map(str, verdict.ranks))}")
        if verdict.pids and verdict.pattern != "healthy":
            where = f" on {', '.join(self.hosts)}" if self.hosts else ""
            lines.append(f"processes {role}: {', '.join(map(str, self.pids))}{where}")
        if verdict.sites:
            lines.append(f"call site: {', '.join(verdict.sites)}")
        lines += ["", verdict.explanation, ""]
        lines += [f"  {each}" for each in verdict.evidence]
        if verdict.exit_code:
            for _, around in self.source()[:2]:
                lines += ["", *(f"  {'>' if one else ' '} {number:5} {text}" for number, text, one in around)]
            for label, task in self.tasks()[:TASKS_SHOWN]:
                lines += ["", f"  a task of {label}:", *(f"    {line}" for line in task.splitlines())]
            for process in self.seen.processes:
                if process.native:
                    lines += ["", f"  {process.label}, native frames:", *(f"    {frame}" for frame in process.native)]
        if self.seen.machine:
            lines += ["", *(f"  {each}" for each in self.seen.machine)]
        if verdict.notes:
            lines += ["", "What limits this verdict:", *(f"  {note}" for note in verdict.notes)]
        if verdict.exit_code and verdict.runner_up:
            lines += ["", f"Not {verdict.runner_up}."]
        if self.next:
            lines += ["", f"Next: {self.next}"]
        if verdict.exit_code and len(self.classes) > 1:
            lines += ["", "Stacks (all of them with --stacks):"]
            for stack, pairs in list(self.classes.items())[:12]:
                lines.append(f"  {ranges_text(pairs)}: {stack[-1] if stack else 'no Python frame'}")
        noun = "process" if self.count == 1 else "processes"
        lines += ["", f"{self.count} {noun}, watched for {self.seen.seconds:.1f} s"]
        return "\n".join(lines)

    def stacks_in_text(self) -> str:
        """Return the classes of stacks with their ranks, the innermost frame last."""
        parts = []
        for stack, pairs in self.classes.items():
            count = sum(last - first + 1 for first, last in pairs)
            parts += [f"{count} x {ranges_text(pairs)}", *(f"    {frame}" for frame in stack), ""]
        return "\n".join(parts)


def _described(actor: Actor) -> dict[str, Any]:
    one = actor.activity
    return {
        "pid": actor.pid % PIDS_PER_NODE,
        "rank": actor.rank,
        "host": actor.process.host,
        "role": actor.role,
        "moving": actor.moving,
        "doing": one.kind,
        "op": one.op,
        "group": one.group,
        "site": one.site,
        "line": one.text,
    }
