"""Batches outside their run: dumped by one run and trained on by another (configuration section `debug`)."""

from __future__ import annotations

from pathlib import Path

from clew import config as configuration
from clew.config import Config
from clew.errors import RecordError
from clew.record import rows
from clew.record.batch_digest import digest_batch, digest_rows
from clew.record.files import explain_disk_errors, write_bytes
from clew.record.media import Media
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.training.padded import load_padded, save_padded


def check_origin(run: RunDirectory, *, replayed: bool) -> None:
    """Raise RecordError when `run` began with batches of the other kind.

    Args:
        replayed: Whether batches are now replayed from debug.path, rather than made by the run's own rollout.
    """
    begun = run.steps.count() or run.steps.has_data(0)
    if not begun or not run.config_path.exists() or "trainer" in run.facts():
        return
    before = configuration.load(run.config_path).debug
    if before.replay_rollout_data != replayed:
        now, then = "the batches in debug.path", "what its own rollout makes"
        if before.replay_rollout_data:
            now, then = then, f"the batches in {before.path} (debug.replay_rollout_data)"
        raise RecordError(
            f"Cannot continue {run.path} with {now}: so far it was trained on {then}. Choose another trial=NAME."
        )


def resume_dump(config: Config, run: RunDirectory) -> None:
    """Copy the committed steps that debug.path lacks, such as the last one if copying it failed.

    Raises:
        RecordError: debug.path holds the batches of another run.
    """
    folder = _folder(config)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    index, dumped = run.steps.index(), _batches(folder)
    if dumped:
        newest = dumped[-1]
        if newest >= len(index) or _digest(_read(folder, newest)) != index[newest]["digests"]["data"]:
            raise _of_another_run(folder, newest, run)
    for step in range(len(index)):
        if step not in dumped and run.steps.has_data(step):
            _copy(config, run, step)


def dump(config: Config, run: RunDirectory, step: int) -> None:
    """Copy the batch of the newest committed step to debug.path. Raises RecordError if it has a batch of this step."""
    if step in _batches(_folder(config)):  # of a run that began after this one
        raise _of_another_run(_folder(config), step, run)
    _copy(config, run, step)


def _copy(config: Config, run: RunDirectory, step: int) -> None:
    path = _folder(config) / f"step-{step:06d}.{config.debug.format}"
    batch = run.steps.read_data(step) if config.debug.format == "pt" or run.media.folder.exists() else []
    for name in {name for row in batch for name in row.images}:
        Media(_folder(config) / "media").put(run.media.read(name))
    if config.debug.format == "pt":
        save_padded(path, batch)
    else:
        write_bytes(path, run.steps.data_path(step).read_bytes())


def _folder(config: Config) -> Path:
    assert config.debug.path is not None
    return Path(config.debug.path)


def _of_another_run(folder: Path, step: int, run: RunDirectory) -> RecordError:
    return RecordError(
        f"debug.path={folder} has a batch of step {step} that is not of {run.path}: another run was dumped there. Name "
        f"another folder, or empty this one."
    )


def _batches(folder: Path) -> list[int]:
    """Return the steps whose batches are in `folder`."""
    numbers = {path.stem.removeprefix("step-") for path in folder.glob("step-*.p*")}
    return sorted(int(number) for number in numbers if number.isdecimal())


def _read(folder: Path, step: int) -> list[Sequence]:
    path = folder / f"step-{step:06d}"
    if path.with_suffix(".pt").exists():
        return load_padded(path.with_suffix(".pt"))
    if not path.with_suffix(".parquet").exists():
        steps = _batches(folder)
        there = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise RecordError(
            f"debug.path={folder} has no batch of step {step} ({there}). Set training.steps to what is there, or name "
            f"another folder."
        )
    path = path.with_suffix(".parquet")
    return rows.checked(path, rows.read_table(path))


def _digest(batch: list[Sequence]) -> str:
    return digest_batch(digest_rows(batch))


class DumpedBatches:
    """Source of the batches in debug.path: a folder of dumps or a run directory, which is left as it is.

    Each batch becomes the batch of the same step in this run. rollout.drop_equal_rewards is applied again.
    """

    def __init__(self, config: Config, run: RunDirectory) -> None:
        """Open debug.path.

        Raises:
            RecordError: The folder does not exist, or the steps that `run` has were not trained on its batches.
        """
        folder = _folder(config)
        if not folder.is_dir():
            raise RecordError(f"debug.path={folder} does not exist: expected a folder of batches, or a run directory.")
        self._folder = folder / "steps" if (folder / "steps").is_dir() else folder
        self._media = Media(folder / "media")
        self._filter = config.rollout.drop_equal_rewards
        self._run = run
        check_origin(run, replayed=True)
        last = run.steps.count() - 1
        if last >= config.debug.first_step:
            there = _digest(self._filtered(last, _read(self._folder, last)))
            if there != run.steps.index()[last]["digests"]["data"]:
                raise RecordError(
                    f"step {last} of {run.path} was trained on another batch than debug.path={folder} has. Name the "
                    f"folder that it began with, or choose another trial=NAME."
                )

    def write(self, step: int) -> None:
        if not self._run.steps.has_data(step):
            kept = self._filtered(step, _read(self._folder, step))
            for name in {name for row in kept for name in row.images}:
                has = [media for media in (self._media, self._run.media) if media.path(name).exists()]
                self._run.media.put((has or [self._media])[0].read(name))  # an image that is put is kept for a day
            self._run.steps.write_data(step, rows.to_table(kept))

    def _filtered(self, step: int, batch: list[Sequence]) -> list[Sequence]:
        if not self._filter:
            return batch
        rewards: dict[str, set[float]] = {}
        for row in batch:
            rewards.setdefault(row.group_id, set()).add(row.reward)
        kept = [row for row in batch if len(rewards[row.group_id]) > 1]
        if not kept:
            raise RecordError(
                f"rollout.drop_equal_rewards leaves nothing of step {step}: in each of its {len(rewards)} groups all "
                f"rewards are equal."
            )
        return kept
