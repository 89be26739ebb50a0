"""Loading and checking of everything that the configuration names for rollout, before anything starts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from clew import dotted
from clew.config import Config
from clew.errors import ConfigError, DataError, EpisodeError
from clew.rollout.episode import Workflow
from clew.rollout.reward_function import Reward, RewardFunction
from clew.rollout.reward_pool import RewardPool
from clew.waits import waiting


def refuse_impossible(config: Config, n_rows: int) -> None:
    """Raise ConfigError or DataError when no batch can ever be formed."""
    rollout = config.rollout
    if rollout.drop_equal_rewards and config.sampling.temperature == 0 and rollout.agent is None:
        raise ConfigError(
            "rollout.drop_equal_rewards rejects groups whose rewards are all equal, and at sampling.temperature=0 all "
            "episodes of a group are alike: no batch can be formed. Sample with a temperature above 0."
        )
    if n_rows < rollout.batch_groups:
        raise DataError(
            f"rollout.batch_groups is {rollout.batch_groups}, and {config.data.path} has {n_rows} rows: a "
            f"batch would hold a prompt twice. Use rollout.batch_groups={n_rows}, or more data."
        )


def load_workflow(config: Config) -> Workflow:
    """Import the workflow's class and return one instance, which serves all episodes.

    Raises:
        ConfigError: There is no such class, or it cannot be called with rollout.workflow_kwargs.
    """
    path = config.rollout.workflow
    cls = dotted.load(path, "rollout.workflow")
    if not isinstance(cls, type) or not inspect.iscoroutinefunction(getattr(cls, "run_episode", None)):
        raise ConfigError(
            f"rollout.workflow={path} is no workflow; expected a class with "
            f"`async def run_episode(self, engine, data)`."
        )
    return dotted.create(cls, config.rollout.workflow_kwargs, path, "rollout.workflow")


def max_running_of(config: Config) -> int:
    """Return how many sequences the engine in this process may compute side by side.

    The other sequences in a batch affect the last bits of a logprob. An inline run with rollout.max_lag=0 must repeat
    bit for bit, so it computes one at a time if its requests come in no fixed order. That is so with an agent, whose
    requests come over sockets, with a user's workflow, and with an async reward: they may wait for a tool or a timer.
    Clew's own workflows wait only for the engine.
    """
    rollout = config.rollout
    if config.launch.mode != "inline" or rollout.max_lag > 0:
        return config.inference.max_running
    own = rollout.agent is None and rollout.workflow.startswith("clew.rollout.workflows.")
    waits = rollout.reward is not None and RewardFunction(rollout.reward, config.data.prompt).is_async
    return config.inference.max_running if own and not waits else 1


def load_reward(config: Config) -> Callable[[str, dict[str, Any]], Awaitable[Reward]] | None:
    """Return the reward as a session calls it; None if none is configured.

    An async function is awaited in this process. A plain function is called in this process (inline) or in a pool of
    worker processes.

    Raises:
        ConfigError: The reward function cannot be loaded.
    """
    rollout, prompt_column = config.rollout, config.data.prompt
    path, timeout_s = rollout.reward, rollout.reward_timeout_s
    inline = config.launch.mode == "inline"
    if path is None:
        return None
    function = RewardFunction(path, prompt_column)
    if function.is_async:
        return function.awaited if inline else _limited(function, timeout_s)
    if not inline:
        return RewardPool(path, prompt_column, workers=rollout.reward_workers, timeout_s=timeout_s)

    async def called_here(completion: str, data: dict[str, Any]) -> Reward:
        return function(completion, data)

    return called_here


def _limited(function: RewardFunction, timeout_s: float) -> Callable[[str, dict[str, Any]], Awaitable[Reward]]:
    async def limited(completion: str, data: dict[str, Any]) -> Reward:
        limit = asyncio.timeout(timeout_s)
        try:
            with waiting(f"reward {function.path}", unblocks="the reward function"):
                async with limit:
                    return await function.awaited(completion, data)
        except TimeoutError:
            if not limit.expired():
                raise  # the function's own
            raise EpisodeError(
                f"reward {function.path} timed out after {timeout_s:g} s (rollout.reward_timeout_s)."
            ) from None

    return limited
