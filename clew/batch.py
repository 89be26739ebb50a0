"""Rollout from Python: `clew.rollout_batch`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clew.config import Config
from clew.data import load_rows
from clew.errors import explain_missing
from clew.record.inbox import group_name
from clew.record.rows import Sequence as Row

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Result of a rollout: the rows that training would consume, and the failed episodes."""

    rows: list[Row]
    """Rows of the episodes with a reward, as in a recorded step."""
    failed: list[Row]
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
    """Run a workflow or agent on each row of the data, n_samples times, all concurrently. ::

        batch = clew.rollout_batch(rows, model="runs/mine", reward="my_rewards.exact", n_samples=4)
        tensors = batch.to_tensors()

    Call it where no event loop runs.

    Args:
        data: Rows, or anything that data.path accepts.
        model: A folder or hub name. With `server`, only its tokenizer is loaded, otherwise the model too.
        server: The host:port of `clew serve` or SGLang.
        n_samples: Episodes for each row.
        seed: The seed from which all others derive.
        sampling: Fields of this section of the configuration.
        rollout: Fields of this section of the configuration, such as workflow="my_project.MyWorkflow" or
            agent="my_agent.MyAgent".

    Raises:
        ClewError: The options contradict one another, or the data or the model cannot be loaded.
    """
    rows = load_rows(data) if isinstance(data, str) else [dict(row) for row in data]
    config = Config.model_validate(
        {
            "experiment": "batch",
            "seed": seed,
            "model": {"path": model},
            "data": {"path": data if isinstance(data, str) else "given"},
            "rollout": {"n_samples": n_samples, **rollout},
            "algorithm": {"advantages": "none"},  # nothing is compared
            "sampling": dict(sampling or {}),
            "inference": {"max_running": max(1, min(256, len(rows) * n_samples))},
        }
    )
    with explain_missing():
        return asyncio.run(_rollout_batch(config, rows, server))


async def _rollout_batch(config: Config, rows: list[dict[str, Any]], server: str | None) -> RolloutBatch:
    from clew.gateway.episode_engine import resources
    from clew.inference.client import HTTPEngine
    from clew.inference.local import load_engine
    from clew.models.loading import load_tokenizer
    from clew.models.vision import load_vision
    from clew.rollout.agents import agent_workflow
    from clew.rollout.episode import Episode, run_episode
    from clew.rollout.process import gateway_for
    from clew.rollout.reward_pool import RewardPool
    from clew.rollout.setup import load_reward, load_workflow, side_by_side

    engine = HTTPEngine(server) if server is not None else load_engine(config, max_running=side_by_side(config))
    reward, gateway = load_reward(config), gateway_for(config)
    agent = agent_workflow(config, gateway) if gateway is not None else None
    workflow = agent or load_workflow(config)
    tokenizer, vision = load_tokenizer(config.model.path), load_vision(config.model.path)
    shared = resources(config, engine, tokenizer, reward, vision=vision)
    admitted_at = time.time()

    def episode(group_id: str, row: dict[str, Any], number: int) -> Any:
        return run_episode(
            workflow,
            shared,
            episode_id=f"{group_id}.e{number}",
            group_id=group_id,
            data=row,
            admitted_version=0,
            admitted_at=admitted_at,
            timeout_s=config.rollout.episode_timeout_s,
        )

    try:
        episodes: list[Episode] = await asyncio.gather(
            *(
                episode(group_name(place), row, number)
                for place, row in enumerate(rows)
                for number in range(config.rollout.n_samples)
            )
        )
    finally:
        if agent is not None:
            await agent.close()
        if isinstance(reward, RewardPool):
            reward.close()
        if gateway is None:
            await engine.close()
        else:
            await gateway.call(engine.close())
            gateway.stop()
    return RolloutBatch(
        rows=[row for each in episodes if each.error is None for row in each.sequences],
        failed=[each.sequences[0] for each in episodes if each.error is not None],
    )
