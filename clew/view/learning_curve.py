"""The learning curve of a run, drawn from the record."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

from clew.errors import RecordError
from clew.record.files import only_shown, write_bytes
from clew.record.run import RunDirectory
from clew.record.summary import spent
from clew.view.find_episode import settings_of

PANELS = {
    "reward": "reward (mean of the batch)",
    "response_length": "response length (tokens)",
    "entropy": "entropy (nats)",
    "grad_norm": "gradient norm",
    "behaviour_k3": "behaviour_k3 (mismatch KL)",
    "lag_mean": "lag (versions, mean)",
    "clip_share": "clip fraction",
    "seconds": "seconds per step",
}

PARTS = {
    "rollout": "waiting for rollout",
    "forward_backward": "forward and backward",
    "publish": "publish",
    "record": "record",
    "evaluation": "evaluation",
}
"""Timings of a step that are drawn as areas of their own, with their labels. The rest is drawn above as "other"."""


def draw_learning_curve(run: RunDirectory) -> None:
    """Draw reports/learning_curve.png, if a step is on record. A full disk is only a warning."""
    if run.steps.count():
        with only_shown(str(run.reports / "learning_curve.png")):
            draw_curves(run, run.reports / "learning_curve.png")


def draw_curves(run: RunDirectory, path: Path) -> None:
    """Draw `PANELS` over the steps of a run, and its evaluations, into a PNG file.

    Raises:
        RecordError: No step is on record.
    """
    steps = [run.steps.read(entry["step"]) for entry in run.steps.index()]
    if not steps:
        raise RecordError(f"Cannot draw {run.path}: no step is committed yet.")
    from matplotlib.figure import Figure  # no pyplot: half a second more, for windows that nobody opens

    figure = Figure(figsize=(16, 6.5))
    figure.subplots_adjust(left=0.04, right=0.985, bottom=0.08, top=0.88, wspace=0.22, hspace=0.35)
    for (name, title), axis in zip(PANELS.items(), figure.subplots(2, 4).flat, strict=True):
        if name == "seconds":
            _draw_seconds(axis, steps)
        else:
            metrics = [(step["step"], step.get("metrics", {})) for step in steps]
            points = [(step, of_step[name]) for step, of_step in metrics if name in of_step]
            if any(math.isfinite(value) for _, value in points):
                # Dots, because a line alone shows neither a single step nor a step between two with NaN.
                axis.plot(*zip(*points, strict=True), ".-", linewidth=1.3, markersize=3)
            else:
                axis.text(0.5, 0.5, "not on record", ha="center", transform=axis.transAxes)
        if name == "reward":
            _draw_evaluations(axis, run.evals.read_all())
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    path_of_run = run.path.absolute()
    experiment = settings_of(run).get("experiment", path_of_run.parent.name)  # a bundle is in a folder of any name
    figure.suptitle(f"{experiment} / {path_of_run.name}", parse_math=False)
    figure.savefig(drawn := BytesIO(), dpi=110, format="png")
    write_bytes(path, drawn.getvalue())


def _draw_seconds(axis: Any, steps: list[dict[str, Any]]) -> None:
    bottom, edges = [0.0] * len(steps), [step - 0.5 for step in range(len(steps) + 1)]
    for part, label in {**PARTS, None: "other"}.items():
        timings = [step.get("timings", {}) for step in steps]
        top = [
            low + spent(of_step, part) if part else sum(of_step.values())
            for low, of_step in zip(bottom, timings, strict=True)
        ]
        axis.fill_between(edges, [*bottom, bottom[-1]], [*top, top[-1]], label=label, step="post")
        bottom = top
    axis.legend(fontsize=8, loc="upper right")


def _draw_evaluations(axis: Any, evaluations: list[dict[str, Any]]) -> None:
    points = [(each["version"], each["pass@1"]) for each in evaluations if each.get("pass@1") is not None]
    if points:
        axis.plot(*zip(*points, strict=True), "o-", color="tab:green", label="held-out pass@1", markersize=4)
        axis.legend(fontsize=8, loc="upper left")
