"""The `engine` that a workflow gets for one episode.

It asks the model, calls the reward function, and keeps every interaction.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from clew.config import Config, Sampling
from clew.errors import ConfigError, EpisodeError, ImageError, did_you_mean
from clew.gateway.interactions import Interaction
from clew.inference.protocol import Engine, GenerateRequest, OnToken, SamplingParams
from clew.inference.retries import generate_through_aborts
from clew.models.architecture import context_of
from clew.models.vision import ImageExpander
from clew.record.media import Media, media_name
from clew.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WARNINGS = 3
"""Maximum number of warnings of one kind that an episode keeps."""

MAX_NEW_TOKENS = 512
"""Limit of a response, in tokens, if neither a configuration nor the agent sets one."""

_PARAMS = [field.name for field in fields(SamplingParams) if field.name != "continues"]
"""Sampling parameters that a workflow may set."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that all episodes of a run share."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    """Default sampling parameters; the seed is set for each interaction."""
    seed: int
    prompt_column: str
    reward: Callable[[str, dict[str, Any]], Awaitable[float | dict[str, float]]] | None
    turn_discount: float = 1.0
    context: int | None = None
    """Context length of the model in tokens; None if it is not known."""
    vision: ImageExpander | None = None
    """Image input of the model; None if the model or the engine takes no images."""
    media: Media | None = None
    """Folder that keeps images for the record; None: images are not kept."""
    individual: bool = False
    """True makes each interaction a sequence of its own. False joins interactions that extend one another."""
    restart: bool = False
    """True starts a generation again from its prompt when new weights interrupt it. False continues it."""
    on_warning: Callable[[str, str, str], None] | None = None
    """Function that gets each new warning: the episode's ID, the warning and its kind."""

    def at_temperature(self, temperature: float) -> Resources:
        """Return a copy that samples at another temperature, for an evaluation."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))


class WarningLog:
    """Logs only the first warning of each kind. Otherwise hundreds of episodes would repeat it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[str] = set()

    def add(self, episode_id: str, warning: str, kind: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            self._log.warning("%s: %s (further warnings of this kind are not shown)", episode_id, warning)


class EpisodeEngine:
    """The `engine` of `async def run_episode(self, engine, data)`."""

    def __init__(self, resources: Resources, episode_id: str) -> None:
        self.resources = resources
        self.episode_id = episode_id
        self.interactions: list[Interaction] = []
        """Interactions that are complete."""
        self.turn_rewards: dict[str, float] = {}
        """Rewards of single turns by interaction ID, in addition to the reward of the episode."""
        self.warnings: dict[str, str] = {}
        """Warnings for the owner of the workflow or agent, each with its kind."""
        self._requests = 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.resources.tokenizer

    @property
    def prompt_column(self) -> str:
        """Name of the column of `data` that holds the prompt."""
        return self.resources.prompt_column

    def warn(self, warning: str, kind: str | None = None) -> None:
        """Warn the owner of the workflow or agent.

        Repeated warnings are dropped, and only the first MAX_WARNINGS of each kind are kept. By default, warnings that
        differ only in numbers and IDs count as the same kind.
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
        """Reserve the index of the next interaction, and return it."""
        self._requests += 1
        return self._requests - 1

    def interaction_id(self, index: int) -> str:
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
        """Let the model complete `input_ids`, with the sampling parameters of the configuration.

        Args:
            input_ids: Tokens of the prompt.
            prompt: Text or messages that were turned into `input_ids`, for the record.
            images: Image files (PNG, JPEG), in the order in which they appear in the prompt.
                `engine.see` makes the tokens that stand for them.
            index: Index from `reserve`, if the request's place in the episode was fixed earlier; None: the next one.
            on_token: Called with each token and its logprob, in order. Not called if the engine does not stream.
            details: Further entries for the record, such as the name of the model that a client asked for.
            overrides: Fields of SamplingParams, for this request.

        Raises:
            EngineError: The prompt does not fit into the context, or the parameters contradict one another.
            EpisodeError: One of the overrides is not a sampling parameter.
        """
        if index is None:
            index = self.reserve()
        request_id = self.interaction_id(index)
        params = self._params(overrides, derive_seed(self.resources.seed, request_id))
        started_at = time.time()
        media = self.resources.media
        names = tuple((media_name if media is None else media.put)(image) for image in images)
        request = GenerateRequest(list(input_ids), params, tuple(images), request_id, on_token, sampling_mask=True)
        completion = await generate_through_aborts(self.resources.engine, request, restart=self.resources.restart)
        interaction = Interaction(
            **vars(completion),
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
        """Return the tokens of a text with images.

        Args:
            text: Text with the tokenizer's placeholder, such as `<image>`, for each image.
            images: Image files (PNG, JPEG), in the order of the placeholders.

        Raises:
            ImageError: The model takes no images, the number of placeholders differs, or a file is not an image.
        """
        vision = self.resources.vision
        if vision is None:
            raise ImageError("Cannot show images: the model, or its inference engine, takes text only.")
        encoded: Any = self.tokenizer(vision.expanded(text, images))
        return list(encoded["input_ids"])

    async def reward(self, completion: str, data: dict[str, Any]) -> float | dict[str, float]:
        """Return the reward that the function named in rollout.reward gives to this text.

        Raises:
            EpisodeError: The function raised, hung, or returned no finite number.
            ConfigError: rollout.reward is not set.
        """
        if self.resources.reward is None:
            raise ConfigError(
                "the workflow asks for a reward, but rollout.reward is not set. Name a function "
                "(completion, data) -> number by its dotted path: rollout.reward=my_module.my_reward."
            )
        return await self.resources.reward(completion, data)

    def _params(self, overrides: dict[str, Any], seed: int) -> SamplingParams:
        for name in overrides:
            if name not in _PARAMS:
                hint = did_you_mean(name, _PARAMS) or f" Valid names: {', '.join(_PARAMS)}."
                raise EpisodeError(f"engine.generate takes no sampling parameter {name!r}.{hint}")
        for name in ("stop", "stop_token_ids"):  # agents give lists, or one string
            if isinstance(overrides.get(name), list):
                overrides[name] = tuple(overrides[name])
            elif isinstance(overrides.get(name), str):
                overrides[name] = (overrides[name],)
        return replace(self.resources.sampling, **{"seed": seed, **overrides})


def plain_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of tokens as the model wrote it, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def sampling_params(sampling: Sampling) -> SamplingParams:
    """Return the `sampling` section of the configuration as parameters for the engine."""
    values = sampling.model_dump()
    ids = values.pop("stop_token_ids")
    stop = tuple(values.pop("stop"))
    return SamplingParams(**values, stop=stop, stop_token_ids=None if ids is None else tuple(ids))


def resources(
    config: Config,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    reward: Callable[[str, dict[str, Any]], Awaitable[float | dict[str, float]]] | None,
    *,
    vision: ImageExpander | None,
    media: Media | None = None,
) -> Resources:
    """Return the resources that all episodes of this configuration share; see `Resources`."""
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
        restart=config.inference.on_update == "restart",
    )
