"""`clew replay`: train recorded steps again here, and compare each stage with what was recorded.

::

    checkpoint at or before the first step ──► recorded batch ──► train_step ──► each stage against the record
                                                    ▲                                       │
                                                    └───────────── next step ◄──────────────┘

Reads checkpoints/ and steps/ of a run, and writes nothing into it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clew import config as configuration
from clew.config import Algorithm, Config
from clew.diagnose import differences
from clew.diagnose.differences import EXACT, Difference, Tolerance
from clew.diagnose.stages import DifferenceFound, suspected
from clew.errors import ModelError, RecordError
from clew.printing import print
from clew.record.digest import to_hex
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.record.steps import Stages
from clew.record.summary import configured, environment_of, rounding_doubt
from clew.trainer.commit import environment, facts_of, repeats
from clew.training import checkpoint
from clew.training.engine import StepResult, TrainEngine, make_deterministic
from clew.training.ranks import ALONE, Ranks

TOLERANCES = {
    "float64": Tolerance(absolute=1e-6, relative=1e-6),
    "float32": Tolerance(absolute=1e-3, relative=1e-3),
    "bfloat16": Tolerance(absolute=5e-2, relative=5e-2),
}
"""Tolerances by model.dtype for logprobs, losses and the gradient norm, where equality bit for bit is not promised."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step that was trained again."""

    step: int
    result: StepResult
    tolerance: Tolerance
    """Tolerance with which it was compared."""
    because: str
    """Reason why it was not compared bit for bit; empty if it was."""
    differences: list[Difference]
    """Differences from the record: one for each stage that differs, in the order of the stages."""


def engine_at(run: RunDirectory, step: int, device: str | None = None, ranks: Ranks = ALONE) -> TrainEngine:
    """Return an engine at the nearest checkpoint at or before `step`, configured as the run is.

    It needs nothing but the run directory: the reference model, too, is the run's first checkpoint.

    Args:
        run: The run directory.
        step: The step.
        device: Device to use in place of the run's.
        ranks: The ranks that this process is one of; the run may have had others.

    Raises:
        RecordError: There is no such checkpoint, or it was altered.
        ModelError: The checkpoint belongs to another model than the run.
    """
    folders = {int(folder.name.removeprefix("step-")): folder for folder in checkpoint.saved(run.checkpoints)}
    before = [version for version in folders if version <= step]
    if not before:
        there = ", ".join(map(str, folders)) or "none"
        alone = "advantages,loss" if run.steps.by_clew else "data"
        raise RecordError(
            f"{run.path} has no checkpoint at or before step {step} (there: {there}), and steps are trained again from "
            f"a checkpoint on. `clew replay RUN --step {step} --stage {alone}` needs none."
        )
    for version in {before[0], before[-1]}:
        checkpoint.check_files(folders[version])
    config = configuration.load(run.config_path)
    recorded = run.steps.read(before[-1]) if before[-1] < run.steps.count() else None
    if recorded is not None:
        config = config.model_copy(update=_configured(run, recorded))
    config = _portable(config, folders, device, ranks)
    torch.set_num_threads(recorded["environment"]["threads"] if recorded else config.threads)
    make_deterministic(config.training)
    engine = TrainEngine(config, model_path=str(folders[before[-1]]), ranks=ranks, media=run.media)
    checkpoint.load(engine, folders[before[-1]])
    if config.algorithm.kl_coef > 0 and 0 in before[:-1]:
        checkpoint.check(folders[0], engine)
    _check_belongs(run, engine, folders[before[-1]])
    return engine


def _check_belongs(run: RunDirectory, engine: TrainEngine, folder: Path) -> None:
    """Check that a checkpoint is what the step before it left.

    Raises:
        ModelError: The checkpoint is of another model than the run's.
        RecordError: Its weights are not what the step before it left.
    """
    said = run.facts().get("parameters", engine.parameter_names)
    names, ours = ([name for name in side if not name.startswith("critic.")] for side in (said, engine.parameter_names))
    if names != ours:  # a critic it may have had for a while
        strange = sorted(set(names) ^ set(ours)) or ["their order"]
        raise ModelError(
            f"{folder} belongs to another model than {run.path}: {strange[0]} is in one of them alone. Put the run's "
            f"own checkpoint there, or remove it, and replay begins at the one before."
        )
    step = engine.version - 1
    tensors = run.steps.read(step)["tensors"] if run.steps.json_path(step).exists() else {}
    if "weights" in tensors:
        now = to_hex(engine.weights_digests().values())
        then = tensors["weights"] if engine.critic is not None else tensors["weights"][: len(now)]
        found = differences.in_tensors(step, "update", engine.parameter_names, then, now)
        if found is not None:
            raise RecordError(
                f"{folder} is not what step {step} left: {found.where}: {found.recorded} recorded, {found.found} in "
                f"the checkpoint. Remove it, and replay begins at the one before."
            )


def _configured(run: RunDirectory, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the configuration that a step was trained with; the run may have changed them since.

    Raises:
        RecordError: The recorded configuration cannot be read.
    """
    training, algorithm = configured(run.steps.json_path(recorded["step"]), recorded)
    found: dict[str, Any] = {"training": training, "algorithm": algorithm}
    seed = recorded["config"].get("seed")  # older steps have none
    return found if seed is None else found | {"seed": seed}


def _portable(config: Config, folders: dict[int, Path], device: str | None, ranks: Ranks) -> Config:
    """Return the configuration with paths and devices of this machine, and training.tp adapted to the ranks."""
    where = device or config.model.device
    if device is None and where == "cuda" and not torch.cuda.is_available():
        where = "cpu"  # how it was compared, and why, says so
    path = str(folders.get(0, config.model.path))  # the model that the run began with, for the KL term
    model = config.model.model_copy(update={"path": path, "device": where})
    critic = {"critic": str(folders[0] / checkpoint.CRITIC)} if 0 in folders and config.algorithm.critic else {}
    training = config.training.model_copy(update={"tp": math.gcd(config.training.tp, ranks.size)})
    algorithm = config.algorithm.model_copy(update=critic)
    return config.model_copy(update={"model": model, "training": training, "algorithm": algorithm})


def replay(run: RunDirectory, engine: TrainEngine, last: int, *, verify: bool = True) -> Iterator[Step]:
    """Train the steps from the engine's version to `last` again, and yield each with its differences from the record.

    Args:
        run: The run directory.
        engine: The engine, from `engine_at`.
        last: Last step to train.
        verify: Whether to compare; if False, differences do not stop the replay.

    Raises:
        DifferenceFound: A batch is not what was trained on.
    """
    drifted = ""
    for step in range(engine.version, last + 1):
        recorded, batch = run.steps.read(step), run.steps.read_data(step)
        stages = run.steps.read_stages(step)
        found = differences.in_batch(step, stages.digests, batch, recorded["digests"]["data"])
        if found is not None and verify:
            raise DifferenceFound(run, found)
        configure_as(run, engine, recorded)
        tolerance, because = how_to_compare(recorded, engine)
        if not tolerance.exact and not drifted:
            drifted = f"the weights, which step {step} left within a tolerance"
        if tolerance.exact and drifted:
            tolerance, because = TOLERANCES[engine.config.model.dtype], drifted
        result = engine.train_step(batch)
        found = compare(run, step, batch, result, recorded, stages, engine, tolerance) if verify else []
        doubt = ""
        if found and tolerance.exact:
            doubt = rounding_doubt(environment_of(recorded), environment(engine))
        if doubt and all(recorded["tensors"].get(name) != now for name, now in result.tensor_digests.items()):
            # gradients or weights that agree bit for bit show that both round alike
            near = TOLERANCES[engine.config.model.dtype]
            beyond = compare(run, step, batch, result, recorded, stages, engine, near)
            if not beyond or str(beyond[0]) != str(found[0]):
                tolerance, because = near, f"{found[0]}: this is within rounding, and {doubt}"
                drifted, found = f"the weights, which step {step} left within a tolerance", beyond
        yield Step(step=step, result=result, tolerance=tolerance, because=because, differences=found)


def configure_as(run: RunDirectory, engine: TrainEngine, recorded: dict[str, Any] | None) -> None:
    """Set the engine's seed, optimizer and algorithm as they were at a step; the run may have changed them since.

    Args:
        run: The run directory.
        engine: The engine.
        recorded: The step's record; None: take them from the run's configuration as it is.
    """
    was = _configured(run, recorded) if recorded else dict(configuration.load(run.config_path))
    training, algorithm = was["training"].model_copy(update={"tp": engine.ranks.tp}), was["algorithm"]
    algorithm = algorithm.model_copy(update={"critic": engine.config.algorithm.critic})  # which is where it is here
    if (training, algorithm) != (engine.config.training, engine.config.algorithm):
        engine.configure(training, algorithm)
    if "seed" in was:
        engine.config = engine.config.model_copy(update={"seed": was["seed"]})


def compare(
    run: RunDirectory,
    step: int,
    batch: list[Sequence],
    result: StepResult,
    recorded: dict[str, Any],
    stages: Stages,
    engine: TrainEngine,
    tolerance: Tolerance,
) -> list[Difference]:
    """Return where a retrained step differs from its record, in the order in which its stages are computed.

    Args:
        run: The run directory.
        step: Number of the step.
        batch: Its sequences.
        result: Result of training it again.
        recorded: Its recorded JSON.
        stages: Its recorded stages.
        engine: The engine after the step.
        tolerance: Limit within which two values agree.
    """
    found: list[Difference | None] = []

    def hold(name: str, rows: SequenceABC[int], update: int = 0) -> Difference | None:
        there = ["present" if name in side else "absent" for side in (stages.arrays, result.stages)]
        if "absent" in there:
            return Difference(
                step=step, stage=name, where="the stage", position=None, recorded=there[0], found=there[1]
            )
        ids = [batch[row].id for row in rows]
        then = [stages.arrays[name][each] for each in ids]
        now = [result.stages[name][row].astype(np.float32, copy=False) for row in rows]  # as they are kept
        how = EXACT if name == "advantages" and not _from_logprobs(engine.config.algorithm) else tolerance
        after = update > 0 and tolerance.exact  # otherwise gradients are not compared
        difference = differences.in_stage(step, name, ids, then, now, how, after_update=after)
        if difference is not None and name in ("advantages", "loss") and not any(found):
            difference = suspected(difference, batch, stages, recorded, engine.config.algorithm, checked=True)
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
            found.append(_gradients(step, number, result, recorded, engine))
    found.append(_weights(step, result, recorded, engine, tolerance))
    if tolerance.exact and not any(found):
        found += _said(step, batch, result, recorded)
    written = (run.checkpoints / f"step-{step + 1:06d}" / "checkpoint.json").exists()
    if written and (tolerance.exact or not any(found)):
        found.append(_checkpoint(run, step, engine, tolerance))
    return [each for each in found if each is not None]


def _from_logprobs(algorithm: Algorithm) -> bool:
    """Return whether advantages depend on what a model computed, not on recorded rewards alone."""
    return algorithm.advantages == "gae" or (algorithm.kl_in == "reward" and algorithm.kl_coef > 0)


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


def _said(
    step: int, batch: list[Sequence], result: StepResult, recorded: dict[str, Any]
) -> Iterator[Difference | None]:
    """Yield differences in the rest of step-N.json: digests of all tensors, groups, versions, plan, metrics."""
    for kind, now in result.digests.items():
        then = recorded["digests"].get(kind)
        if then != now:
            stage = f"digests of {kind}"
            yield Difference(step=step, stage=stage, where="of all", position=None, recorded=then, found=now)
    for name, now in {"step": step, **facts_of(batch, step), "plan": result.plan}.items():
        if (then := recorded.get(name)) != now:
            yield Difference(step=step, stage=name, where="of all", position=None, recorded=then, found=now)
    yield differences.in_metrics(step, *_of_same_formulas(recorded, result.metrics))


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


def stop_at(engine: TrainEngine, steps: range, stage: str) -> None:
    """Make the engine stop in a debugger whenever it comes to `stage` of one of these steps.

    The stage's inputs are in scope. Before the loss and before its backward pass, it stops in each micro-batch.
    """
    known: dict[str, Any] = {}

    def watch(at: str, scope: dict[str, Any]) -> None:
        known.update({name: scope[name] for name in ("batch", "tokens", "plan") if name in scope})
        if at != stage or engine.version not in steps:
            return
        names = {"engine": engine, "model": engine.model, "step": engine.version, **known, **scope}
        where = ""
        if "micro" in scope:
            # rows_N counts the rows of the micro-batch
            names["batch_rows_N"] = rows_N = known["tokens"].row_of_S[scope["micro"].where_N]
            minibatches = [[set(rows) for rows in minibatch] for minibatch in known["plan"]]
            update, micro, count = next(
                (number, place, len(minibatch))
                for number, minibatch in enumerate(minibatches)
                for place, rows in enumerate(minibatch)
                if set(rows_N.tolist()) <= rows
            )
            where = f" of micro-batch {micro} of {count} in update {update} (token i is of batch[batch_rows_N[i]])"
        print(
            f"step {engine.version}, before {stage}{where}. In scope: {', '.join(names)}", file=sys.stderr, flush=True
        )
        exec(compile("breakpoint()\npass\n", f"<step {engine.version}, before {stage}>", "exec"), names)

    engine.watch = watch
