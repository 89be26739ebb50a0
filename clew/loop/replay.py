"""Replay: train recorded steps again here, and compare each stage with what was recorded.

::

    checkpoint at or before the first step ──► recorded batch ──► train_step ──► each stage against the record
                                                    ▲                                       │
                                                    └───────────── next step ◄──────────────┘

A resumed training loop begins with it, and so do `clew replay`, `clew blame` and counterfactuals. It reads
checkpoints/ and steps/ of a run, and writes nothing into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clew import config as configuration
from clew.algorithms import FORMULAS
from clew.config import Config
from clew.errors import ModelError, RecordError
from clew.loop import differences
from clew.loop.bit_for_bit import environment, how_to_compare
from clew.loop.compare import RecordedStep, compare
from clew.loop.differences import Difference, DifferenceFound
from clew.loop.tolerance import TOLERANCES, Tolerance
from clew.record.batch_digest import to_hex
from clew.record.run import RunDirectory
from clew.record.summary import configured, environment_of, rounding_doubt
from clew.training import checkpoint
from clew.training.engine import TrainEngine, make_deterministic
from clew.training.ranks import ALONE, Ranks
from clew.training.results import StepResult


@dataclass(frozen=True, kw_only=True)
class Replayed:
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

    It needs nothing but the run directory: even the reference model is in it, as the run's first checkpoint.

    Args:
        device: Device to use in place of the run's; None: the run's.
        ranks: Ranks of the engine; the run may have had others.

    Raises:
        RecordError: There is no such checkpoint, or it was altered.
        ModelError: The checkpoint is of a different model from the run's.
    """
    folders = {version: run.checkpoint(version) for version in run.checkpointed()}
    before = [version for version in folders if version <= step]
    if not before:
        there = ", ".join(map(str, folders)) or "none"
        stages = "advantages,loss" if run.steps.by_clew else "data"
        raise RecordError(
            f"{run.path} has no checkpoint at or before step {step} (there: {there}), and steps are trained again from "
            f"a checkpoint on. `clew replay RUN --step {step} --stage {stages}` needs none."
        )
    version, folder = before[-1], folders[before[-1]]
    for needed in {before[0], version}:
        checkpoint.check_files(folders[needed])
    recorded = run.steps.read(version) if version < run.steps.count() else None
    config = _portable(configuration_at(run, version), folders, device, ranks)
    torch.set_num_threads(recorded["environment"]["threads"] if recorded else config.threads)
    make_deterministic(config.training)
    engine = TrainEngine(config, model_path=str(folder), ranks=ranks, media=run.media, supervised=run.supervised)
    checkpoint.load(engine, folder)
    if config.algorithm.kl_coef > 0 and 0 in before[:-1]:
        checkpoint.check(folders[0], engine)
    _check_belongs(run, engine, folder)
    return engine


def _check_belongs(run: RunDirectory, engine: TrainEngine, folder: Path) -> None:
    """Raise ModelError if a checkpoint is of another model, RecordError if its weights are not what its step left."""
    described = run.facts().get("parameters", engine.parameter_names)
    # without a critic, which the run may have had only for some steps
    runs, ours = ([n for n in names if not n.startswith("critic.")] for names in (described, engine.parameter_names))
    if runs != ours:
        strange = sorted(set(runs) ^ set(ours))
        why = f"{strange[0]} exists in only one of them" if strange else "other parameters of it are trained"
        raise ModelError(
            f"Checkpoint {folder} does not match {run.path}: {why}. Restore the run's own checkpoint, or remove this "
            f"one, and replay begins at the one before."
        )
    step = engine.version - 1
    tensors = run.steps.read(step)["tensors"] if run.steps.json_path(step).exists() else {}
    if "weights" in tensors and not engine.drifted:
        now = to_hex(engine.weights_digests().values())
        then = tensors["weights"] if engine.critic is not None else tensors["weights"][: len(now)]
        found = differences.in_tensors(step, "update", engine.parameter_names, then, now)
        if found is not None:
            raise RecordError(
                f"{folder} is not what step {step} left: {found.where}: {found.recorded} recorded, {found.found} in "
                f"the checkpoint. Remove it, and replay begins at the one before."
            )


def configuration_at(run: RunDirectory, step: int) -> Config:
    """Return the run's configuration, with the parts that a committed step was trained with in place of the newest."""
    config = configuration.load(run.config_path)
    if step >= run.steps.count():
        return config
    return config.model_copy(update=_configured(run, run.steps.read(step)))


def _configured(run: RunDirectory, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the configuration that a step was trained with; the run may have changed them since."""
    if "training" not in recorded["config"]:  # a bundle has only the index of the steps before its own
        raise RecordError(run.steps.gone(recorded["step"]))
    training, algorithm = configured(run.steps.json_path(recorded["step"]), recorded)
    found: dict[str, Any] = {"training": training, "algorithm": algorithm}
    seed = recorded["config"].get("seed")  # older steps have none
    return found if seed is None else found | {"seed": seed}


def _portable(config: Config, folders: dict[int, Path], device: str | None, ranks: Ranks) -> Config:
    """Return the configuration with this machine's paths and devices, and with training.tp adapted to the ranks."""
    where = device or config.model.device
    if device is None and where == "cuda" and not torch.cuda.is_available():
        where = "cpu"  # `how_to_compare` gives this as its reason
    path = str(folders.get(0, config.model.path))  # the model that the run began with, for the KL term
    model = config.model.model_copy(update={"path": path, "device": where})
    critic = {"critic": str(folders[0] / checkpoint.CRITIC)} if 0 in folders and config.algorithm.critic else {}
    training = config.training.model_copy(update={"tp": math.gcd(config.training.tp, ranks.size)})
    algorithm = config.algorithm.model_copy(update=critic)
    return config.model_copy(update={"model": model, "training": training, "algorithm": algorithm})


def replay(run: RunDirectory, engine: TrainEngine, last: int, *, verify: bool = True) -> Iterator[Replayed]:
    """Train the steps from the engine's version to `last` again, and yield each with its differences from the record.

    Args:
        engine: The engine, at a checkpoint of the run.
        verify: True to compare each step with its record.

    Raises:
        DifferenceFound: A batch is not what was trained on; only checked with `verify`.
    """
    drifted = ""  # reason why the weights are no longer those of the record bit for bit; empty while they are
    for step in range(engine.version, last + 1):
        recorded = RecordedStep.read(run, step)
        whole = recorded.summary["digests"]["data"]
        if verify and (altered := differences.in_batch(step, recorded.stages.digests, recorded.batch, whole)):
            raise DifferenceFound(run, altered)
        configure_as(run, engine, recorded.summary)
        done = _train_again(recorded, engine, drifted, verify=verify)
        if not done.tolerance.exact and not drifted:  # no later step can be equal bit for bit
            drifted = f"the weights, which step {step} left within a tolerance"
            engine.drifted = True
        yield done


def _train_again(recorded: RecordedStep, engine: TrainEngine, drifted: str, *, verify: bool) -> Replayed:
    """Train a recorded step again, and compare it with its record.

    Args:
        drifted: Reason why the weights are no longer those of the record bit for bit; empty if they are.
    """
    near = TOLERANCES[engine.config.model.dtype]
    tolerance, because = how_to_compare(recorded.summary, engine)
    if tolerance.exact and drifted:
        tolerance, because = near, drifted
    result = engine.train_step(recorded.batch)
    found = compare(recorded, result, engine, tolerance) if verify else []
    done = Replayed(step=recorded.step, result=result, tolerance=tolerance, because=because, differences=found)
    if not found or not tolerance.exact or not (doubt := _rounding_doubt(recorded, result, engine)):
        return done
    # Differences within the tolerance count as another processor's rounding; those beyond it are reported.
    beyond = compare(recorded, result, engine, near)
    if beyond and str(beyond[0]) == str(found[0]):
        return done
    because = f"{found[0]}: this is within rounding, and {doubt}"
    return replace(done, tolerance=near, because=because, differences=beyond)


def _rounding_doubt(recorded: RecordedStep, result: StepResult, engine: TrainEngine) -> str:
    """Return why this step may have been rounded differently from its record; empty if nothing suggests that."""
    then = environment_of(recorded.summary)
    of_same_formulas = then["rounding"].get("formulas", 1) == FORMULAS  # older records do not name them
    agree = any(recorded.summary["tensors"].get(name) == now for name, now in result.tensor_digests.items())
    if agree and of_same_formulas:  # equal gradients or weights show that both round alike
        return ""
    return rounding_doubt(then, environment(engine))


def configure_as(run: RunDirectory, engine: TrainEngine, recorded: dict[str, Any] | None) -> None:
    """Set the engine's seed, optimizer and algorithm as they were at a step; the run may have changed them since.

    Args:
        recorded: The step's record; None: take them from the run's configuration as it is.
    """
    was = _configured(run, recorded) if recorded else dict(configuration.load(run.config_path))
    training, algorithm = was["training"].model_copy(update={"tp": engine.ranks.tp}), was["algorithm"]
    algorithm = algorithm.model_copy(update={"critic": engine.config.algorithm.critic})  # a path on this machine
    if (training, algorithm) != (engine.config.training, engine.config.algorithm):
        engine.configure(training, algorithm)
    if "seed" in was:
        engine.config = engine.config.model_copy(update={"seed": was["seed"]})
