"""`clew replay RUN --step 137 key=value`: train on recorded batches again, with other settings.

The new run starts at the first of the chosen steps (debug.first_step).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np

from clew import config as configuration
from clew.config import Config
from clew.console import EscapingConsole
from clew.diagnose.causes import table_of_changes, with_sections_at
from clew.diagnose.stages import read_batch_with_warning
from clew.errors import ConfigError, Interrupted, RecordError
from clew.loop.differences import differs
from clew.loop.replay import configuration_at
from clew.loop.tolerance import TOLERANCES, Tolerance
from clew.loop.trainer_process import learn_from_record
from clew.printing import print
from clew.record.origin import mark_foreign, why_foreign
from clew.record.run import RunDirectory
from clew.training import checkpoint
from clew.training.optimizer import GradientError

COMPARED = ("loss", "grad_norm", "reward", "entropy", "behaviour_k3", "clip_share", "rejected_share", "kl", "lr")
"""Metrics that are compared. The table shows those that differ."""


def counterfactual(run: RunDirectory, steps: range, overrides: list[str], *, from_bundle: bool) -> None:
    """Train on the recorded data of some steps with other settings, and print a table of both runs.

    The result goes into a new run directory. If the new run is interrupted, the same command with the same trial
    continues it. If it fails or is interrupted before it commits a step of its own, its directory is removed, unless
    `clew blame` can say more about the batch.

    Args:
        from_bundle: True if `run` is an unpacked bundle. A stranger may have written its configuration, so the new run
            is placed below the default `root`. If False, it is placed beside `run` or, if `run` was copied or renamed,
            in a folder beside it that has the experiment's name.

    Raises:
        ClewError: The steps cannot be trained, or the new run directory is already in use.
    """
    first, last = steps[0], steps[-1]
    config = _configured(run, first, overrides, Path(Config.model_fields["root"].default) if from_bundle else None)
    for step in steps:
        read_batch_with_warning(run, step)
    going_on = config.run_path.exists() and _left_unfinished(config, run, last)
    try:
        config.run_path.mkdir(parents=True, exist_ok=going_on)
    except FileExistsError:  # perhaps just now: the same command may run several times at once
        raise RecordError(
            f"{config.run_path} already exists, and this command did not leave it unfinished. Choose another "
            f"trial=NAME, or remove it."
        ) from None
    new = RunDirectory(config.run_path)
    if why := "it came as a bundle" if from_bundle else why_foreign(run):
        mark_foreign(new, why)  # it has the stranger's configuration
    print(f"training from step {first} on with {' '.join(overrides)}, into {new.path}", flush=True)
    try:
        learn_from_record(config, lambda step, summary: None, until=steps.stop)
    except BaseException as error:
        blamed = isinstance(error, GradientError) and new.steps.has_data(first)
        left = going_on or blamed or new.steps.count() > first
        if not left:
            shutil.rmtree(new.path)
        if isinstance(error, Interrupted | KeyboardInterrupt):
            going_on_with = f"interrupted. The same command with trial={config.trial} goes on with {new.path}."
            nothing = "interrupted before the first step: its directory was removed. Start the same command again."
            raise Interrupted(going_on_with if left else nothing) from None
        raise
    _print_changes(run, new, steps, overrides)


def _print_changes(run: RunDirectory, new: RunDirectory, steps: range, overrides: list[str]) -> None:
    """Print the metrics that differ between the recorded steps and the new ones, or that there are none."""
    last = steps[-1]
    recorded = {step: run.steps.read(step) for step in steps if step < run.steps.count()}
    ours = {step: new.steps.read(step) for step in steps}
    rows = [(step, recorded.get(step, {}).get("metrics", {}), ours[step]["metrics"]) for step in steps]  # {}: it failed
    changed = [name for name in COMPARED if any(differs(then.get(name), now.get(name)) for _, then, now in rows)]
    if not changed:
        weights = {each.steps.read(last)["digests"].get("weights") for each in (run, new)}
        if len(weights) == 1:
            print(f"no metric differs: {' '.join(overrides)} has no effect on these steps on the same data.")
        else:  # metrics are taken before the update, so those of the next step show it first
            print(f"all metrics are identical, but the weights after step {last} differ. Replay the next step, too.")
        return
    EscapingConsole(wide=200).print(table_of_changes("step", changed, rows, title="recorded → here"))
    near = TOLERANCES[configuration.load(new.config_path).model.dtype]
    if any(then.get("environment") != ours[step].get("environment") for step, then in recorded.items()):
        alike = [n for n in changed if all(_agree(then.get(n), now.get(n), near) for _, then, now in rows)]
        if rounded := [name for name in alike if name not in ("lr", "reward")]:
            print(
                f"{', '.join(rounded)}: equal {near}. The record is of other ranks, threads, packages or processors, "
                f"so this may be rounding alone. Replay the next step, too."
            )
    print(f"→ clew show {shlex.quote(str(new.path))} {last}")


def _agree(recorded: float | None, found: float | None, near: Tolerance) -> bool:
    if recorded is None or found is None:
        return recorded is found
    return bool(near.agree(np.array([recorded]), np.array([found]))[0])


def _configured(run: RunDirectory, first: int, overrides: list[str], root: Path | None) -> Config:
    """Return the new run's configuration. It begins with step `first`, and is placed below `root` or beside `run`."""
    recorded = with_sections_at(run, configuration_at(run, first), first, "rollout", "sampling", "reward")
    if root is None:
        folder = Path(os.path.normpath(run.path / ".."))  # Path(".").parent is "." again
        moved = folder.resolve().name != recorded.experiment  # the run was copied or renamed
        root = folder if moved else Path(os.path.normpath(folder / ".."))
    ours = [
        f"root={_quoted(root)}",
        f"experiment={_quoted(recorded.experiment)}",
        f"trial={_quoted(_free_trial(root / recorded.experiment, recorded.trial))}",
    ]
    forced = [  # after the user's overrides, so that they cannot be overridden
        "launch.devices=null",
        "launch.ranks=1",
        "training.tp=1",
        "debug.replay_rollout_data=true",
        "debug.dump_rollout_data=false",
        "debug.format=parquet",
        f"debug.path={_quoted(run.path)}",
        f"debug.first_step={first}",
    ]
    config = configuration.parse(configuration.dump(recorded), run.config_path, [*ours, *overrides, *forced])
    if config.model.path != recorded.model.path:
        raise ConfigError(
            f"model.path={config.model.path}: the model cannot be changed, because step {first} begins with weights of "
            f"{run.path}. To train another model, use `clew train` with debug.replay_rollout_data."
        )
    if first == 0 and 0 in run.checkpointed():  # model.path may hold another model by now, or be gone
        begun = run.checkpoint(0)
        checkpoint.check_files(begun)
        algorithm = config.algorithm
        if algorithm.critic == recorded.algorithm.critic and (begun / checkpoint.CRITIC).is_dir():
            algorithm = algorithm.model_copy(update={"critic": str(begun / checkpoint.CRITIC)})
        model = config.model.model_copy(update={"path": str(begun)})
        config = config.model_copy(update={"model": model, "algorithm": algorithm})
    return config


def _quoted(value: object) -> str:
    """Return a value in quotes, so that YAML reads it as text even if it is 007 or a path with " #" in it."""
    return json.dumps(str(value), ensure_ascii=False)


def _left_unfinished(config: Config, run: RunDirectory, last: int) -> bool:
    """Return whether the existing run directory was begun by the same command and has not reached step `last`."""
    if not (config.run_path / "config.yaml").exists():
        return False
    new = RunDirectory(config.run_path)
    if "trainer" in new.facts():  # another trainer recorded it
        return False
    then, first = configuration.load(new.config_path), config.debug.first_step
    model, algorithm = then.model, then.algorithm
    if first:
        # The new run's config.yaml names its own first checkpoint as the model, and a critic in that checkpoint.
        model = model.model_copy(update={"path": config.model.path})
        algorithm = algorithm.model_copy(update={"critic": config.algorithm.critic})
    debug = then.debug.model_copy(update={"path": config.debug.path})  # a bundle is unpacked elsewhere each time
    return (
        then.model_copy(update={"model": model, "algorithm": algorithm, "debug": debug}) == config
        and max(new.checkpointed(), default=-1) >= first
        and new.steps.index()[:first] == run.steps.index()[:first]
        and new.steps.count() <= last
    )


def _free_trial(experiment: Path, trial: str) -> str:
    number = 1
    while (experiment / f"{trial}-replay-{number}").exists():
        number += 1
    return f"{trial}-replay-{number}"
