"""Checks of what the configuration names, before a run directory is made or a process started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clew import dotted
from clew.config import Config, check_critic_fields
from clew.data import LOCAL, load_demonstrations, load_rows
from clew.errors import ConfigError, DataError
from clew.models.model_folder import check_folder

ROWS = 10_000
"""Maximum number of rows of the data that are looked at; the processes read all that data.limit lets them."""


def _is_local(path: str) -> bool:
    return Path(path).suffix.lower() in LOCAL or Path(path).expanduser().is_file()


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Put a field's name before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{field}: {error}") from None


def check_named(config: Config, *, supervised: bool = False) -> None:
    """Look for the model, the data's first rows, and the user's code, without running any of it.

    Data on a hub is left to the processes that load it, and so is everything else that can be wrong.

    Args:
        supervised: Whether demonstrations or preferences are trained on, so that there is no rollout.

    Raises:
        ClewError: Something that is named does not exist.
    """
    check_folder(config.model.path, "config.json", "model", "Save the model there with save_pretrained.")
    data, algorithm = config.data, config.algorithm
    named_paths = {"data.path": data.path, "eval.path": config.eval.path}
    paths = {field: path for field, path in named_paths.items() if path is not None and _is_local(path)}
    limits = {"data.path": min(ROWS, data.limit or ROWS), "eval.path": ROWS}
    if supervised:
        for field, path in paths.items():
            with _naming(field):
                load_demonstrations(config, path, limit=limits[field])
        return
    code = {"algorithm.advantages": algorithm.advantages, "algorithm.loss": algorithm.loss}
    code = {field: named for field, named in code.items() if "." in named}  # a built-in one has no dot
    if not config.debug.replay_rollout_data:  # with it, rows and rewards come from the record
        refuse_unused_reward(config)
        for field, path in paths.items():
            with _naming(field):
                load_rows(path, limit=limits[field], columns=[data.prompt])
        code |= {f"rollout.{name}": getattr(config.rollout, name) for name in ("workflow", "agent", "reward")}
    for field, named in code.items():
        if named is not None:
            dotted.check_defined(named, field)
    if "algorithm.advantages" in code:
        required = dotted.required_parameters(algorithm.advantages, "algorithm.advantages")
        if required in (1, 3):  # for any other number, the trainer says what the function must take
            check_critic_fields(config, with_critic=required == 3)


def refuse_unused_reward(config: Config) -> None:
    """Raise ConfigError if rollout.reward is named beside an agent. `Config` does not, so that old runs can be read."""
    agent, reward = config.rollout.agent, config.rollout.reward
    if agent is not None and reward is not None:
        raise ConfigError(
            f"Cannot use rollout.reward={reward}: the agent {agent} gives its own rewards. Unset it "
            f"(rollout.reward=null), and call that function in the agent; or train without the agent "
            f"(rollout.agent=null)."
        )
