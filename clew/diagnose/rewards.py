"""`clew replay --reward`: run the workflow and the reward function again on the model's recorded answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from traceback import format_exception
from typing import Any

import numpy as np

from clew.config import Config
from clew.diagnose.stages import chosen
from clew.errors import ConfigError, EpisodeError
from clew.gateway.episode_engine import EpisodeEngine, Resources, resources
from clew.gateway.interactions import Interaction
from clew.inference.protocol import SamplingParams
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.record.media import media_name
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.rollout.reward_pool import RewardPool
from clew.rollout.rewards import by_name
from clew.rollout.setup import load_reward, load_workflow
from clew.training import checkpoint


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Episode whose reward now differs from the recorded one."""

    step: int
    episode_id: str
    recorded: dict[str, float]
    now: dict[str, float] | str
    """Rewards by name, or one line that says why there are none."""
    traceback: str = ""
    """Traceback of the error that the user's code raised; empty if it raised none."""

    def __str__(self) -> str:
        now = self.now if isinstance(self.now, str) else _named(self.now)
        return f"step {self.step}, {self.episode_id}: recorded {_named(self.recorded)}, now {now}"


def _named(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.9g}" for name, value in rewards.items())


class RecordedSession(EpisodeEngine):
    """EpisodeEngine that answers with the recorded responses, in order."""

    def __init__(self, shared: Resources, episode_id: str, answers: list[Interaction]) -> None:
        super().__init__(shared, episode_id)
        self._answers = answers

    async def generate(
        self,
        input_ids: list[int],
        *,
        prompt: str | list[dict[str, Any]] | None = None,
        images: SequenceABC[bytes] = (),
        index: int | None = None,
        **overrides: Any,
    ) -> Interaction:
        index = len(self.interactions)
        if index >= len(self._answers):
            raise EpisodeError(
                f"the workflow asks the model for a response {index}; the recorded episode has {len(self._answers)}"
            )
        answer = self._answers[index]
        if list(input_ids) != answer.input_ids or tuple(map(media_name, images)) != answer.images:
            raise EpisodeError(
                f"the workflow asks with other tokens or images than it did then, in interaction {index}"
            )
        self.interactions.append(answer)
        return answer


def rewards_again(
    run: RunDirectory, config: Config, steps: Iterable[int], only: str | None = None
) -> list[Disagreement]:
    """Return the episodes of these steps whose workflow and reward function now give another reward than recorded.

    Args:
        config: The run's configuration; its reward and workflow are imported as they are now.
        only: ID of a group, an episode or a sequence to check alone.

    Raises:
        ConfigError: The workflow or the reward function cannot be imported.
    """
    return asyncio.run(_rewards_again(run, config, steps, only))


async def _rewards_again(
    run: RunDirectory, config: Config, steps: Iterable[int], only: str | None
) -> list[Disagreement]:
    if config.rollout.agent is not None:
        raise ConfigError(
            f"the episodes were made by the agent {config.rollout.agent}, which gives its own rewards: "
            f"`clew agent replay {run.path} --episode ID` runs it again on the recorded answers."
        )
    workflow, reward = load_workflow(config), load_reward(config)
    folders = checkpoint.saved(run.checkpoints)
    tokenizer = load_tokenizer(str(folders[0]) if folders else config.model.path)
    engine: Any = None  # a recorded session asks none
    shared = resources(config, engine, tokenizer, reward, vision=load_vision(tokenizer.name_or_path))
    found: list[Disagreement] = []
    try:
        for step in steps:
            episodes: dict[str, list[Sequence]] = {}
            for row in chosen(run, step, run.steps.read_data(step), only):
                episodes.setdefault(row.episode_id, []).append(row)
            for episode_id, rows in episodes.items():
                session, trace = RecordedSession(shared, episode_id, interactions_of(rows)), ""
                try:
                    now: dict[str, float] | str = by_name(await workflow.run_episode(session, dict(rows[0].data)))
                except ConfigError:
                    raise
                except EpisodeError as error:  # a reward's traceback comes with the message, from its own process
                    now, _, trace = str(error).partition("\n")
                except Exception as error:  # the user's code
                    now, *_ = f"{type(error).__name__}: {error}".splitlines()
                    trace = "".join(format_exception(error))
                recorded = rows[0].rewards
                if isinstance(now, str) or not _same(recorded, now):
                    found.append(
                        Disagreement(step=step, episode_id=episode_id, recorded=recorded, now=now, traceback=trace)
                    )
    finally:
        if isinstance(reward, RewardPool):
            reward.close()
    return found


def _same(recorded: dict[str, float], now: dict[str, float]) -> bool:
    return recorded.keys() == now.keys() and all(np.isclose(recorded[name], now[name], rtol=1e-9) for name in now)


def interactions_of(sequences: list[Sequence]) -> list[Interaction]:
    """Return the interactions of an episode from its rows, in their order."""
    found = [_interaction(row, said) for row in sequences for said in row.interactions]
    return sorted(found, key=lambda each: each.index)


def _interaction(row: Sequence, said: dict[str, Any]) -> Interaction:
    first, last = said["input_tokens"], said["input_tokens"] + said["output_tokens"]
    tokens = said.get("tokens") or {
        "input_ids": row.input_ids[:first].tolist(),
        "output_ids": row.input_ids[first:last].tolist(),
        "logprobs": row.logprobs[first:last].tolist(),
        "versions": row.versions[first:last].tolist(),
    }
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in said["sampling"].items()
    }
    return Interaction(
        **tokens,
        finish_reason=said["finish_reason"],
        matched=said.get("matched"),
        id=said["id"],
        index=said["turn"],
        images=tuple(said.get("images", ())),
        text=said["completion"],
        params=SamplingParams(**sampling, seed=said["seed"]),
        prompt=said["prompt"],
        started_at=said["started_at"],
        finished_at=said["finished_at"],
        details={name: said[name] for name in ("model", "tools") if name in said},
    )
