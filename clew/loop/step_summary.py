"""The summary of a step, written when it commits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from clew.loop.bit_for_bit import environment
from clew.record.batch_digest import RowDigest, digest_batch
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.training.custom import code_of
from clew.training.engine import TrainEngine
from clew.training.ranks import Ranks
from clew.training.results import StepResult


def write_stages(
    run: RunDirectory, step: int, digests: Mapping[str, RowDigest], result: StepResult, ranks: Ranks
) -> None:
    """Write what this rank computed from its rows; of a tensor-parallel group, only the first rank writes.

    Args:
        digests: Digests of all rows of the batch, in their order.
    """
    if ranks.tp_rank:  # all ranks of a tensor-parallel group compute the same
        return
    own = sorted(row for minibatch in result.plan for rows in minibatch[ranks.dp_rank :: ranks.dp_size] for row in rows)
    ids = list(digests)
    run.steps.write_stages(
        step,
        ranks.rank,
        {ids[row]: digests[ids[row]] for row in own},
        {name: [values[row] for row in own] for name, values in result.stages.items()},
    )


def facts_of(batch: list[Sequence], version: int) -> dict[str, Any]:
    """Return what the index repeats about a batch: its groups, and the oldest and newest version of its trained tokens.

    Both versions are -1 if no policy generated the tokens.

    Args:
        version: Version to report as both if the batch has no trained token.
    """
    generated = np.concatenate([row.versions[row.loss_mask] for row in batch])
    newest = int(generated.max()) if generated.size else version
    return {
        "groups": sorted({row.group_id for row in batch}),
        "versions": [int(generated.min(initial=version)), newest],
    }


def summarize(
    run: RunDirectory, batch: list[Sequence], digests: Mapping[str, RowDigest], result: StepResult, engine: TrainEngine
) -> dict[str, Any]:
    """Return the content of step-N.json, except for the timings. `digests` are those of the batch's rows."""
    config = engine.config
    return {
        **facts_of(batch, engine.version),
        **({"supervised": True} if engine.supervised else {}),
        "digests": {"data": digest_batch(digests), **result.digests},
        "tensors": result.tensor_digests,
        "metrics": result.metrics,
        "evaluation": run.evals.newest(),
        "plan": result.plan,
        "environment": environment(engine),
        "code": code_of(config),
        # What decides what a step computes from its batch, and may change when a run is restarted.
        "config": {
            "training": config.training.model_dump(mode="json"),
            "algorithm": config.algorithm.model_dump(mode="json"),
            "seed": config.seed,
        },
        "committed_at": time.time(),
    }
