"""The learning curve of a run, drawn from the record."""

from __future__ import annotations

import math

from clew.record.files import only_shown
from clew.record.run import RunDirectory


def draw_learning_curve(run: RunDirectory) -> None:
    """Draw reports/learning_curve.png: reward, evaluation, length, entropy, gradient norm, lag and seconds per step."""
    steps = [run.steps.read(entry["step"]) for entry in run.steps.index()]
    if not steps:
        return
    from matplotlib.figure import Figure  # no pyplot: half a second more, for windows that nobody opens

    evals = run.read_evals()
    panels = [
        ("reward", "reward (mean of the batch)"),
        ("response_length", "response length (tokens)"),
        ("entropy", "entropy (nats)"),
        ("grad_norm", "gradient norm"),
        ("lag_mean", "lag (versions, mean)"),
        ("seconds", "seconds a step"),
    ]
    figure = Figure(figsize=(13, 6.5))
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.08, top=0.88, wspace=0.2, hspace=0.35)
    for (name, title), axis in zip(panels, figure.subplots(2, 3).flat, strict=True):
        if name == "seconds":
            bottom = [0.0] * len(steps)
            for part in ("rollout", "forward_backward", "publish", "record", "evaluation"):
                top = [low + step["timings"].get(part, 0.0) for low, step in zip(bottom, steps, strict=True)]
                axis.fill_between([s["step"] for s in steps], bottom, top, label=part.replace("_", " and "), step="mid")
                bottom = top
            axis.legend(fontsize=8, loc="upper left")
        else:
            points = [
                (s["step"], s["metrics"][name]) for s in steps if not math.isnan(s["metrics"].get(name, math.nan))
            ]
            axis.plot(*zip(*points, strict=True), linewidth=1.3) if points else None
        if name == "reward" and evals:
            axis.plot(
                [e["version"] for e in evals],
                [e["pass@1"] for e in evals],
                "o-",
                color="tab:green",
                label="held-out pass@1",
                markersize=4,
            )
            axis.legend(fontsize=8, loc="upper left")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{run.path.parent.name} / {run.path.name}")
    beside = run.reports / ".learning_curve.png"
    with only_shown(str(beside)):
        figure.savefig(beside, dpi=110, format="png")
        beside.replace(run.reports / "learning_curve.png")
