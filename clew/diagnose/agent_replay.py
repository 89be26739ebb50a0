"""`clew agent replay`: the agent's present code against what the model answered in a recorded episode.

No model is needed, and the result is the same every time: the gateway answers each request with the recorded response
to the same request. At the first that is another it stops and shows the difference, or goes on with a served model.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clew import config as configuration
from clew.config import Config
from clew.diagnose.rewards import interactions_of
from clew.errors import ConfigError, EngineError, EpisodeError, RecordError
from clew.inference.found import find_engine
from clew.models import load_tokenizer
from clew.record.rows import Sequence as Row
from clew.record.run import RunDirectory
from clew.rollout.agents import AgentWorkflow, load_agent
from clew.rollout.capture import Interaction
from clew.rollout.gateway.sessions import Limits
from clew.rollout.gateway.thread import GatewayThread
from clew.rollout.rewards import total
from clew.rollout.session import Resources, Session, resources
from clew.training import checkpoint
from clew.vision import load_vision


@dataclass(kw_only=True)
class Replay:
    """What came of it."""

    answered: int = 0
    """Requests that got the recorded response."""
    recorded: int = 0
    """Responses that the episode has."""
    live: int = 0
    """Requests that a served model answered, after the first that differed."""
    difference: list[str] = field(default_factory=list)
    """Lines: the first request that differs, and the recorded one."""
    reward: float | None = None
    error: str | None = None
    recorded_reward: float | None = None
    recorded_error: str | None = None

    @property
    def same(self) -> bool:
        """The agent did and got what it did and got then."""
        same_end = self.reward == self.recorded_reward if self.error is None else self.recorded_error is not None
        return not self.difference and self.answered == self.recorded and same_end


class RecordedModel(Session):
    """Answers a request with what the model answered to the same one."""

    def __init__(self, shared: Resources, answers: Sequence[Interaction], episode_id: str, *, live: bool) -> None:
        """live: go on with the engine from the first request that differs."""
        super().__init__(shared, episode_id)
        self.replay = Replay(recorded=len(answers))
        self._unused = list(answers)
        self._live = live

    async def generate(
        self,
        input_ids: list[int],
        *,
        prompt: str | list[dict[str, Any]] | None = None,
        images: Sequence[bytes] = (),
        index: int | None = None,
        **overrides: Any,
    ) -> Interaction:
        """See `Session`. Raises EpisodeError at the first request that the episode has not."""
        index = self.reserve() if index is None else index
        plain = json.loads(json.dumps(prompt, default=str))
        answer = next((each for each in self._unused if each.prompt == plain and not self.replay.difference), None)
        if answer is not None:
            self._unused.remove(answer)
            self.replay.answered += 1
            interaction = Interaction(**{**vars(answer), "id": self.interaction_id(index), "index": index})
            self.interactions.append(interaction)
            return interaction
        if not self.replay.difference:
            self.replay.difference = self._difference(index, plain)
        if not self._live:
            raise EpisodeError(
                f"request {index} is not in the record of {self.episode_id}: the agent asks something else than then."
            )
        self.replay.live += 1
        return await super().generate(input_ids, prompt=prompt, images=images, index=index, **overrides)

    def _difference(self, index: int, prompt: Any) -> list[str]:
        if not self._unused:
            return [f"request {index} is one more than the {self.replay.recorded} that are recorded:", *_lines(prompt)]
        then, now = _lines(self._unused[0].prompt), _lines(prompt)
        head = f"request {index} differs from the recorded {self._unused[0].id}:"
        return [head, *difflib.unified_diff(then, now, "recorded", "now", lineterm="", n=1)]


def _lines(prompt: Any) -> list[str]:
    if not isinstance(prompt, list):
        return str(prompt).splitlines()
    return [
        f"{message.get('role')}: {name}: {line}"
        for message in prompt
        for name, value in message.items()
        if name != "role" and value
        for line in (value if isinstance(value, str) else json.dumps(value)).splitlines()
    ]


def replay_agent(
    run: RunDirectory, rows: Sequence[Row], *, agent: str | None, base_url: str | None, overrides: Sequence[str] = ()
) -> Replay:
    """Run the agent on the data of a recorded episode. Its code runs on this thread's event loop: a breakpoint in it
    may last an hour.

    rows: of the episode. agent: dotted path; None: the run's. base_url: of a served model to go on with where a
    request differs; None: stop there. Raises ConfigError, RecordError, EngineError.
    """
    config = configuration.load(run.config_path, ["launch.mode=local", *overrides])
    path = agent or config.rollout.agent
    if path is None:
        raise ConfigError(
            f"{run.path} was made by the workflow {config.rollout.workflow}, not by an agent; name one with --agent, "
            f"or run the workflow again with `clew replay {run.path} --reward`."
        )
    loaded = load_agent(path, config.rollout.workflow_kwargs)
    answers = interactions_of(list(rows))
    if any(not answer.output_ids for answer in answers):
        raise RecordError(f"{rows[0].episode_id} has responses without their tokens: it was recorded by another Clew.")
    return asyncio.run(_replay(config, run, rows, answers, loaded, base_url))


async def _replay(
    config: Config, run: RunDirectory, rows: Sequence[Row], answers: list[Interaction], agent: Any, base_url: str | None
) -> Replay:
    folders = checkpoint.saved(run.checkpoints)
    tokenizer = load_tokenizer(str(folders[0]) if folders else config.model.path)
    found = await find_engine(base_url, configuration.provider()[1]) if base_url is not None else None
    if base_url is not None and found is None:
        raise EngineError(f"{base_url} takes no token ids, so the gateway cannot go on with it. Use `clew serve`.")
    engine: Any = found.engine if found is not None else None
    shared = resources(config, engine, tokenizer, None, vision=load_vision(tokenizer.name_or_path))
    session = RecordedModel(shared, answers, rows[0].episode_id, live=found is not None)
    gateway = GatewayThread(Limits(turns=config.rollout.max_turns, tokens=config.rollout.max_episode_tokens))
    workflow, replay = AgentWorkflow(agent, gateway), session.replay
    replay.recorded_error = rows[0].error
    replay.recorded_reward = None if rows[0].error else rows[-1].reward
    try:
        returned = await workflow.run_episode(session, json.loads(json.dumps(rows[0].data)))
        replay.reward = total(returned) + sum(session.turn_rewards.values())
    except Exception as error:  # the user's code
        replay.error = f"{type(error).__name__}: {error}"
    finally:
        await workflow.close()
        if engine is not None:
            await gateway.call(engine.close())
        gateway.stop()
    return replay
