"""Resuming: the engine at the newest checkpoint, after checks that the run may go on here."""

from __future__ import annotations

import logging

from clew.config import Config
from clew.errors import ConfigError, RecordError
from clew.record import chain
from clew.record.files import remove_strays
from clew.record.run import RunDirectory, changes_in_words
from clew.training import checkpoint
from clew.training.custom import code_of
from clew.training.engine import TrainEngine
from clew.training.ranks import Ranks

log = logging.getLogger("clew.trainer")

MAY_CHANGE = (
    "training.on_bad_gradient",
    "training.spike_factor",
    "training.micro_batch_tokens",
    "training.activation_checkpointing",
)
"""Fields that may change although steps are trained again: the error of a failed step advises to change them."""


def restore(config: Config, run: RunDirectory, ranks: Ranks, *, supervised: bool = False) -> TrainEngine:
    """Return the engine at the newest checkpoint, or at the model that the run begins with.

    Args:
        supervised: True if `clew sft` trains here.

    Raises:
        ConfigError: The objective belongs to `clew sft`; or the model changed; or settings of training changed although
            steps must be trained again.
        ModelError: algorithm.kl_coef needs the model that the run began with, and model.path now holds another one.
        RecordError: The other command (`clew train` or `clew sft`) or another trainer made the run, or its record is
            inconsistent.
    """
    if config.training.objective != "sft" and not supervised:
        raise ConfigError(
            f"training.objective is {config.training.objective}, which `clew sft` trains, on preferences. Unset it for "
            f"reinforcement learning."
        )
    if ranks.leads:
        check_chain(run)
        run.clean_after_trainer()
        remove_strays(run.checkpoints, "*")
    ranks.meet()
    saved, committed = run.checkpointed(), run.steps.count()
    version = max(saved, default=0)
    _refuse_other_runs(run, version, committed, supervised)
    # A run that began in the middle of another has its first checkpoint as its model, see `clew.loop.branch`.
    if run.newest_weights() is not None or ((saved or committed) and not config.debug.first_step):
        _refuse_changes(config, run, version, committed)
    if committed > version and ranks.leads:
        log.info("resuming: checkpoint %d, then steps %d to %d from the record", version, version, committed - 1)
    engine = TrainEngine(config, ranks=ranks, media=run.media, supervised=supervised)
    if saved:
        newest = run.checkpoint(version)
        checkpoint.load(engine, newest)
        checkpoint.check_reference(engine, run.checkpoint(0))
        if ranks.leads:
            checkpoint.point("latest", newest)  # a newer one may have been removed
    if committed and ranks.leads:
        before = run.steps.read(committed - 1).get("code", {})
        for field, digest in code_of(config).items():
            if before.get(field, digest) != digest:
                log.warning("the file of %s has changed since step %d was trained", field, committed - 1)
    return engine


def _refuse_other_runs(run: RunDirectory, version: int, committed: int, supervised: bool) -> None:
    """Raise RecordError for a run that another command or trainer made, or whose newest steps are gone."""
    if version > committed:
        raise RecordError(
            f"{run.path} has a checkpoint of version {version}, but {committed} committed steps: steps were removed, "
            f"or `clew sft` of an older Clew recorded none. Choose another trial=NAME."
        )
    if committed and run.supervised != supervised:
        raise RecordError(
            f"{run.path} holds a run of `clew {'train' if supervised else 'sft'}`. Choose another trial=NAME."
        )
    if (trainer := run.facts().get("trainer")) is not None:
        raise RecordError(f"Cannot continue {run.path}: it was recorded by {trainer}. Choose another trial=NAME.")


def check_chain(run: RunDirectory) -> None:
    """Raise RecordError when the record that a run would continue from is inconsistent.

    All commits are checked, and the data and stages of the steps that will be trained again. A harmless break, which
    the run repairs by itself, only gives a warning.
    """
    again = range(max(run.checkpointed(), default=0), run.steps.count())
    for found in chain.breaks(run, again):
        if not found.harmless:
            raise RecordError(
                f"Cannot go on with {run.path}: {found} Or start another trial=NAME; nothing was changed here."
            )
        what = f"step {found.step}: {found.file} {found.why}"
        log.warning("%s: %s. It is rebuilt now; nothing to do.", run.path, what)


def _refuse_changes(config: Config, run: RunDirectory, version: int, committed: int) -> None:
    """Raise ConfigError for a change under which recorded steps, or the rest of the run, could not be trained."""
    changes = run.changes(config)
    changed = {name: changes_in_words({name: values}) for name, values in changes.items()}
    default = 2 * (config.training.lora_rank or 0)
    if len({alpha or default for alpha in changes.get("training.lora_alpha", ())}) < 2:
        changed.pop("training.lora_alpha", None)
    model = [change for name, change in changed.items() if name in ("model.path", "model.dtype", "training.lora_alpha")]
    if model:
        raise ConfigError(
            f"Cannot continue {run.path} with another model: {', '.join(model)}. A run keeps its model; start another "
            f"trial=NAME for this one."
        )
    if run.supervised and committed and "training.batch_size" in changed:
        raise ConfigError(
            f"Cannot continue {run.path} with batches of another size: {changed['training.batch_size']}. A step's rows "
            f"are counted from its number, so some would be skipped or repeated. Set it back, or start another "
            f"trial=NAME."
        )
    counts = config.training.schedule != "constant" and not run.supervised
    if counts and version and "algorithm.minibatches" in changed:
        raise ConfigError(
            f"Cannot continue {run.path} with other updates per step: {changed['algorithm.minibatches']}. "
            f"training.schedule={config.training.schedule} counts the updates of the whole run. Set it back, choose "
            f"training.schedule=constant, or start another trial=NAME."
        )
    if config.training.schedule == "constant":
        changed.pop("training.steps", None)
    changed.pop("training.tp", None)  # like launch.ranks, it only changes the order of sums
    for name in MAY_CHANGE:  # a recorded step is trained again with its own
        changed.pop(name, None)
    decisive = [change for name, change in changed.items() if name.startswith(("training.", "algorithm."))]
    if decisive and committed > version:
        raise ConfigError(
            f"steps {version} to {committed - 1} of {run.path} must be trained again after the last checkpoint "
            f"({version}), and the configuration changed since: {', '.join(decisive)}. Go on with the old values until "
            f"the next checkpoint (Ctrl-C writes one), or start another trial=NAME."
        )
