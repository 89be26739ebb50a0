"""A new run that shares its first steps with another run, and continues with steps of its own."""

from __future__ import annotations

import shutil

from clew.errors import RecordError
from clew.record.chain import committed_digest
from clew.record.files import explain_disk_errors, write_bytes
from clew.record.run import RunDirectory
from clew.training import checkpoint
from clew.training.engine import TrainEngine
from clew.training.folders import written_aside


def branch(source: RunDirectory, run: RunDirectory, engine: TrainEngine) -> None:
    """Let `run`, which must be new, continue from the step that `engine` has reached in `source`.

    The commits of earlier steps are copied without their data. The engine's state becomes a checkpoint, and so does the
    first checkpoint of `source`: the model that both runs began with. Every rank calls this at once; rank 0 writes.

    Raises:
        RecordError: `run` already has steps or checkpoints.
    """
    if run.steps.count() or checkpoint.saved(run.checkpoints):
        raise RecordError(f"{run.path} has steps or checkpoints already. Choose another trial=NAME.")
    engine.ranks.meet()  # all have looked
    if engine.ranks.leads:
        _copy_beginning(source, run, engine.version)
    follows = committed_digest(run.steps, engine.version - 1)
    checkpoint.save(engine, run.checkpoints / f"step-{engine.version:06d}", follows=follows)


def _copy_beginning(source: RunDirectory, run: RunDirectory, count: int) -> None:
    """Copy the first `count` steps, the media and the model that the run began with."""
    for earlier in range(count):
        write_bytes(run.steps.json_path(earlier), source.steps.json_path(earlier).read_bytes())
    run.steps.repair()
    if source.media.folder.exists():
        with explain_disk_errors(run.media.folder):
            shutil.copytree(source.media.folder, run.media.folder, dirs_exist_ok=True)
    first = checkpoint.saved(source.checkpoints)[0]
    with written_aside(run.checkpoints / first.name) as aside:
        shutil.copytree(first, aside, dirs_exist_ok=True)
