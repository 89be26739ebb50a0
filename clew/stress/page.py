"""The report as one HTML page that needs nothing else. What agents and models wrote is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

from clew.printing import in_html as escape
from clew.stress.growth import QUANTITIES
from clew.stress.report import PARTS, Report, growth_shown

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .15rem .8rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } .verdict { border-left: 4px solid #c33; padding: .1rem .8rem;
margin: .8rem 0 } .perhaps { border-color: #da3 } code { background: #f4f4f4; white-space: pre-wrap;
overflow-wrap: anywhere } img { max-width: 100% } .fit { color: #183 } .unfit { color: #c33 } .unjudged { color: #a70 }
"""


def page(report: Report) -> str:
    """Return the whole HTML document."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    title = f"Stress of {escape(report.agent)}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"</head><body><h1>{title}</h1>"
    said = {"fit": ("fit", "fit for training"), "not fit": ("unfit", "not fit for training")}
    style, outcome = said.get(report.outcome, ("unjudged", "not judged"))
    yield (
        f"<p>Batch {report.batch} over {report.dp}, group {report.group}: {report.width} episodes at once; "
        f"{report.rows_used} of {report.rows} rows of the data. "
        f'<strong class="{style}">{outcome}</strong></p>'
    )
    for verdict in report.verdicts:
        yield f'<div class="verdict{"" if verdict.certain else " perhaps"}"><strong>{escape(verdict.kind)}: '
        yield f"{escape(verdict.what)}</strong>"
        yield f"<br><code>{escape(verdict.where)}</code>" if verdict.where else ""
        yield "<ul>" + "".join(f"<li><code>{escape(line)}</code></li>" for line in verdict.evidence) + "</ul></div>"
    yield from (f"<p>Not judged: {escape(note)}</p>" for note in report.notes)
    yield _table(
        ["wave", "at once", "worked on", "episodes/s", "failed", "seconds", "cores", "model requests at once"],
        [
            [
                wave.name,
                wave.width,
                f"{wave.episodes_at_once:.1f}",
                f"{wave.episodes_per_s:.2f}",
                wave.failed,
                f"{wave.seconds:.2f}",
                f"{wave.cpu_share:.2f}",
                wave.requests_at_once,
            ]
            for wave in report.waves
        ],
    )
    latency = report.measured.latency
    if latency:
        rows = [[p, *(f"{x:.3f}" for x in (latency[p].p50, latency[p].p90, latency[p].p99))] for p in PARTS]
        yield _table([f"seconds at {report.measured.width} at once", "p50", "p90", "p99"], rows)
    if report.failures:
        failed = [[f.error, f.count, f.at, ", ".join(f.episodes)] for f in report.failures]
        yield _table(["failure", "episodes", "at", "such as"], failed)
    yield f'<img alt="plots" src="data:image/png;base64,{_plots(report)}"></body></html>'


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


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
        requests.step(*zip(*wave.curve, strict=True), where="post", label=wave.name) if wave.curve else None
    requests.axhline(report.width, linestyle=":", color="gray", label="episodes asked")
    requests.set(title="requests with the model", xlabel="seconds since the wave began")
    requests.legend()
    measured = report.measured.latency
    for offset, name in ((-0.25, "p50"), (0.0, "p90"), (0.25, "p99")):
        places = [place + offset for place in range(len(PARTS))]
        latency.bar(places, [getattr(measured[p], name) if measured else 0 for p in PARTS], 0.25, label=name)
    latency.set_xticks(range(len(PARTS)), PARTS)
    latency.set(title=f"seconds an episode, {report.measured.width} at once")
    latency.legend()
    for quantity, points in growth_shown(report.growth).items():
        episodes, values = zip(*points, strict=True)
        unit = QUANTITIES[quantity][0] * (episodes[-1] - episodes[0])
        growth.plot(episodes, [(value - values[0]) / unit for value in values], "o-", label=quantity)
    growth.axhline(1, color="gray", linestyle="dotted", label="named, if it goes on")
    growth.set(title="growth since the first wave", xlabel="episodes so far")
    growth.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return base64.b64encode(picture.getvalue()).decode()
