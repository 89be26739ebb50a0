"""`clew agent replay`: run the agent's current code against the model's answers in a recorded episode.

No model is needed, and the result is the same every time: the gateway answers each request with the response that was
recorded for the same request. At the first request that differs, it stops and shows the difference, or continues with a
served model.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clew import config as configuration
from clew.config import Config
from clew.diagnose.rewards import interactions_of
from clew.errors import ConfigError, EngineError, EpisodeError, RecordError
from clew.gateway.agent_session import Limits
from clew.gateway.episode_engine import EpisodeEngine, Resources, resources
from clew.gateway.interactions import Interaction
from clew.gateway.thread import GatewayThread
from clew.inference.detection import find_engine
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.printing import common_length
from clew.record.media import media_name
from clew.record.rows import Sequence as Row
from clew.record.run import RunDirectory
from clew.rollout.agents import AgentWorkflow, load_agent
from clew.rollout.rewards import total
from clew.seeds import derive_seed
from clew.training import checkpoint


@dataclass(kw_only=True)
class Replay:
    """Result of replaying an agent on a recorded episode."""

    answered: int = 0
    """Number of requests that got the recorded response."""
    recorded: int = 0
    """Number of responses in the recorded episode."""
    live: int = 0
    """Number of requests that a served model answered, from the first one that differed on."""
    difference: list[str] = field(default_factory=list)
    """Lines that show the first request that differs and the recorded one; empty if none differed."""
    reward: float | None = None
    error: str | None = None
    recorded_reward: float | None = None
    recorded_error: str | None = None

    @property
    def same(self) -> bool:
        """True if the agent made exactly the recorded requests and ended with the same reward, or again in an error."""
        same_end = self.reward == self.recorded_reward if self.error is None else self.recorded_error is not None
        return not self.difference and self.answered == self.recorded and same_end


class RecordedModel(EpisodeEngine):
    """EpisodeEngine that answers each request with the response that was recorded for the same request."""

    def __init__(self, shared: Resources, answers: Sequence[Interaction], episode_id: str, *, live: bool) -> None:
        """Create the session.

        Args:
            answers: The recorded interactions of the episode.
            live: Whether to continue with the engine from the first request that differs.
        """
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
        details: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Interaction:
        """Return the recorded response to this request; see `EpisodeEngine`.

        Raises:
            EpisodeError: The request differs from every recorded one, and no served model can continue (`live` is
                False).
        """
        index = self.reserve() if index is None else index
        if not self.replay.difference:
            now = self._request(index, input_ids, prompt, images, details or {}, overrides)
            answer = next((each for each in self._unused if self._difference(each, now) is None), None)
            if answer is not None:
                self._unused.remove(answer)
                self.replay.answered += 1
                own = {"id": self.interaction_id(index), "index": index, "details": dict(details or {})}
                interaction = Interaction(**{**vars(answer), **own})
                self.interactions.append(interaction)
                return interaction
            self.replay.difference = self._told(now)
        if not self._live:
            raise EpisodeError(
                f"Cannot answer request {index} from the record of {self.episode_id}: the agent asks something else "
                f"than then. {self.replay.difference[0].removesuffix(':')}."
            )
        self.replay.live += 1
        return await super().generate(
            input_ids, prompt=prompt, images=images, index=index, details=details, **overrides
        )

    def _request(
        self,
        index: int,
        input_ids: list[int],
        prompt: Any,
        images: Sequence[bytes],
        details: Mapping[str, Any],
        overrides: dict[str, Any],
    ) -> Interaction:
        """Return a request in the form in which it would be recorded, without an answer."""
        overrides.pop("on_token", None)
        id = self.interaction_id(index)
        return Interaction(
            id=id,
            index=index,
            input_ids=list(input_ids),
            output_ids=[],
            logprobs=[],
            versions=[],
            finish_reason="",
            text="",
            params=self._params(dict(overrides), derive_seed(self.resources.seed, id)),
            images=tuple(media_name(image) for image in images),
            prompt=json.loads(json.dumps(prompt, default=str)),
            started_at=0.0,
            finished_at=0.0,
            details=json.loads(json.dumps(details, default=str)),
        )

    def _difference(self, then: Interaction, now: Interaction) -> Divergence | None:
        """Return the first difference in what the model reads or how it samples; None if the requests are the same."""
        if found := first_difference(then.prompt, now.prompt, "message" if isinstance(now.prompt, list) else "prompt"):
            return found
        # Older records do not name the tools; what the template made of them is among the tokens.
        before, after = then.details.get("tools"), now.details.get("tools", [])
        if before is not None and (found := first_difference(before, after, "tool")):
            return found
        if then.images != now.images:
            return first_difference(list(then.images), list(now.images), "image")
        if then.input_ids != now.input_ids:
            return self._in_tokens(then.input_ids, now.input_ids)
        before, after = (self._sampling(each) for each in (then, now))
        return first_difference(before, after, "sampling") or first_difference(
            then.details.get("model"), now.details.get("model"), "model"
        )

    def _in_tokens(self, then: list[int], now: list[int]) -> Divergence:
        """Return where the text or the tokens that the model reads differ although the messages are the same."""
        where = "what the chat template makes of messages and tools"
        texts = [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in (then, now)]
        found = first_difference(texts[0], texts[1], where)
        if found is not None:
            return found
        at = common_length(then, now)
        shown = (f"tokens {side[at : at + 8]}" for side in (then, now))
        return Divergence(f"the tokens of {where}, token {at}", *shown)

    def _sampling(self, request: Interaction) -> dict[str, Any]:
        """Return a request's sampling parameters; the seed is included only if the client set it."""
        said = {name: value for name, value in vars(request.params).items() if name not in ("seed", "continues")}
        if request.params.seed != derive_seed(self.resources.seed, request.id):
            said["seed"] = request.params.seed - request.index
        return json.loads(json.dumps(said))

    def _told(self, now: Interaction) -> list[str]:
        if not self._unused:
            head = f"request {now.index} is one more than the {self.replay.recorded} that are recorded:"
            return [head, *_lines(now.prompt)]
        then = next((each for each in self._unused if each.index == now.index), self._unused[0])
        found = self._difference(then, now)
        assert found is not None, "it would have been answered"
        head = f"request {now.index} differs from the recorded {then.id} in {found.where}:"
        return [head, f"-recorded: {found.then}", f"+now:      {found.now}"]


@dataclass(frozen=True)
class Divergence:
    """First difference between two requests."""

    where: str
    """Place in words: message, field, character."""
    then: str
    now: str


AROUND = 60
"""Number of characters shown before and after the first one that differs."""
ABSENT = object()


def first_difference(then: Any, now: Any, where: str) -> Divergence | None:
    """Return the first place where two JSON values differ; None if they are equal.

    In text, the place is a character. It is shown with the text around it, with spaces and line breaks made visible.
    """
    if then == now and isinstance(then, bool) == isinstance(now, bool):
        return None
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            found = first_difference(then.get(name, ABSENT), now.get(name, ABSENT), f"{where}, {name}")
            if found is not None:
                return found
        return None
    if isinstance(then, list) and isinstance(now, list):
        for place, pair in enumerate(itertools.zip_longest(then, now, fillvalue=ABSENT)):
            if found := first_difference(*pair, f"{where} {place}{_role(pair)}"):
                return found
        return None
    if isinstance(then, str) and isinstance(now, str):
        at = common_length(then, now)
        return Divergence(f"{where}, character {at}", _around(then, at), _around(now, at))
    return Divergence(where, _value(then), _value(now))


def _value(value: Any) -> str:
    return "absent" if value is ABSENT else _around(json.dumps(value, ensure_ascii=False), 0)


def _role(pair: Sequence[Any]) -> str:
    """Return the role of the message in parentheses; "" if neither value is a message."""
    roles = [side["role"] for side in pair if isinstance(side, dict) and isinstance(side.get("role"), str)]
    return f" ({roles[0]})" if roles else ""


def _around(text: str, at: int) -> str:
    begin, end = max(0, at - AROUND), at + AROUND
    shown = _with_blanks(text[begin:end])
    return f"{'…' if begin else ''}{shown}{'…' if end < len(text) else ''}" if shown else "(nothing)"


def _with_blanks(text: str) -> str:
    """Return the text on one line, with a mark for each space, line break and tab."""
    return text.translate({ord(" "): "·", ord("\n"): "⏎", ord("\r"): "␍", ord("\t"): "⇥", 0xA0: "⍽"})


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
    """Run the agent on the data of a recorded episode.

    The agent's code runs on this thread's event loop: a breakpoint in it may last an hour.

    Args:
        agent: Dotted path of the agent; None: the run's agent.
        base_url: URL of a served model that continues after a request that differs; None: stop there.

    Raises:
        ConfigError: The run has no agent and none is given, or the agent cannot be loaded.
        RecordError: The record has responses without tokens, or cannot be read.
        EngineError: The server at `base_url` does not answer or takes no token IDs.
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
    if rows[0].group_id.startswith("v"):
        shared = shared.at_temperature(config.eval.temperature)  # an episode of an evaluation
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
