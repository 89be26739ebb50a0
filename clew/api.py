"""The Python interface: `import clew`.

A function with the name of a command does what that command does. `Run` returns a run's data as DataFrames.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew import config as configuration
from clew.config import Config
from clew.data import load_rows
from clew.errors import ConfigError, explain_missing
from clew.launch.preflight import check_named, refuse_unused_reward
from clew.processes import kept_signals
from clew.record import rows
from clew.record.inbox import group_name
from clew.record.run import RunDirectory
from clew.record.run import open_run as open_directory

if TYPE_CHECKING:
    import pandas
    from torch import Tensor


def train(config: Config | Path | str, overrides: Sequence[str] | str = ()) -> Run:
    """Train with reinforcement learning until the last step, as `clew train` does, and print a line for each step. ::

        run = clew.train("examples/addition/grpo.yaml", ["training.steps=5", "trial=try"])

    A run that was killed is resumed.

    Args:
        config: A configuration, or the YAML file with one.
        overrides: Fields to override, as key=value. One can be given as a string.

    Returns:
        The run. Its weights are in `run.path / "checkpoints" / "latest"`.

    Raises:
        ClewError: The configuration is invalid, or the run ended before its last step.
    """
    with explain_missing(), _as_file(config) as path:
        overrides = _listed(overrides)
        loaded = configuration.load(path, overrides)
        if loaded.debug.replay_rollout_data and loaded.launch.ranks > 1:
            raise ConfigError(
                f"Cannot train on recorded batches with launch.ranks={loaded.launch.ranks}: this process is one rank. "
                f"Set launch.ranks=1, or use the command `clew train`."
            )
        check_named(loaded)
        with kept_signals():
            train_as_configured(loaded, [str(path), *overrides], live=False)
    return open_run(loaded.run_path)


def train_as_configured(config: Config, arguments: Sequence[str], *, live: bool) -> None:
    """Train as the configuration says: on recorded batches, inline, or with one process per role.

    Args:
        arguments: File and overrides that the configuration was loaded from; child processes are started with them.
        live: Redraw the progress in place, if this is a terminal; False: print a line for each step. If user code runs
            in this process, lines are printed in any case, because its debugger needs the terminal.
    """
    from clew.view.live_table import Progress

    run = RunDirectory(config.run_path)
    in_this_process = config.debug.replay_rollout_data or config.launch.mode == "inline"
    live = live and not in_this_process
    with Progress(run, config.training.steps, live=live, warnings=not in_this_process) as progress:
        if in_this_process:
            from clew.loop.trainer_process import learn_from_record, learn_inline

            learn = learn_from_record if config.debug.replay_rollout_data else learn_inline
            with drawing_curve(run):
                learn(config, progress.refresh)
        else:
            from clew.launch.supervisor import supervise

            supervise(config, list(arguments), progress.refresh)


@contextmanager
def drawing_curve(run: RunDirectory) -> Iterator[None]:
    """Draw the learning curve on rank 0 when the block ends.

    After an error, draw it only if the block committed a new step.
    """
    from clew.training.ranks import rank_here
    from clew.view.learning_curve import draw_learning_curve

    before = run.steps.count()
    try:
        yield
    except BaseException:
        with suppress(Exception):  # an error while drawing must not hide why the run ended
            if rank_here() == 0 and run.steps.count() > before:
                draw_learning_curve(run)
        raise
    if rank_here() == 0:
        draw_learning_curve(run)


def replay(
    run: Path | str,
    step: int | str | None = None,
    *,
    stages: Sequence[str] | str = (),
    reward: bool = False,
    overrides: Sequence[str] | str = (),
    trust: Sequence[str] | str = (),
) -> bool:
    """Train recorded steps again and compare each stage with the record, as `clew replay` does, and print the result.

    Args:
        run: A run directory or a bundle.
        step: A step, such as 137, or several, such as "130:140"; None: all.
        stages: Compare only these stages, without a model: data, rewards, advantages, loss.
        reward: Run the workflow and the reward again on the recorded answers instead.
        overrides: Train with these fields changed, as key=value, into a new run.
        trust: Modules that a stranger's record may load.

    A single stage, override or module can be given as a string.

    Returns:
        True if everything agrees with the record.

    Raises:
        ClewError: The options contradict one another, or the steps cannot be replayed.
    """
    with explain_missing():
        from clew.diagnose.rerun import Options, rerun

        options = Options(
            steps=None if step is None else str(step),
            stages=",".join(_listed(stages)) or None,
            reward=reward,
            overrides=_listed(overrides),
            trust=_listed(trust),
        )
        with kept_signals():
            return rerun(Path(run), options)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Result of a rollout: the rows that training would consume, and the failed episodes."""

    rows: list[rows.Sequence]
    """Rows of the episodes with a reward, as in a recorded step."""
    failed: list[rows.Sequence]
    """One row per failed episode; `error` says why it failed."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the rows as tensors, padded on the right.

        Returns:
            input_ids, attention_mask, loss_mask, logprobs, versions, turn_ids and temperatures [B, T], and rewards [B].
        """
        from clew.training.padded import padded

        return padded(self.rows)


def rollout_batch(
    data: Sequence[Mapping[str, Any]] | str,
    *,
    model: str,
    server: str | None = None,
    n_samples: int = 1,
    seed: int = 1,
    sampling: Mapping[str, Any] | None = None,
    **rollout: Any,
) -> RolloutBatch:
    """Run a workflow or agent n_samples times on each row, up to 256 episodes at a time. ::

        batch = clew.rollout_batch(rows, model="runs/mine", reward="my_rewards.exact", n_samples=4)
        tensors = batch.to_tensors()

    In a notebook, where an event loop already runs: `batch = await asyncio.to_thread(clew.rollout_batch, rows, …)`.

    Args:
        data: Rows, or anything that data.path accepts.
        model: A folder or hub name. With `server`, only its tokenizer is loaded; without it, the model too.
        server: The host:port of `clew serve` or SGLang.
        n_samples: Number of episodes for each row.
        seed: The seed from which all others derive.
        sampling: Fields of the configuration's section `sampling`.
        rollout: Fields of the configuration's section `rollout`, such as workflow="my_project.MyWorkflow" or
            agent="my_agent.MyAgent".

    Raises:
        ClewError: The options contradict one another, or the data or the model cannot be loaded.
    """
    with suppress(RuntimeError):  # raised if no event loop runs in this thread, which is fine
        asyncio.get_running_loop()
        raise ConfigError(
            "clew.rollout_batch starts an event loop of its own, and one already runs here, as in a notebook. Call it "
            "in another thread: await asyncio.to_thread(clew.rollout_batch, rows, model=…)"
        )
    with explain_missing():
        prompts = load_rows(data) if isinstance(data, str) else [dict(row) for row in data]
        config = configuration.checked(
            {
                "experiment": "batch",
                "seed": seed,
                "model": {"path": model},
                "data": {"path": data if isinstance(data, str) else "given"},
                "rollout": {"n_samples": n_samples, **rollout},
                "algorithm": {"advantages": "none"},  # nothing is compared
                "sampling": dict(sampling or {}),
                "inference": {"max_running": max(1, min(256, len(prompts) * n_samples))},
            },
            Path("clew.rollout_batch"),
        )
        refuse_unused_reward(config)
        from clew.inference.client import HTTPEngine
        from clew.inference.local import load_engine
        from clew.rollout.given_rows import run_rows
        from clew.rollout.setup import max_running_of

        def load() -> Any:
            if server is None:
                return load_engine(config, max_running=max_running_of(config))
            engine = HTTPEngine(server)
            engine.needs_version = False  # it may be SGLang, and nothing is trained here
            return engine

        temperature = config.sampling.temperature
        made = asyncio.run(
            run_rows(config, prompts, load, name=group_name, n_samples=n_samples, temperature=temperature)
        )
    episodes = [episode for of_row in made for episode in of_row]
    return RolloutBatch(
        rows=[row for episode in episodes if episode.error is None for row in episode.sequences],
        failed=[episode.sequences[0] for episode in episodes if episode.error is not None],
    )


def open_run(path: Path | str) -> Run:
    """Open a run directory to read it. Nothing in it is created or changed.

    Raises:
        RecordError: There is no run directory.
    """
    return Run(open_directory(path))


class Run:
    """A run: its configuration, steps, sequences and evaluations.

    Methods and properties that return a DataFrame need pandas: `pip install "clew[pandas]"`.
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
        """Return the configuration of the newest step. Raises ConfigError if it is another trainer's."""
        return configuration.load(self.directory.config_path)

    def sequences(self, step: int) -> list[rows.Sequence]:
        """Return the sequences that a step was trained on. Raises RecordError if they are gone or altered."""
        return self.directory.steps.read_data(step)

    def stages(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what a step computed: an array for each stage and sequence ID, aligned with the sequence's tokens."""
        return self.directory.steps.read_stages(step).arrays

    @property
    def steps(self) -> pandas.DataFrame:
        """Return a DataFrame with one row for each step, and its metrics as columns."""
        steps = [self.directory.steps.read(step) for step in range(len(self))]
        numbers = [step["metrics"] | {"committed_at": step["committed_at"]} for step in steps]
        return _pandas().DataFrame(numbers).rename_axis("step")

    @property
    def evaluations(self) -> pandas.DataFrame:
        """Return a DataFrame with one row for each complete evaluation."""
        return _pandas().DataFrame(self.directory.evals.read_all())

    def frame(self, step: int) -> pandas.DataFrame:
        """Return a DataFrame with one row for each sequence of a step, and the columns of the record."""
        records = [{name: getattr(row, name) for name in rows.COLUMNS} for row in self.sequences(step)]
        return _pandas().DataFrame(records)

    def tokens(self, step: int) -> pandas.DataFrame:
        """Return a DataFrame with one row for each trained token of a step.

        Its columns are the ID of the sequence, the token's position, the aligned columns of the record, and the stages
        (advantages, logprobs, loss, …). If the record has a column of the same name, the stage gets the prefix
        `current_`, as in `current_logprobs`.
        """
        import numpy as np

        stages, frames = self.stages(step), []
        for row in self.sequences(step):
            positions = np.flatnonzero(row.loss_mask)
            columns = {name: getattr(row, name)[positions] for name in rows.ALIGNED if name != "loss_mask"}
            computed = {
                f"current_{name}" if name in columns else name: values[row.id][positions]
                for name, values in stages.items()
            }
            frames.append(_pandas().DataFrame({"id": row.id, "position": positions} | columns | computed))
        return _pandas().concat(frames, ignore_index=True)


def _listed(given: Sequence[str] | str) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _pandas() -> Any:
    """Return pandas, an optional dependency. Raises MissingPart if it is not installed."""
    with explain_missing():
        import pandas
    return pandas


@contextmanager
def _as_file(config: Config | Path | str) -> Iterator[Path]:
    """Yield the path of a configuration's file; a `Config` is written to a temporary one."""
    if not isinstance(config, Config):
        yield Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="clew-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(configuration.dump(config), encoding="utf-8")
        yield path
