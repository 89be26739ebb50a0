"""Compares a step that was trained again to its record, stage by stage in the order of computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from clew.loop import differences
from clew.loop.differences import Difference
from clew.loop.recompute import COMPUTED, suspect_user_code
from clew.loop.step_summary import facts_of
from clew.loop.tolerance import Tolerance
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.record.steps import Stages
from clew.training import checkpoint
from clew.training.engine import TrainEngine
from clew.training.results import StepResult


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A committed step, as the record has it."""

    run: RunDirectory
    step: int
    summary: dict[str, Any]
    """Content of step-N.json."""
    batch: list[Sequence]
    stages: Stages

    @classmethod
    def read(cls, run: RunDirectory, step: int) -> RecordedStep:
        """Read a step. Raises RecordError if a file of it is missing or cannot be read."""
        summary, batch = run.steps.read(step), run.steps.read_data(step)
        return cls(run=run, step=step, summary=summary, batch=batch, stages=run.steps.read_stages(step))


def compare(then: RecordedStep, result: StepResult, engine: TrainEngine, tolerance: Tolerance) -> list[Difference]:
    """Return where a retrained step differs from its record: one difference per stage, in the order of the stages.

    Args:
        engine: The engine, as the step left it.
        tolerance: Limit within which values agree. If it is not exact, gradients are compared by their norm alone.
    """
    step, summary, algorithm = then.step, then.summary, engine.config.algorithm
    ids = [row.id for row in then.batch]
    here = {
        name: {id: values_T.astype(np.float32, copy=False) for id, values_T in zip(ids, values, strict=True)}
        for name, values in result.stages.items()  # in as many bits as they are recorded with
    }
    # Advantages of rewards alone are the same on every machine; with a critic or a KL reward, a model computes them.
    from_logprobs = engine.critic is not None or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0)
    found = list(
        differences.in_stages(
            step,
            ids,
            stages=(then.stages.arrays, here),
            tensors=(summary["tensors"], result.tensor_digests),
            plan=result.plan,
            parameters=engine.parameter_names,
            tolerance=tolerance,
            exact=() if from_logprobs else ("advantages",),
        )
    )
    if found and found[0].stage in COMPUTED and not engine.supervised:
        found[0] = suspect_user_code(found[0], then.batch, then.stages, summary, algorithm, checked=True)
    if tolerance.exact:
        found += [] if found else _in_summary(then, result)
    else:
        norms = [metrics["grad_norm"] for metrics in (summary["metrics"], result.metrics)]
        if not tolerance.agree(*(np.array([norm], np.float32) for norm in norms)).all():
            where = "norm of the gradient"
            found.append(Difference(step=step, stage="gradients", where=where, recorded=norms[0], found=norms[1]))
    written = (then.run.checkpoint(step + 1) / "checkpoint.json").exists()
    if written and (tolerance.exact or not found):
        found += _in_checkpoint(then.run, step, engine, tolerance)
    return found


def _in_summary(then: RecordedStep, result: StepResult) -> Iterator[Difference]:
    """Yield differences in the rest of step-N.json: digests of all tensors, groups, versions, plan, metrics."""
    step, summary = then.step, then.summary
    here = {"step": step, **facts_of(then.batch, step), "plan": result.plan}
    pairs = {f"digests of {kind}": (summary["digests"].get(kind), now) for kind, now in result.digests.items()}
    pairs |= {name: (summary.get(name), now) for name, now in here.items()}
    for name, (recorded, now) in pairs.items():
        if recorded != now:
            yield Difference(step=step, stage=name, where="of all", recorded=recorded, found=now)
    if (metric := differences.in_metrics(step, summary["metrics"], result.metrics)) is not None:
        yield metric


def _in_checkpoint(run: RunDirectory, step: int, engine: TrainEngine, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield the first difference, tensor by tensor, between the engine and the run's checkpoint after this step.

    Where equality bit for bit is not promised, or was not when the checkpoint was written (`TrainEngine.drifted`), its
    files are checked against their own digests instead: this raises RecordError if they do not match.
    """
    folder = run.checkpoint(step + 1)
    facts = checkpoint.read_manifest(folder)
    if engine.critic is not None and facts["critic_updates"] is None:
        return  # the run went on without its critic, and wrote this checkpoint again
    if not tolerance.exact or facts.get("drifted"):
        checkpoint.check(folder, engine)
        return
    saved = checkpoint.digests_in(folder, engine)
    for kind, digests in checkpoint.digests_of(engine).items():
        for name, now in digests.items():
            if (recorded := saved[kind].get(name, "absent")) != now:
                stage, recorded, here = f"{folder.name} ({kind})", f"digest {recorded}", f"digest {now}"
                yield Difference(step=step, stage=stage, where=name, recorded=recorded, found=here)
                return
    for name, now in checkpoint.numbers_of(engine).items():
        if facts[name] != now:
            stage = f"{folder.name} (checkpoint.json)"
            yield Difference(step=step, stage=stage, where=name, recorded=facts[name], found=now)
            return
