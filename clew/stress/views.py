"""The report for a terminal, and as one HTML page that needs nothing else. What agents and models wrote is escaped."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clew.printing import counted
from clew.printing import in_html as escape
from clew.stress.growth import QUANTITIES, Sample
from clew.stress.report import PARTS, Report

OUTCOMES = {
    "fit": ("fit for training", "green"),
    "not fit": ("not fit for training", "red"),
    "not judged": ("not judged: nothing was found, and not all could be looked at", "yellow"),
}
"""Sentence and colour of each outcome."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .15rem .8rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } .verdict { border-left: 4px solid #c33; padding: .1rem .8rem;
margin: .8rem 0 } .perhaps { border-color: #da3 } code { background: #f4f4f4; white-space: pre-wrap;
overflow-wrap: anywhere } img { max-width: 100% } .green { color: #183 } .red { color: #c33 } .yellow { color: #a70 }
"""

Rows = list[list[str]]
"""Cells of a table, with its headings in the first row."""


def rendered(report: Report) -> Group:
    return Group(*_blocks(report))


def _blocks(report: Report) -> Iterator[RenderableType]:
    yield Text(f"{report.agent}, {_asked(report)}")
    for verdict in report.verdicts:
        mark, style = ("FOUND", "bold red") if verdict.certain else ("perhaps", "yellow")
        yield Text.assemble((f"{mark} ({verdict.kind}) ", style), verdict.what)
        for line in filter(None, [verdict.where, *verdict.evidence]):
            yield Text(f"    {line}")
    for failure in report.failures:
        yield Text(f"{counted(failure.count, 'episode')} failed: {failure.error}", style="red")
        yield Text(f"    {failure.at}  ({', '.join(failure.episodes)})", style="dim")
    for note in report.notes:
        yield Text(f"not judged: {note}", style="yellow")
    for heads, *rows in _tables(report):
        table = Table(box=None, pad_edge=False)
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        yield table
    sentence, colour = OUTCOMES[report.outcome]
    yield Text(f"{report.agent}: {sentence}", style=f"bold {colour}")


def page(report: Report) -> str:
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    title = f"Stress of {escape(report.agent)}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"</head><body><h1>{title}</h1>"
    sentence, colour = OUTCOMES[report.outcome]
    yield f'<p>{_asked(report)}. <strong class="{colour}">{sentence}</strong></p>'
    for verdict in report.verdicts:
        yield f'<div class="verdict{"" if verdict.certain else " perhaps"}"><strong>{escape(verdict.kind)}: '
        yield f"{escape(verdict.what)}</strong>"
        yield f"<br><code>{escape(verdict.where)}</code>" if verdict.where else ""
        yield "<ul>" + "".join(f"<li><code>{escape(line)}</code></li>" for line in verdict.evidence) + "</ul></div>"
    yield from (f"<p>Not judged: {escape(note)}</p>" for note in report.notes)
    tables = _tables(report)
    if report.failures:
        failures = [[f.error, str(f.count), f.at, ", ".join(f.episodes)] for f in report.failures]
        tables.append([["failure", "episodes", "at", "such as"], *failures])
    for heads, *rows in tables:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        yield f"<table><tr>{head}</tr>{body}</table>"
    yield f'<img alt="plots" src="data:image/png;base64,{_plots(report)}"></body></html>'


def _asked(report: Report) -> str:
    return (
        f"batch {report.batch} over {report.dp}, group {report.group}: {report.width} episodes at once; "
        f"{report.rows_used} of {report.rows} rows of the data"
    )


def _tables(report: Report) -> list[Rows]:
    """Return the tables of the waves, of the seconds by part, and of what is left after the waves."""
    waves = [["wave", "at once", "worked on", "episodes/s", "failed", "seconds", "cores", "model requests at once"]]
    for wave in report.waves:
        speed = [f"{wave.episodes_at_once:.1f}", f"{wave.episodes_per_s:.2f}", str(wave.failed), f"{wave.seconds:.2f}"]
        waves.append([wave.name, str(wave.width), *speed, f"{wave.cpu_share:.2f}", str(wave.requests_at_once)])
    tables = [waves]
    latency = report.measured.latency
    if latency:
        rows = [[part, *(f"{seconds:.3f}" for seconds in each.values())] for part, each in latency.items()]
        tables.append([[f"seconds at {report.measured.width} at once", "p50", "p90", "p99"], *rows])
    counted = _counted_twice(report.growth)
    if counted:
        left = [["left, by number of episodes", *(str(sample.episodes) for sample in report.growth)]]
        for quantity in counted:
            counts = [sample.counts.get(quantity) for sample in report.growth]
            left.append([quantity, *("" if count is None else f"{count:,.0f}" for count in counts)])
        tables.append(left)
    return tables


def _counted_twice(samples: Sequence[Sample]) -> list[str]:
    """Return the quantities that at least two of the samples counted."""
    counted = Counter(quantity for sample in samples for quantity in sample.counts)
    return [quantity for quantity in QUANTITIES if counted[quantity] > 1]


def _plots(report: Report) -> str:
    """Return a base64 PNG: throughput by width, requests over time, seconds by part, and what is left after waves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), constrained_layout=True)
    throughput, requests, latency, growth = figure.subplots(2, 2).flat
    waves = sorted(report.waves, key=lambda wave: wave.width)
    throughput.plot([wave.width for wave in waves], [wave.episodes_per_s for wave in waves], "o-", label="reached")
    per_episode = waves[0].episodes_per_s / waves[0].width
    throughput.plot([0, report.width], [0, report.width * per_episode], ":", color="gray", label="if none waited")
    throughput.set(title="episodes a second", xlabel="episodes at once, as asked")
    throughput.legend()
    for wave in report.waves:
        if wave.curve:
            requests.step(*zip(*wave.curve, strict=True), where="post", label=wave.name)
    requests.axhline(report.width, linestyle=":", color="gray", label="episodes asked")
    requests.set(title="requests with the model", xlabel="seconds since the wave began")
    requests.legend()
    measured = report.measured.latency
    for offset, name in ((-0.25, "p50"), (0.0, "p90"), (0.25, "p99")):
        places = [place + offset for place in range(len(PARTS))]
        latency.bar(places, [measured[part][name] if measured else 0 for part in PARTS], 0.25, label=name)
    latency.set_xticks(range(len(PARTS)), PARTS)
    latency.set(title=f"seconds an episode, {report.measured.width} at once")
    latency.legend()
    for quantity in _counted_twice(report.growth):
        points = [(sample.episodes, sample.counts[quantity]) for sample in report.growth if quantity in sample.counts]
        episodes, values = zip(*points, strict=True)
        unit = QUANTITIES[quantity][0] * (episodes[-1] - episodes[0])
        growth.plot(episodes, [(value - values[0]) / unit for value in values], "o-", label=quantity)
    growth.axhline(1, color="gray", linestyle="dotted", label="named, if it goes on")
    growth.set(title="growth since the first wave", xlabel="episodes so far")
    growth.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return base64.b64encode(picture.getvalue()).decode()
