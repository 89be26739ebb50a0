"""What a workflow gets as `engine`: the model and the reward, for one episode, with every interaction kept."""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from clew.config import Config, Sampling
from clew.errors import ConfigError, EpisodeError, ImageError
from clew.inference.protocol import Engine, OnToken, SamplingParams
from clew.inference.resubmit import generate_through_aborts
from clew.models import context_of
from clew.record.media import Media, media_name
from clew.rollout.capture import Interaction
from clew.rollout.rewards import Reward
from clew.seeds import derive_seed
from clew.vision import Sight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WARNINGS = 3
"""Warnings of one kind that an episode shows."""

_PARAMS = [field.name for field in fields(SamplingParams) if field.name != "continues"]
"""What a workflow may set."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What all episodes of a run share."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    """Defaults; the seed is set for each interaction."""
    seed: int
    prompt_column: str
    reward: Callable[[str, dict[str, Any]], Awaitable[Reward]] | None
    turn_discount: float = 1.0
    context: int | None = None
    """Of the model, in tokens, where it is known."""
    vision: Sight | None = None
    """Of a model that takes images, and an engine that does."""
    media: Media | None = None
    """Where images are kept for the record; None: nothing is recorded."""
    individual: bool = False
    """A sequence an interaction, instead of one for those that extend one another."""
    on_warning: Callable[[str, str, str], None] | None = None
    """Told each warning at once: the episode's ID, the warning, its kind."""

    def at_temperature(self, temperature: float) -> Resources:
        """The same, for an evaluation."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))


class WarningLog:
    """Logs one warning of each kind: hundreds of episodes would say the same."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[str] = set()

    def add(self, episode_id: str, warning: str, kind: str) -> None:
        """Log a warning, unless there was one of its kind."""
        if kind not in self._logged:
            self._logged.add(kind)
            self._log.warning("%s: %s (further warnings of this kind are not shown)", episode_id, warning)


class Session:
    """The `engine` of `async def run_episode(self, engine, data)`."""

    def __init__(self, resources: Resources, episode_id: str) -> None:
        self.resources = resources
        self.episode_id = episode_id
        self.interactions: list[Interaction] = []
        """Those that are complete."""
        self.turn_rewards: dict[str, float] = {}
        """By interaction ID: rewards of single turns, besides the episode's."""
        self.warnings: dict[str, str] = {}
        """What the owner of the workflow or agent should know, and of which kind each warning is."""
        self._requests = 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.resources.tokenizer

    @property
    def prompt_column(self) -> str:
        """Name of the column of `data` that holds the prompt."""
        return self.resources.prompt_column

    def warn(self, warning: str, kind: str | None = None) -> None:
        """Warn the owner of the workflow or agent: once in the same words, and a few times of one kind.

        Args:
            warning: A sentence.
            kind: Without one, warnings that differ in nothing but numbers and IDs are of one kind.
        """
        kind = kind or re.sub(r"\S*\d\S*", "N", warning)
        count = sum(each == kind for each in self.warnings.values())
        if warning in self.warnings or count > MAX_WARNINGS:
            return
        if count == MAX_WARNINGS:
            warning = f"further warnings of this kind are not shown: {kind}"
        self.warnings[warning] = kind
        if self.resources.on_warning is not None:
            self.resources.on_warning(self.episode_id, warning, kind)

    def reserve(self) -> int:
        """The index of the next interaction, which is then taken."""
        self._requests += 1
        return self._requests - 1

    def interaction_id(self, index: int) -> str:
        """The ID of this episode's n-th interaction."""
        return f"{self.episode_id}.i{index}"

    async def generate(
        self,
        input_ids: list[int],
        *,
        prompt: str | list[dict[str, Any]] | None = None,
        images: Sequence[bytes] = (),
        index: int | None = None,
        on_token: OnToken | None = None,
        details: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Interaction:
        """Have the model complete `input_ids`, sampled as the configuration says.

        prompt: the text or messages that `input_ids` render, for the record.
        images: files (PNG, JPEG) that the tokens show, in order; `engine.see` makes such tokens.
        index: from `reserve`, where the request's place in the episode was settled before; None takes the next.
        on_token: told the first tokens as they come; all that the engine's stream has.
        details: further things for the record, such as the name of the model that a client asked for.
        overrides: fields of SamplingParams, for this request.
        Raises EngineError: the prompt does not fit into the context, or the parameters contradict one another.
        """
        if index is None:
            index = self.reserve()
        request_id = self.interaction_id(index)
        params = self._params(overrides, derive_seed(self.resources.seed, request_id))
        started_at = time.time()
        media = self.resources.media
        names = tuple((media_name if media is None else media.put)(image) for image in images)
        completion = await generate_through_aborts(
            self.resources.engine, list(input_ids), params, images=images, request_id=request_id, on_token=on_token
        )
        interaction = Interaction.of(
            completion,
            id=request_id,
            index=index,
            input_ids=list(input_ids),
            text=plain_text(self.tokenizer, completion.output_ids),
            params=params,
            images=names,
            prompt=prompt,
            started_at=started_at,
            finished_at=time.time(),
            details=dict(details or {}),
        )
        if completion.wrong_logprobs:
            interaction.details["wrong_logprobs"] = completion.wrong_logprobs
            self.warn(f"{request_id} cannot be trained on: {completion.wrong_logprobs}", kind="wrong logprobs")
        self.interactions.append(interaction)
        return interaction

    def see(self, text: str, images: Sequence[bytes]) -> list[int]:
        """The tokens of a text with the tokenizer's placeholder (`<image>`, say) in each image's place.

        images: files (PNG, JPEG). Raises ImageError: the model takes none, there are not as many placeholders, one of
        them is no image."""
        vision = self.resources.vision
        if vision is None:
            raise ImageError("the model takes no images.")
        encoded: Any = self.tokenizer(vision.expanded(text, images))
        return list(encoded["input_ids"])

    async def reward(self, completion: str, data: dict[str, Any]) -> Reward:
        """What the function rollout.reward gives this text. Raises EpisodeError: it raised, hung, or returned no
        finite number; ConfigError when there is none."""
        if self.resources.reward is None:
            raise ConfigError(
                "the workflow asks for a reward, and rollout.reward is not set. Name a function "
                "(completion, data) -> number by its dotted path: rollout.reward=my_module.my_reward."
            )
        return await self.resources.reward(completion, data)

    def _params(self, overrides: dict[str, Any], seed: int) -> SamplingParams:
        for name in overrides:
            if name not in _PARAMS:
                near = difflib.get_close_matches(name, _PARAMS, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(_PARAMS)}."
                raise EpisodeError(f"engine.generate takes no sampling parameter {name!r}.{hint}")
        for name in ("stop", "stop_token_ids"):
            if isinstance(overrides.get(name), list):
                overrides[name] = tuple(overrides[name])
            elif isinstance(overrides.get(name), str):
                overrides[name] = (overrides[name],)
        return replace(self.resources.sampling, **{"seed": seed, **overrides})


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Tokens as the model wrote them, without special ones."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def sampling_params(sampling: Sampling) -> SamplingParams:
    """The configuration's section as the engine takes it."""
    values = sampling.model_dump()
    ids = values.pop("stop_token_ids")
    stop = tuple(values.pop("stop"))
    return SamplingParams(**values, stop=stop, stop_token_ids=None if ids is None else tuple(ids))


def resources(
    config: Config,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    reward: Callable[[str, dict[str, Any]], Awaitable[Reward]] | None,
    *,
    vision: Sight | None,
    media: Media | None = None,
) -> Resources:
    """What the configuration says that all episodes share. vision: of a model and an engine that take images. media: of
    the record, where there is one."""
    return Resources(
        engine=engine,
        tokenizer=tokenizer,
        sampling=sampling_params(config.sampling),
        seed=config.seed,
        prompt_column=config.data.prompt,
        reward=reward,
        turn_discount=config.reward.turn_discount,
        context=context_of(tokenizer.name_or_path),
        vision=vision,
        media=media,
        individual=config.rollout.sequences == "individual",
    )
