"""Shows a report as one HTML page that needs no other file. Everything that was collected is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from clew.hang.equal_stacks import ranges_text
from clew.hang.report import Report
from clew.printing import in_html

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0.2rem; } h2 { margin-top: 2rem; font-size: 1.15rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0; border-bottom: 1px solid #8884; }
pre { background: #8881; padding: 0.7rem; border-radius: 6px; overflow-x: auto; font-size: 0.85rem; }
.at { background: #e0313133; display: inline-block; width: 100%; } .faint { color: #888; }
.verdict { border-left: 5px solid #888; padding-left: 1rem; } .verdict.bad { border-color: #e03131; }
.verdict.good { border-color: #2f9e44; } summary { cursor: pointer; font-family: ui-monospace, monospace; }
"""


def as_html(report: Report) -> str:
    """Return the page."""
    verdict = report.verdict
    grade = {0: "good", 1: "bad"}.get(verdict.exit_code, "")
    facts = {
        "ranks at fault" if verdict.exit_code else "ranks that move slowly": ", ".join(map(str, verdict.ranks)),
        "processes at fault": ", ".join(map(str, report.pids)) if verdict.exit_code else "",
        "on": ", ".join(report.hosts) if verdict.exit_code else "",
        "call site": ", ".join(verdict.sites),
        "confidence": verdict.confidence if verdict.exit_code else "",
    }
    number = "1 process" if report.count == 1 else f"{report.count} processes"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>clew hang: {in_html(verdict.pattern)}</title><style>{STYLE}</style>",
        f"<div class='verdict {grade}'><h1>{in_html(verdict.pattern)}</h1>",
        f"<p class='faint'>{number}, watched for {report.seen.seconds:.1f} s</p>",
        f"<p>{in_html(verdict.explanation)}</p></div>",
        _table([(name, value) for name, value in facts.items() if value]),
        _list("Evidence", verdict.evidence),
    ]
    for site, lines in report.source() if verdict.exit_code else ():
        rows = (f"<span class='{'at' if one else ''}'>{n:5} {in_html(text)}</span>" for n, text, one in lines)
        body = "\n".join(rows)
        parts.append(f"<h2>{in_html(site)}</h2><pre>{body}</pre>")
    if verdict.exit_code and verdict.runner_up:
        parts.append(f"<h2>What it is not</h2><p>{in_html(verdict.runner_up)}</p>")
    parts.append(_list("What limits this verdict", verdict.notes))
    if report.next:
        parts.append(f"<h2>Next</h2><pre>{in_html(report.next)}</pre>")
    parts.append("<h2>Stacks</h2>")
    for stack, pairs in report.classes.items():
        count = sum(last - first + 1 for first, last in pairs)
        inner = stack[-1] if stack else "no Python frame"
        parts.append(_details(f"{count} x {ranges_text(pairs)}: {inner}", "\n".join(reversed(stack))))
    if tasks := report.tasks():
        parts.append("<h2>Tasks of asyncio</h2>")
        parts += [_details(f"{label}: {task.partition(chr(10))[0]}", task) for label, task in tasks]
    native = [each for each in report.seen.processes if each.native]
    parts += [_details(f"{each.label}: native frames", "\n".join(each.native)) for each in native]
    parts.append(_list("GPUs and NCCL", report.seen.machine))
    parts.append("<h2>Processes</h2>")
    head = ("process", "host", "role", "does", "at")
    rows = [
        (a.process.label, a.process.host, a.role, " ".join((a.activity.op or a.activity.kind, a.activity.group)),
         f"{a.activity.site} {a.activity.text}")
        for a in report.actors
    ]  # fmt: skip
    parts.append(_table(rows, head))
    return "\n".join(part for part in parts if part) + "\n"


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{in_html(summary)}</summary><pre>{in_html(text)}</pre></details>"


def _list(title: str, entries: Iterable[str]) -> str:
    items = "".join(f"<li>{in_html(each)}</li>" for each in entries)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def _table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    body = "".join("<tr>" + "".join(f"<td>{in_html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    named = "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>" if head else ""
    return f"<table>{named}{body}</table>" if body else ""
