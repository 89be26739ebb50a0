"""What a step says when it commits, and the comparison of a step that is trained again with what was committed."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import time
from functools import cache
from typing import Any

import numpy as np
import torch

from clew.errors import TrainingError
from clew.record.digest import digest_arrays
from clew.record.rows import Sequence
from clew.record.run import PACKAGES, RunDirectory
from clew.training.engine import StepResult, TrainEngine

log = logging.getLogger("clew.trainer")

TOLERANCE = 1e-3
"""Relative, on loss and gradient norm, where bits are not promised."""


def environment(engine: TrainEngine) -> dict[str, Any]:
    """What must be the same for a step to repeat bit for bit."""
    return {
        "ranks": 1,
        "threads": torch.get_num_threads(),
        "device": engine.device.type,
        "packages": dict(_packages()),
    }


@cache
def _packages() -> dict[str, str]:
    """Looked up once: it takes milliseconds."""
    return {name: importlib.metadata.version(name) for name in PACKAGES if name != "clew"}


def digest_batch(batch: list[Sequence]) -> str:
    """Digest of all that training reads from a batch."""
    columns = {
        name: np.concatenate([getattr(row, name) for row in batch])
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "temperatures")
    }
    columns["reward"] = np.array([row.reward for row in batch])
    columns["lengths"] = np.array([len(row.input_ids) for row in batch])
    return digest_arrays(columns.items())


def summarize(batch: list[Sequence], result: StepResult, engine: TrainEngine) -> dict[str, Any]:
    """What step-N.json holds, but for the timings."""
    generated = np.concatenate([row.versions[row.loss_mask] for row in batch])
    return {
        "groups": sorted({row.group_id for row in batch}),
        "versions": [int(generated.min(initial=engine.version)), int(generated.max(initial=0))],
        "digests": {"data": digest_batch(batch), **result.digests},
        "metrics": result.metrics,
        "plan": result.plan,
        "environment": environment(engine),
        "committed_at": time.time(),
    }


def verify(run: RunDirectory, step: int, again: dict[str, Any]) -> None:
    """Compare a step that was trained again with what was committed.

    Bit for bit on the CPU with the same threads and packages; otherwise loss and gradient norm within `TOLERANCE`
    (and the log says so). Raises TrainingError at the first difference, before anything is published.
    """
    recorded = run.steps.read(step)
    then, now = recorded["environment"], again["environment"]
    exact = then == now and now["device"] == "cpu"
    for stage in ("data", "gradients", "weights") if exact else ("data",):
        if recorded["digests"][stage] != again["digests"][stage]:
            raise TrainingError(
                f"step {step}, trained again from the record, differs in its {stage}: digest "
                f"{again['digests'][stage]}, recorded {recorded['digests'][stage]}. Nothing was published or "
                f"overwritten. Either {run.steps.data_path(step)} or a checkpoint was altered, or the code of the "
                f"training changed since: put it back, or start another trial=NAME."
            )
    if exact:
        return
    log.warning(
        "step %d: compared within a tolerance of %g, not bit for bit: recorded with %s, here %s",
        step,
        TOLERANCE,
        then,
        now,
    )
    for metric in ("loss", "grad_norm"):
        if not math.isclose(recorded["metrics"][metric], again["metrics"][metric], rel_tol=TOLERANCE, abs_tol=1e-6):
            raise TrainingError(
                f"step {step}, trained again from the record, has {metric} {again['metrics'][metric]:.6g}, recorded "
                f"{recorded['metrics'][metric]:.6g}: beyond the tolerance of {TOLERANCE}. Nothing was published."
            )
