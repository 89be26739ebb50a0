"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clew.stress.report import PARTS, Report, growth_shown
from clew.stress.verdict import Verdict

_SAID = {
    "fit": "fit for training",
    "not fit": "not fit for training",
    "not judged": "not judged: nothing was found, and not all could be looked at",
}
_STYLES = {"fit": "green", "not fit": "red", "not judged": "yellow"}


def rendered(report: Report) -> Group:
    """Return the report in a form that rich's Console.print shows."""
    return Group(*_blocks(report))


def _blocks(report: Report) -> Iterator[RenderableType]:
    asked = f"batch {report.batch} over {report.dp}, group {report.group}: {report.width} episodes at once"
    used = f"{report.rows_used} of {report.rows} rows of the data"
    yield Text(f"{report.agent}, {asked}; {used}")
    yield from _findings(report)
    waves = _table("wave", "at once", "worked on", "episodes/s", "failed", "seconds", "cores", "model requests at once")
    for wave in report.waves:
        figures = (f"{wave.episodes_at_once:.1f}", f"{wave.episodes_per_s:.2f}", str(wave.failed))
        more = (f"{wave.seconds:.2f}", f"{wave.cpu_share:.2f}", str(wave.requests_at_once))
        waves.add_row(wave.name, str(wave.width), *figures, *more)
    yield waves
    latency = report.measured.latency
    if latency:
        seconds = _table(f"seconds at {report.measured.width} at once", "p50", "p90", "p99")
        for part in PARTS:
            each = latency[part]
            seconds.add_row(part, f"{each.p50:.3f}", f"{each.p90:.3f}", f"{each.p99:.3f}")
        yield seconds
    counts = growth_shown(report.growth)
    if counts:
        left = _table("left, by number of episodes", *(str(sample.episodes) for sample in report.growth))
        for quantity, points in counts.items():
            shown = {episodes: f"{value:,.0f}" for episodes, value in points}
            left.add_row(quantity, *(shown.get(sample.episodes, "") for sample in report.growth))
        yield left
    yield Text(f"{report.agent}: {_SAID[report.outcome]}", style=f"bold {_STYLES[report.outcome]}")


def _findings(report: Report) -> Iterator[Text]:
    for verdict in report.verdicts:
        yield from _told(verdict)
    for failure in report.failures:
        yield Text(f"{failure.count} episodes failed: {failure.error}", style="red")
        yield Text(f"    {failure.at}  ({', '.join(failure.episodes)})", style="dim")
    for note in report.notes:
        yield Text(f"not judged: {note}", style="yellow")


def _told(verdict: Verdict) -> Iterator[Text]:
    mark, style = ("FOUND", "bold red") if verdict.certain else ("perhaps", "yellow")
    yield Text.assemble((f"{mark} ({verdict.kind}) ", style), verdict.what)
    for line in filter(None, [verdict.where, *verdict.evidence]):
        yield Text(f"    {line}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table
