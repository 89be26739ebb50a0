"""Functions of `import clew` that call what the commands of the same name call, and a run as DataFrames."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew import config as configuration
from clew.config import Config
from clew.errors import ConfigError, explain_missing
from clew.record import rows
from clew.record.run import RunDirectory
from clew.record.run import open_run as open_directory

if TYPE_CHECKING:
    import pandas


def train(config: Config | Path | str, overrides: Sequence[str] = ()) -> Run:
    """Train by reinforcement until the last step, as `clew train` does, and print a line for each step. ::

        run = clew.train("examples/addition/grpo.yaml", ["training.steps=5", "trial=try"])

    A run that was killed goes on.

    Args:
        config: A configuration, or the YAML file with one.
        overrides: Fields to override, as key=value.

    Returns:
        The run. Its weights are in `run.path / "checkpoints" / "latest"`.

    Raises:
        ClewError: The configuration is invalid, or the run ended before its last step.
    """
    with explain_missing(), _as_file(config) as path, ExitStack() as stack:
        from clew.view.terminal import Progress

        loaded = configuration.load(path, list(overrides))
        run = RunDirectory(loaded.run_path)
        progress = stack.enter_context(Progress(run, loaded.training.steps, live=False))
        if loaded.debug.replay_rollout_data:
            from clew.loop.learn import learn_from_record

            if loaded.launch.ranks > 1:
                raise ConfigError(
                    f"Cannot train on recorded batches with launch.ranks={loaded.launch.ranks}: this process is one "
                    f"rank. Set launch.ranks=1, or use the command `clew train`."
                )
            with drawn(run):
                learn_from_record(loaded, progress.refresh)
        elif loaded.launch.mode == "inline":
            from clew.loop.learn import learn_inline

            with drawn(run):
                learn_inline(loaded, progress.refresh)
        else:
            from clew.launch.local import supervise

            supervise(loaded, [str(path), *overrides], progress.refresh)
    return open_run(loaded.run_path)


@contextmanager
def drawn(run: RunDirectory) -> Iterator[None]:
    """Draw the learning curve when the block has ended, also by an error after a new step; on rank 0."""
    from clew.training.ranks import rank_here
    from clew.view.learning_curve import draw_learning_curve

    before, ended = run.steps.count(), False
    try:
        yield
        ended = True
    finally:
        if rank_here() == 0 and (ended or run.steps.count() > before):
            draw_learning_curve(run)


def replay(
    run: Path | str,
    step: int | str | None = None,
    *,
    stages: Sequence[str] = (),
    reward: bool = False,
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
) -> bool:
    """Train recorded steps again and compare each stage with the record, as `clew replay` does, and print the result.

    Args:
        run: A run directory or a bundle.
        step: A step, such as 137, or several, such as "130:140"; None: all.
        stages: Compare these stages alone, without a model: data, rewards, advantages, loss.
        reward: Run the workflow and the reward again on the recorded answers instead.
        overrides: Train with these fields changed, as key=value, into a new run.
        trust: Modules that a stranger's record may load.

    Returns:
        True if everything agrees with the record.

    Raises:
        ClewError: The options contradict one another, or the steps cannot be replayed.
    """
    with explain_missing():
        from clew.diagnose.rerun import rerun

        return rerun(
            Path(run),
            None if step is None else str(step),
            stages=",".join(stages) or None,
            only=None,
            stop=None,
            reward=reward,
            device=None,
            overrides=list(overrides),
            trust=list(trust),
        )


def open_run(path: Path | str) -> Run:
    """Open a run directory to read it. Nothing in it is created or changed.

    Raises:
        RecordError: There is no run directory.
    """
    return Run(open_directory(path))


class Run:
    """A run: its configuration, steps, sequences and evaluations.

    What is named DataFrame needs pandas: `pip install "clew[pandas]"`.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        """The run directory, with methods for each of its files."""
        self.path = directory.path
        """Path of the run directory."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self)} steps)"

    def __len__(self) -> int:
        """Return the number of committed steps."""
        return self.directory.steps.count()

    @cached_property
    def config(self) -> Config:
        """Return the configuration of the newest step. Raises ConfigError if another trainer wrote its own."""
        return configuration.load(self.directory.config_path)

    def sequences(self, step: int) -> list[rows.Sequence]:
        """Return the sequences that a step was trained on. Raises RecordError if they are gone or altered."""
        return self.directory.steps.read_data(step)

    def stages(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what was computed from them: an array for each stage and sequence ID, aligned with the tokens."""
        return self.directory.steps.read_stages(step).arrays

    @property
    def steps(self) -> pandas.DataFrame:
        """Return a DataFrame with one row for each step, and its metrics as columns."""
        read = [self.directory.steps.read(step) for step in range(len(self))]
        return _frame([said["metrics"] | {"committed_at": said["committed_at"]} for said in read]).rename_axis("step")

    @property
    def evaluations(self) -> pandas.DataFrame:
        """Return a DataFrame with one row for each complete evaluation."""
        return _frame(self.directory.read_evals())

    def frame(self, step: int) -> pandas.DataFrame:
        """Return a DataFrame with one row for each sequence of a step, and the columns of the record."""
        return _frame([{name: getattr(row, name) for name in rows.SCHEMA.names} for row in self.sequences(step)])

    def tokens(self, step: int) -> pandas.DataFrame:
        """Return a DataFrame with one row for each trained token of a step.

        Its columns are the ID of the sequence, the token's position, the aligned columns of the record, and the stages
        (advantages, logprobs, loss, …). Where a name is both, `current_logprobs` is the stage.
        """
        import numpy as np

        stages, found = self.stages(step), []
        for row in self.sequences(step):
            where = np.flatnonzero(row.loss_mask)
            columns = {name: getattr(row, name)[where] for name in rows.ALIGNED if name != "loss_mask"}
            computed = {
                f"current_{name}" if name in columns else name: values[row.id][where] for name, values in stages.items()
            }
            found.append(_frame({"id": row.id, "position": where} | columns | computed))
        with explain_missing():
            import pandas

            return pandas.concat(found, ignore_index=True)


def _frame(content: Any) -> pandas.DataFrame:
    with explain_missing():
        import pandas

        return pandas.DataFrame(content)


@contextmanager
def _as_file(config: Config | Path | str) -> Iterator[Path]:
    """Yield the path of a configuration; one that is no file is written to a temporary one."""
    if not isinstance(config, Config):
        yield Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="clew-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(configuration.dump(config))
        yield path
