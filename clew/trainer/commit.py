"""What a step says when it commits."""

from __future__ import annotations

import importlib.metadata
import time
from functools import cache
from typing import Any

import numpy as np
import torch

from clew.record.digest import digest_arrays
from clew.record.rows import Sequence
from clew.record.run import PACKAGES, RunDirectory
from clew.training.engine import StepResult, TrainEngine


def environment(engine: TrainEngine) -> dict[str, Any]:
    """What must be the same for a step to repeat bit for bit."""
    return {
        "ranks": 1,
        "threads": torch.get_num_threads(),
        "device": engine.device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
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


def summarize(run: RunDirectory, batch: list[Sequence], result: StepResult, engine: TrainEngine) -> dict[str, Any]:
    """What step-N.json holds, but for the timings."""
    evaluation = run.newest_eval()
    generated = np.concatenate([row.versions[row.loss_mask] for row in batch])
    return {
        "groups": sorted({row.group_id for row in batch}),
        "versions": [int(generated.min(initial=engine.version)), int(generated.max(initial=0))],
        "digests": {"data": digest_batch(batch), **result.digests},
        "metrics": result.metrics,
        "evaluation": evaluation,
        "plan": result.plan,
        "environment": environment(engine),
        "committed_at": time.time(),
    }
