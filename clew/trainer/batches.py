"""Batches outside their run: dumped by one run, trained on by another (config section debug)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clew.config import Config
from clew.errors import RecordError
from clew.record import rows
from clew.record.files import write_bytes
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.training.padded import load_padded, save_padded


def dump(config: Config, run: RunDirectory, step: int) -> None:
    """Copy the batch of a committed step to debug.path."""
    assert config.debug.path is not None
    folder = Path(config.debug.path)
    folder.mkdir(parents=True, exist_ok=True)
    if config.debug.format == "pt":
        save_padded(folder / f"step-{step:06d}.pt", run.steps.read_data(step))
    else:
        write_bytes(folder / f"step-{step:06d}.parquet", run.steps.data_path(step).read_bytes())


class ReplayedSource:
    """The batches in debug.path: a folder of dumps, or a run directory, which stays as it is. Each becomes the batch
    of the same step here. Filters of the configuration are applied again."""

    def __init__(self, config: Config, run: RunDirectory, check: Callable[[], None]) -> None:
        """check: called before each batch; it may raise to end the replay."""
        assert config.debug.path is not None
        folder = Path(config.debug.path)
        self._folder = folder / "steps" if (folder / "steps").is_dir() else folder
        self._filter = config.rollout.drop_equal_rewards
        self._run = run
        self._check = check

    def batch(self, step: int) -> list[Sequence]:
        self._check()
        if not self._run.steps.has_data(step):
            kept = self._filtered(step, self._read(step))
            self._run.steps.write_data(step, rows.to_table(kept))
        return self._run.steps.read_data(step)

    def _read(self, step: int) -> list[Sequence]:
        path = self._folder / f"step-{step:06d}"
        if path.with_suffix(".pt").exists():
            return load_padded(path.with_suffix(".pt"))
        if not path.with_suffix(".parquet").exists():
            steps = sorted(int(each.stem[5:]) for each in self._folder.glob("step-*.p*"))
            there = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
            raise RecordError(
                f"debug.path={self._folder} has no batch of step {step} ({there}). Set training.steps to what is "
                f"there, or name another folder."
            )
        return rows.from_table(rows.read_table(path.with_suffix(".parquet")))

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
