"""Episodes of given rows on an engine of their own, without a run: for `clew.rollout_batch` and `clew eval`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from clew.config import Config
from clew.gateway.episode_engine import resources
from clew.inference.protocol import Engine
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.rollout.episode import Episode, run_concurrently, run_episode
from clew.rollout.reward_pool import RewardPool
from clew.rollout.setup import load_reward, load_workflow


class OwnEngine(Engine, Protocol):
    """An engine that is closed when it is no longer needed."""

    async def close(self) -> None: ...


async def run_rows(
    config: Config,
    rows: Sequence[dict[str, Any]],
    load: Callable[[], OwnEngine],
    *,
    name: Callable[[int], str],
    n_samples: int,
    temperature: float,
    done: Callable[[], None] = lambda: None,
) -> list[list[Episode]]:
    """Run the configured workflow or agent on each row. Return the episodes of each row.

    Args:
        load: Loads the engine. It is called after the user's code is loaded, and the engine is closed at the end.
        name: Returns the group ID of the row at a place. The seeds of the row's episodes derive from this ID.
        done: Called after each episode.
    """
    async with AsyncExitStack() as stack:
        gateway = None
        if config.rollout.agent is None:
            workflow = load_workflow(config)
        else:  # a workflow needs no gateway and no web server, so they are imported only here
            from clew.rollout.agents import agent_workflow
            from clew.rollout.process import gateway_for

            gateway = gateway_for(config)
            assert gateway is not None
            stack.callback(gateway.stop)
            workflow = agent_workflow(config, gateway)
            stack.push_async_callback(workflow.close)
        reward = load_reward(config)
        if isinstance(reward, RewardPool):
            stack.callback(reward.close)
        tokenizer, vision = load_tokenizer(config.model.path), load_vision(config.model.path)
        engine = load()
        if gateway is None:
            stack.push_async_callback(engine.close)
        else:  # close it on the loop that its requests came from
            stack.push_async_callback(lambda: gateway.call(engine.close()))
        shared = resources(config, engine, tokenizer, reward, vision=vision).at_temperature(temperature)
        # More episodes at a time would wait for the engine, and the wait would count toward their time limits.
        admitted_at, slots = time.time(), asyncio.Semaphore(config.inference.max_running)

        async def run(place: int, number: int) -> Episode:
            group_id = name(place)
            async with slots:
                episode = await run_episode(
                    workflow,
                    shared,
                    episode_id=f"{group_id}.e{number}",
                    group_id=group_id,
                    data=rows[place],
                    admitted_version=0,
                    admitted_at=admitted_at,
                    timeout_s=config.rollout.episode_timeout_s,
                )
            done()
            return episode

        episodes = await run_concurrently(
            run(place, number) for place in range(len(rows)) for number in range(n_samples)
        )
        return [episodes[first : first + n_samples] for first in range(0, len(episodes), n_samples)]
