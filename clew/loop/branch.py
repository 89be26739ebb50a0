"""A new run that shares its first steps with another run, and continues with steps of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from clew.config import Config
from clew.dotted import only_trusted
from clew.errors import ConfigError, RecordError
from clew.loop.loop import save_checkpoint
from clew.loop.replay import configuration_at, engine_at, replay
from clew.printing import counted
from clew.record.files import write_bytes
from clew.record.origin import why_foreign
from clew.record.run import RunDirectory
from clew.training.checkpoint import CRITIC
from clew.training.engine import TrainEngine
from clew.training.ranks import Ranks
from clew.training.saving import written_aside


def begin(config: Config, ranks: Ranks) -> Config:
    """Begin a new run at debug.first_step of the recorded run in debug.path, with the state that it had there.

    That state is reached by training the recorded steps since the last checkpoint again, on these ranks. If the new run
    has begun already, it goes on. The returned configuration has the model that both runs began with, for the KL term,
    and their first critic.

    Raises:
        ConfigError: The new run has other updates per step, and a schedule that counts them.
        RecordError: There is no run directory, or no checkpoint at or before that step; or the steps from there cannot
            be repeated; or the new run already has steps of its own.
    """
    assert config.debug.path is not None
    first, path, new = config.debug.first_step, Path(config.debug.path), RunDirectory(config.run_path)
    if max(new.checkpointed(), default=0) >= first:
        return _with_first_model(config, new)
    if not (path / "checkpoints").is_dir():
        raise RecordError(
            f"debug.first_step={first} begins with what the steps before it left, and debug.path={path} is no run "
            f"directory with checkpoints. Name the run directory, or leave debug.first_step out."
        )
    source = RunDirectory(path, make=False)
    before = configuration_at(source, first).algorithm.minibatches
    if config.training.schedule != "constant" and config.algorithm.minibatches != before and not source.supervised:
        raise ConfigError(
            f"algorithm.minibatches={config.algorithm.minibatches}: each step before step {first} has "
            f"{counted(before, 'update')}, and training.schedule={config.training.schedule} counts the updates of the "
            f"whole run. Leave it at {before}, or choose training.schedule=constant."
        )
    ours = (config.algorithm.loss, config.algorithm.advantages)  # the user named these
    with only_trusted(why_foreign(source), [name.rpartition(".")[0] for name in ours]):
        engine = engine_at(source, first, ranks=ranks)
        for done in replay(source, engine, first - 1):
            if done.differences:
                raise RecordError(
                    f"step {done.step} of {path} differs when it is trained again, so nothing can begin at step "
                    f"{first}: {done.differences[0]}"
                )
    branch(source, new, engine)
    return _with_first_model(config, new)


def _with_first_model(config: Config, run: RunDirectory) -> Config:
    first, algorithm = run.checkpoint(run.checkpointed()[0]), config.algorithm
    if algorithm.critic is not None and (first / CRITIC).is_dir():
        algorithm = algorithm.model_copy(update={"critic": str(first / CRITIC)})
    model = config.model.model_copy(update={"path": str(first)})
    return config.model_copy(update={"model": model, "algorithm": algorithm})


def branch(source: RunDirectory, run: RunDirectory, engine: TrainEngine) -> None:
    """Let `run` continue from the step that `engine` has reached in `source`. It must be new, or only have begun this.

    The commits of earlier steps are copied without their data. The engine's state becomes a checkpoint, and so does the
    first checkpoint of `source`: the model that both runs began with. All ranks must call this together.
    """
    first = source.checkpoint(source.checkpointed()[0])
    there, saved = run.steps.count(), run.checkpointed()
    copied = saved in ([], source.checkpointed()[:1]) and all(_copied(step, source, run) for step in range(there))
    if (there or saved) and not (copied and 0 < there <= engine.version):  # not one that was killed in here
        raise RecordError(f"{run.path} has steps or checkpoints already. Choose another trial=NAME.")
    engine.ranks.meet()  # every rank has passed the check above, which fails once rank 0 writes
    if engine.ranks.leads:
        for earlier in range(engine.version):
            write_bytes(run.steps.json_path(earlier), source.steps.json_path(earlier).read_bytes())
        run.steps.repair()  # makes index.jsonl of them
        with written_aside(run.checkpoints / first.name) as aside:
            shutil.copytree(first, aside, dirs_exist_ok=True)
    save_checkpoint(run, engine)


def _copied(step: int, source: RunDirectory, run: RunDirectory) -> bool:
    """Return whether the commit of a step of `run` is that of `source`."""
    ours, theirs = run.steps.json_path(step), source.steps.json_path(step)
    return theirs.exists() and ours.read_bytes() == theirs.read_bytes()
