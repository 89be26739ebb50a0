"""The gateway of a stress, as in training: in front of a served model, of a provider, or of a stand-in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.config import provider
from clew.errors import RecordError
from clew.gateway.agent_session import Limits
from clew.gateway.episode_engine import MAX_NEW_TOKENS, EpisodeEngine, Resources
from clew.gateway.gateway_thread import GatewayThread
from clew.gateway.interactions import Interaction
from clew.inference.detect_server import find_engine
from clew.inference.protocol import Completion, Engine, GenerateRequest, SamplingParams, ServerFault
from clew.models.loading import load_tokenizer
from clew.models.vision import ImageExpander, load_vision
from clew.record.run import open_run
from clew.stress.provider import ProviderGateway
from clew.stress.requests import Request, Requests
from clew.stress.standin import NamedImages, StandIn, byte_tokenizer, offered_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDED = 4096
"""Maximum number of answers taken from a run."""

FAULT = "a fault that the stress made"
"""Error of a request that the stress makes fail. See `Requests.troubles`."""


class Noted:
    """Engine that passes requests on to another engine, and notes them with their answers.

    Request IDs are `<episode>.i<number>`, as a session of the gateway assigns them. Those in `Requests.troubles`
    fail, or their answers are cut short.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, requests: Requests) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._requests = requests
        self.version = engine.version

    async def generate(self, request: GenerateRequest) -> Completion:
        came, (episode, _, number) = time.monotonic(), request.id.rpartition(".i")
        params, trouble = request.params, self._requests.troubles.get((episode, int(number or 0)))
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if (value := getattr(params, name)) != getattr(SamplingParams, name):
                what = f"{request.id} asks with {name}={value:g}, whatever the configuration says"
                self._requests.warn(episode, what, "greedy" if params.temperature == 0 else "sampling")
        if trouble == "cut":
            request = replace(request, params=replace(params, max_new_tokens=8))
        with self._requests.asking(episode):
            completion = await self._engine.generate(request) if trouble != "fault" else None
        output_ids = completion.output_ids if completion is not None else []
        self._requests.note(
            Request(
                episode=episode,
                asked=str(self._tokenizer.decode(request.input_ids)),
                answered=str(self._tokenizer.decode(output_ids, skip_special_tokens=True)),
                came=came,
                done=time.monotonic(),
                id=request.id,
                refused=FAULT if completion is None else "",
                cut=trouble == "cut",
            )
        )
        if completion is None:
            raise ServerFault("", FAULT)
        return completion


class OfferingEngine(EpisodeEngine):
    """Engine of an episode that tells the stand-in which tools a request offers."""

    async def generate(self, input_ids: list[int], **given: Any) -> Interaction:
        offered_tools.set((given.get("details") or {}).get("tools", ()))
        return await super().generate(input_ids, **given)


class EngineGateway(GatewayThread):
    """The gateway that training uses, in front of an engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        vision: ImageExpander | None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Start the gateway. `vision` is for a model that takes images; `close` closes the engine at the end."""
        self.requests = Requests()
        self.requests.knows_tokens = True
        self._shared = Resources(
            engine=Noted(engine, tokenizer, self.requests),
            tokenizer=tokenizer,
            sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
            seed=0,
            prompt_column="prompt",
            reward=None,
            vision=vision,
            on_warning=self.requests.warn,
        )
        super().__init__(Limits(), close)

    def open_episode(self, episode_id: str) -> str:
        """Open a session for an episode that begins, and return its API key."""
        engine = OfferingEngine(self._shared, episode_id)
        self.requests.rewards[episode_id] = engine.turn_rewards
        return self.open(engine)[0]


Gateway = EngineGateway | ProviderGateway
"""A gateway in a thread of its own that notes the requests of the episodes."""


def answerer(
    base_url: str | None, *, latency_s: float, tokens: int, recorded: Path | None, model: str | None
) -> Gateway:
    """Start the gateway in front of the model that answers, and return it.

    The help of `clew agent stress` describes the arguments.

    Raises:
        EngineError: If nothing usable answers at `base_url`.
        ModelError: If the model's files cannot be loaded.
        RecordError: If `recorded` cannot be read or has no completions.
    """
    if base_url is not None:
        api_key = provider()[1]
        served = asyncio.run(find_engine(base_url, api_key))
        if served is None:
            return ProviderGateway(base_url, api_key)
        vision = load_vision(served.model) if served.engine.takes_images else None
        return EngineGateway(served.engine, load_tokenizer(served.model), vision, served.engine.close)
    tokenizer = load_tokenizer(model) if model is not None else byte_tokenizer()
    vision = load_vision(model) if model is not None else NamedImages()
    texts = _answers(recorded) if recorded is not None else []
    return EngineGateway(StandIn(tokenizer, latency_s=latency_s, tokens=tokens, texts=texts), tokenizer, vision)


def _answers(path: Path) -> list[str]:
    """Return the model's answers in a run: the raw text of its completions."""
    run = open_run(path)
    answers: list[str] = []
    for step in range(run.steps.count()):
        if run.steps.has_data(step):
            rows = run.steps.read_data(step)
            turns = [turn for row in rows for turn in row.interactions]
            said = [turn.get("completion") if isinstance(turn, dict) else turn for turn in turns]  # or only a text
            answers += [str(each) for each in said if each is not None]
        if len(answers) >= RECORDED:
            return answers[:RECORDED]
    if not answers:
        raise RecordError(f"{path} has no recorded completions. Name a run that has committed a step.")
    return answers
