"""The comparison of a step that was trained again with its record, stage by stage in the order of computation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

import numpy as np

from clew.config import Algorithm
from clew.loop import differences
from clew.loop.commit import environment, facts_of
from clew.loop.differences import EXACT, TOLERANCES, Difference, Tolerance
from clew.loop.recompute import suspected
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.record.steps import Stages
from clew.record.summary import environment_of
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
        """Read a step.

        Raises:
            RecordError: A file of it is missing or cannot be read.
        """
        summary, batch = run.steps.read(step), run.steps.read_data(step)
        return cls(run=run, step=step, summary=summary, batch=batch, stages=run.steps.read_stages(step))

    def altered(self) -> Difference | None:
        """Return the first place where the batch is not what was trained on."""
        return differences.in_batch(self.step, self.stages.digests, self.batch, self.summary["digests"]["data"])


def repeats(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a step made in one environment should repeat bit for bit in the other.

    It should when both are equal and either run on the CPU or use training.deterministic on CUDA. If it does not repeat
    nevertheless, `clew.record.summary.rounding_doubt` may say why.
    """
    same = {**then, "rounding": None} == {**now, "rounding": None}
    return same and (now["device"] == "cpu" or now["deterministic"])


def how_to_compare(recorded: dict[str, Any], engine: TrainEngine) -> tuple[Tolerance, str]:
    """Return the tolerance for comparing a step, and the reason if it is not bit for bit.

    Equality bit for bit is promised on the CPU, with the same ranks, threads and packages (see DESIGN).
    """
    then, now = ({**each, "rounding": None} for each in (environment_of(recorded), environment(engine)))
    flat_then, flat_now = ({**each, **each["packages"], "packages": None} for each in (then, now))
    reasons = [
        f"{name} {flat_then.get(name)} recorded, {flat_now[name]} here"
        for name in flat_now
        if flat_then.get(name) != flat_now[name]
    ]
    if repeats(then, now):
        return EXACT, ""
    return TOLERANCES[engine.config.model.dtype], "; ".join(reasons) or f"device {now['device']}"


def compare(then: RecordedStep, result: StepResult, engine: TrainEngine, tolerance: Tolerance) -> list[Difference]:
    """Return where a retrained step differs from its record: one difference for each stage, in their order.

    Args:
        then: The recorded step.
        result: Result of training it again.
        engine: The engine after the step.
        tolerance: Limit within which two values agree.
    """
    step, batch, stages = then.step, then.batch, then.stages
    found: list[Difference | None] = []

    def hold(name: str, rows: SequenceABC[int], update: int = 0) -> Difference | None:
        there = ["present" if name in side else "absent" for side in (stages.arrays, result.stages)]
        if "absent" in there:
            return Difference(
                step=step, stage=name, where="the stage", position=None, recorded=there[0], found=there[1]
            )
        ids = [batch[row].id for row in rows]
        before = [stages.arrays[name][each] for each in ids]
        now = [result.stages[name][row].astype(np.float32, copy=False) for row in rows]  # as they are kept
        how = EXACT if name == "advantages" and not _from_logprobs(engine.config.algorithm) else tolerance
        after = update > 0 and tolerance.exact  # otherwise gradients are not compared
        difference = differences.in_stage(step, name, ids, before, now, how, after_update=after)
        if difference is not None and name in ("advantages", "loss") and not any(found):
            difference = suspected(difference, batch, stages, then.summary, engine.config.algorithm, checked=True)
        return difference

    known = [name for name in differences.STAGES if name in result.stages or name in stages.arrays]
    for name in known:
        if name not in differences.OF_UPDATES:
            found.append(hold(name, range(len(batch))))
    for number, minibatch in enumerate(result.plan):
        rows = sorted(row for micro in minibatch for row in micro)
        for name in known:
            if name in differences.OF_UPDATES:
                found.append(hold(name, rows, number))
        if tolerance.exact:
            found.append(_gradients(step, number, result, then.summary, engine))
    found.append(_weights(step, result, then.summary, engine, tolerance))
    if tolerance.exact and not any(found):
        found += _said(then, result)
    written = (then.run.checkpoints / f"step-{step + 1:06d}" / "checkpoint.json").exists()
    if written and (tolerance.exact or not any(found)):
        found.append(_checkpoint(then.run, step, engine, tolerance))
    return [each for each in found if each is not None]


def _from_logprobs(algorithm: Algorithm) -> bool:
    """Return whether advantages depend on what a model computed, not on recorded rewards alone."""
    return algorithm.advantages == "gae" or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0)


def _gradients(
    step: int, number: int, result: StepResult, recorded: dict[str, Any], engine: TrainEngine
) -> Difference | None:
    """Return the first parameter whose gradient differs in one update."""
    then, now = recorded["tensors"]["gradients"], result.tensor_digests["gradients"]
    update = f", update {number}" if len(now) > 1 else ""
    before = then[number] if number < len(then) else ""
    return differences.in_tensors(step, "gradients", engine.parameter_names, before, now[number], update)


def _weights(
    step: int, result: StepResult, recorded: dict[str, Any], engine: TrainEngine, tolerance: Tolerance
) -> Difference | None:
    """Return the first parameter that differs after the step.

    Where equality bit for bit is not promised, the norm of the gradient is compared instead.
    """
    if not tolerance.exact:
        then, now = (each["grad_norm"] for each in (recorded["metrics"], result.metrics))
        return differences.in_number(step, "gradients", "norm of the gradient", then, now, tolerance)
    then, now = (each["weights"] for each in (recorded["tensors"], result.tensor_digests))
    return differences.in_tensors(step, "update", engine.parameter_names, then, now)


def _said(recorded: RecordedStep, result: StepResult) -> Iterator[Difference | None]:
    """Yield differences in the rest of step-N.json: digests of all tensors, groups, versions, plan, metrics."""
    step, summary = recorded.step, recorded.summary
    for kind, now in result.digests.items():
        then = summary["digests"].get(kind)
        if then != now:
            stage = f"digests of {kind}"
            yield Difference(step=step, stage=stage, where="of all", position=None, recorded=then, found=now)
    for name, now in {"step": step, **facts_of(recorded.batch, step), "plan": result.plan}.items():
        if (then := summary.get(name)) != now:
            yield Difference(step=step, stage=name, where="of all", position=None, recorded=then, found=now)
    yield differences.in_metrics(step, *_of_same_formulas(summary, result.metrics))


def _of_same_formulas(recorded: dict[str, Any], metrics: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of both sides, without those that an older record computed by another formula.

    See `clew.algorithms.FORMULAS`.
    """
    then = dict(recorded["metrics"])
    if environment_of(recorded)["rounding"].get("formulas", 1) >= 2:
        return then, metrics
    older = {name for name in ("kl", "behaviour_k3") if _nearly(then.get(name), metrics.get(name))}
    algorithm = recorded["config"]["algorithm"]
    if algorithm.get("loss") == "cispo" or algorithm.get("dual_clip") is not None:
        older.add("clip_share")
    return tuple({name: each[name] for name in each if name not in older} for each in (then, metrics))  # pyright: ignore[reportReturnType]


def _nearly(then: float | None, now: float | None) -> bool:
    """Return whether two averages of k3 differ by no more than the rounding of its older formula in float32."""
    return then is not None and now is not None and math.isclose(then, now, rel_tol=1e-6, abs_tol=1e-6)


def _checkpoint(run: RunDirectory, step: int, engine: TrainEngine, tolerance: Tolerance) -> Difference | None:
    """Return the first difference between the engine and the checkpoint that the run wrote after this step.

    They are compared tensor by tensor. Where equality bit for bit is not promised, the checkpoint's files are checked
    against their own digests instead.

    Raises:
        RecordError: The files do not match their digests.
    """
    folder = run.checkpoints / f"step-{step + 1:06d}"
    if not tolerance.exact:
        checkpoint.check(folder, engine)
        return None
    if engine.critic is not None and checkpoint.facts(folder)["critic_updates"] is None:
        return None  # the run went on from here without its critic, and wrote it again
    saved = checkpoint.digests_in(folder, engine)
    for kind, now in checkpoint.digests_of(engine).items():
        then = saved[kind]
        for name in now:
            if then.get(name) != now[name]:
                return Difference(
                    step=step,
                    stage=f"{folder.name} ({kind})",
                    where=name,
                    position=None,
                    recorded=f"digest {then.get(name, 'absent')}",
                    found=f"digest {now[name]}",
                )
    then, now = checkpoint.facts(folder), checkpoint.numbers_of(engine)
    name = next((name for name in now if then[name] != now[name]), None)
    if name is None:
        return None
    stage = f"{folder.name} (checkpoint.json)"
    return Difference(step=step, stage=stage, where=name, position=None, recorded=then[name], found=now[name])
