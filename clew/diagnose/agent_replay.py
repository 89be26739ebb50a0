"""`clew agent replay`: run the agent's current code against the model's answers in a recorded episode.

No model is needed: the gateway answers each request with the response that was recorded for the same request, so the
agent gets the same answers every time. The first request that differs from the record fails, and the difference is
shown. With --continue-live, a served model answers it and all later requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from clew import config as configuration
from clew.config import Config
from clew.console import EscapingConsole
from clew.diagnose.causes import with_sections_at
from clew.diagnose.recorded_model import RecordedModel, interactions_of, resources_of
from clew.errors import ConfigError, EngineError, RecordError
from clew.gateway.agent_session import Limits
from clew.gateway.gateway_thread import GatewayThread
from clew.gateway.interactions import Interaction
from clew.gateway.sequences import with_returns
from clew.inference.detect_server import find_engine
from clew.printing import visible
from clew.record.rows import Sequence as Row
from clew.record.run import RunDirectory
from clew.rollout.agents import AgentWorkflow, load_agent
from clew.rollout.episode import was_cancelled
from clew.rollout.reward_function import by_name


@dataclass(kw_only=True)
class Replay:
    """Result of replaying an agent on a recorded episode."""

    model: RecordedModel
    """Model that replayed the answers, with their number and the first request that differed."""
    rewards: list[float] | None
    """Reward of each sequence of the episode now; None if it ended in an error."""
    error: str | None
    recorded_rewards: list[float] | None
    """Recorded reward of each sequence; None if the recorded episode ended in an error."""
    recorded_error: str | None

    @property
    def same(self) -> bool:
        """True if the agent made exactly the recorded requests, and its result is the same.

        The result is the same if the rewards are equal, or if the episode failed both then and now.
        """
        same_end = self.rewards == self.recorded_rewards if self.error is None else self.recorded_error is not None
        return not self.model.difference and self.model.answered == self.model.recorded and same_end


def replay_agent(run: RunDirectory, rows: Sequence[Row], *, agent: str | None, base_url: str | None) -> Replay:
    """Run the agent on the data of a recorded episode.

    An async `run` is awaited on this thread's event loop, without a time limit: it may stop at a breakpoint for hours.

    Args:
        rows: Recorded sequences of the episode.
        agent: Dotted path of the agent; None: the run's agent.
        base_url: URL of a served model that answers from the first differing request on; None: that request fails.

    Raises:
        ConfigError: The run has no agent and none is given, or the agent cannot be loaded.
        RecordError: The record has responses without tokens, or cannot be read.
        EngineError: The server at `base_url` does not answer, is a gateway, or takes no token IDs.
    """
    config = configuration.load(run.config_path, ["launch.mode=local"])
    # What changed at version N, and was noted with step N, came after the evaluation of version N.
    step = rows[0].admitted_version - rows[0].group_id.startswith("v")
    config = with_sections_at(run, config, step, "rollout", "sampling", "eval")
    path = agent or config.rollout.agent
    if path is None:
        raise ConfigError(
            f"Cannot replay an agent: {run.path} was made by the workflow {config.rollout.workflow}. Name an agent "
            f"with --agent, or compute the rewards again with `clew replay {run.path} --reward`."
        )
    loaded = load_agent(path, config.rollout.workflow_kwargs)
    answers = interactions_of(list(rows))
    if any(not answer.output_ids for answer in answers):
        raise RecordError(
            f"Cannot replay {rows[0].episode_id}: its responses are on record without their tokens, because another "
            f"version of Clew recorded it."
        )
    return asyncio.run(_replay(config, run, rows, answers, loaded, base_url))


async def _replay(
    config: Config, run: RunDirectory, rows: Sequence[Row], answers: list[Interaction], agent: Any, base_url: str | None
) -> Replay:
    shared = resources_of(run, config, None, None)
    found = await find_engine(base_url, configuration.provider()[1]) if base_url is not None else None
    if base_url is not None and found is None:
        raise EngineError(
            f"Cannot continue the conversation with {base_url}: it takes no token IDs. Name a server that `clew serve` "
            f"started."
        )
    if found is not None:
        shared = replace(shared, engine=found.engine)
    if rows[0].group_id.startswith("v"):
        shared = shared.at_temperature(config.eval.temperature)  # an episode of an evaluation
    model = RecordedModel(shared, answers, rows[0].episode_id, live=found is not None)
    gateway = GatewayThread(Limits(turns=config.rollout.max_turns, tokens=config.rollout.max_episode_tokens))
    workflow = AgentWorkflow(agent, gateway)
    rewards = failure = None
    try:
        returned = await workflow.run_episode(model, json.loads(json.dumps(rows[0].data)))
        rewards = [value for _, value, _ in with_returns(model, by_name(returned))]
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code
        if was_cancelled(error):
            raise
        failure = f"{type(error).__name__}: {error}"
    finally:
        await workflow.close()
        if found is not None:
            await gateway.call(found.engine.close())
        gateway.stop()
    failed = rows[0].finish_reason == "error"
    return Replay(
        model=model,
        rewards=rewards,
        error=failure,
        # An episode that did not fail may have an error, too: why its group was rejected.
        recorded_rewards=None if failed else [row.reward for row in rows],
        recorded_error=rows[0].error if failed else None,
    )


def print_replay(replay: Replay) -> None:
    """Print how far the agent repeated its recorded behaviour, and how it ended then and now."""
    console, model = EscapingConsole(), replay.model
    live = f"; the served model answered {model.live_answers} more" if model.live_answers else ""
    console.print(f"{model.answered} of {model.recorded} recorded responses were asked for again{live}")
    colours = {"+": "green", "-": "red", "@": "dim"}
    for line in model.difference:
        console.print(Text(visible(line), style=colours.get(line[:1], "bold")), soft_wrap=True)
    for when, rewards, error in (
        ("then", replay.recorded_rewards, replay.recorded_error),
        ("now", replay.rewards, replay.error),
    ):
        each = ", ".join(f"{reward:g}" for reward in rewards or ()) or "none"
        many = "rewards of its sequences" if rewards and len(rewards) > 1 else "reward"
        said = f"{many} {each}" if rewards is not None else visible((error or "").split("\n")[0])
        console.print(Text(f"{when}: {said}"), soft_wrap=True)
