"""Runs one episode of a workflow, and makes rows of the record of it, even if it fails."""

from __future__ import annotations

import asyncio
import copy
import math
import time
import traceback
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from clew.errors import ClewError, ConfigError, EpisodeError
from clew.gateway.episode_engine import EpisodeEngine, Resources
from clew.gateway.interactions import TOKENS
from clew.gateway.sequences import sequences_of
from clew.printing import counted
from clew.record.rows import ALIGNED, Sequence
from clew.rollout.reward_function import Reward, by_name, checked, shortened, total

T = TypeVar("T")


class Workflow(Protocol):
    """Interface of the class that rollout.workflow names."""

    async def run_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Reward:
        """Work on one row of the data set with the model behind `engine`, and return the reward."""
        ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Result of a finished episode."""

    id: str
    sequences: list[Sequence]
    """Rows of the record, at least one; a failed episode has a single row without tokens."""
    reward: float
    """Reward of the whole episode, undiscounted; NaN when it failed."""
    warnings: list[str]
    """Warnings for the owner of the workflow or agent."""

    @property
    def error(self) -> str | None:
        """Reason why the episode failed: one line, often with a traceback below it; None if it did not fail."""
        return self.sequences[0].error

    @property
    def branched(self) -> bool:
        """True if a request did not continue the conversation it should have; see the gateway's `Branch`."""
        return any("branch" in entry for sequence in self.sequences for entry in sequence.interactions)

    @property
    def tokens(self) -> int:
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)


async def run_episode(
    workflow: Workflow,
    resources: Resources,
    *,
    episode_id: str,
    group_id: str,
    data: dict[str, Any],
    admitted_version: int,
    admitted_at: float,
    timeout_s: float | None,
) -> Episode:
    """Run the workflow on its own copy of `data` and record what it did.

    Anything that the user's code raises, even SystemExit, makes the episode a failed one. A ConfigError is passed on,
    because all other episodes would fail in the same way.

    Args:
        admitted_version: Version of the weights when the group was admitted.
        admitted_at: Time when the group was admitted, in seconds since the epoch.
    """
    engine = EpisodeEngine(resources, episode_id)
    started_at = time.time()
    reward: Reward | None = None
    error = None
    try:
        reward = await _reward_of(workflow, engine, data, timeout_s)
    except ConfigError:
        raise
    except ClewError as failure:
        error = f"{type(failure).__name__}: {failure}"
    except (Exception, SystemExit, asyncio.CancelledError) as failure:
        # The user's code may raise anything. Here its failure becomes part of the record.
        if was_cancelled(failure):
            raise
        error = f"{_in_words(failure)}\n{''.join(traceback.format_exception(failure))}"

    columns: dict[str, Any] = {
        "group_id": group_id,
        "episode_id": episode_id,
        "data": data,
        "admitted_version": admitted_version,
        "admitted_at": admitted_at,
        "started_at": started_at,
        "finished_at": time.time(),
    }
    if reward is None:
        sequences, whole = [_failed(episode_id, error or "", engine, columns)], math.nan
    else:
        sequences = sequences_of(engine, by_name(reward), columns)
        whole = total(reward) + math.fsum(engine.turn_rewards.values())
    return Episode(id=episode_id, sequences=sequences, reward=whole, warnings=list(engine.warnings))


def was_cancelled(error: BaseException) -> bool:
    """Return whether this task is cancelled, as at Ctrl-C. Any other CancelledError comes from the user's code."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _reward_of(
    workflow: Workflow, engine: EpisodeEngine, data: dict[str, Any], timeout_s: float | None
) -> Reward:
    own = f"{type(workflow).__module__}.{type(workflow).__qualname__}.run_episode"
    name = getattr(workflow, "name_in_errors", own)  # set for an agent: its workflow only calls it
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            returned = await workflow.run_episode(engine, copy.deepcopy(data))
    except TimeoutError:
        if not limit.expired():
            raise  # the workflow's own
        raise EpisodeError(
            f"{name} was cancelled after {timeout_s:g} s (rollout.episode_timeout_s). The model had given "
            f"{counted(len(engine.interactions), 'response')}."
        ) from None
    reward = checked(returned, name)
    if not math.isfinite(sum(map(abs, [*by_name(reward).values(), *engine.turn_rewards.values()]))):
        raise EpisodeError(
            f"{name} returned {shortened(returned)}. The sum of its rewards is too large for a float: use smaller ones."
        )
    if not engine.interactions:
        raise EpisodeError(
            f"{name} returned {returned!r} without a response of the model, so there is nothing to train on."
        )
    return reward


def _in_words(error: BaseException) -> str:
    """Return the type and the message of an error of the user's code, even if its own `__str__` raises another."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:
        return f"{type(error).__name__}: its message cannot be shown ({type(other).__name__})"


def _failed(episode_id: str, error: str, engine: EpisodeEngine, columns: dict[str, Any]) -> Sequence:
    return Sequence(
        id=f"{episode_id}.s0",
        reward=math.nan,
        finish_reason="error",
        error=error,
        # `clew agent replay` answers with these tokens, and a failed episode has no sequence that holds them.
        interactions=[
            {**each.record_entry(), "tokens": {name: getattr(each, name) for name in TOKENS}}
            for each in engine.interactions
        ],
        **{name: np.empty(0, dtype) for name, dtype in ALIGNED.items()},
        **columns,
    )


async def run_concurrently(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines side by side and return their results, in order. If one raises, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return [task.result() for task in tasks]
