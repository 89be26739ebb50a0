"""What a step says when it commits."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from clew.record.digest import digest_batch
from clew.record.rows import Sequence
from clew.record.run import PACKAGES, RunDirectory
from clew.training.engine import StepResult, TrainEngine

CONFIGURED = ("training", "algorithm")
"""The sections that decide what a step computes from its batch. A run may change them when it starts again."""


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


def summarize(
    run: RunDirectory, batch: list[Sequence], digests: Mapping[str, int], result: StepResult, engine: TrainEngine
) -> dict[str, Any]:
    """What step-N.json holds, but for the timings. digests: of the batch, from `clew.record.digest.digest_rows`."""
    evaluation = run.newest_eval()
    generated = np.concatenate([row.versions[row.loss_mask] for row in batch])
    return {
        "groups": sorted({row.group_id for row in batch}),
        "versions": [int(generated.min(initial=engine.version)), int(generated.max(initial=0))],
        "digests": {"data": digest_batch(digests), **result.digests},
        "tensors": result.tensor_digests,
        "metrics": result.metrics,
        "evaluation": evaluation,
        "plan": result.plan,
        "environment": environment(engine),
        "config": {name: getattr(engine.config, name).model_dump(mode="json") for name in CONFIGURED},
        "committed_at": time.time(),
    }
