"""A model that answers each request with the response that was recorded for the same request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clew.config import Config
from clew.errors import EpisodeError
from clew.gateway.episode_engine import EpisodeEngine, Resources, resources
from clew.gateway.interactions import Interaction
from clew.inference.protocol import RequestTooLong, SamplingParams
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.printing import around, common_length
from clew.record.media import media_name
from clew.record.rows import Sequence as Row
from clew.record.run import RunDirectory
from clew.seeds import derive_seed


class RecordedModel(EpisodeEngine):
    def __init__(
        self,
        shared: Resources,
        answers: Sequence[Interaction],
        episode_id: str,
        *,
        live: bool = False,
        sampling: bool = True,
    ) -> None:
        """Set up the model for one episode.

        Args:
            answers: Recorded interactions of the episode.
            live: If True, the engine answers the first request that differs and all later ones. If False, the first
                request that differs fails, and so do all later ones.
            sampling: If True, a request with different sampling parameters counts as different.
        """
        super().__init__(shared, episode_id)
        self.recorded = len(answers)
        self.answered = 0
        """Number of requests that got the recorded response."""
        self.live_answers = 0
        """Number of requests that the engine answered."""
        self.difference: list[str] = []
        """Lines that show the first request that differs and the recorded one; empty if none differed."""
        self._unused = list(answers)
        self._continue_live = live
        self._sampling_counts = sampling

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
            RequestTooLong: The prompt fills the context. Such a request was refused, so none is on record.
        """
        index = self.reserve() if index is None else index
        if not self.difference:
            now = self._request(index, input_ids, prompt, images, details or {}, overrides)
            answer = next((then for then in self._unused if self._difference(then, now) is None), None)
            if answer is not None:
                self._unused.remove(answer)
                self.answered += 1
                own_id = self.interaction_id(index)
                interaction = replace(answer, id=own_id, index=index, details=dict(details or {}))
                self.interactions.append(interaction)
                return interaction
            if self.resources.context is not None and len(input_ids) >= self.resources.context:
                raise RequestTooLong(f"the prompt has {len(input_ids)} tokens, the context {self.resources.context}.")
            self.difference = self._describe(now)
        if not self._continue_live:
            raise EpisodeError(
                f"Cannot answer request {index} from the record of {self.episode_id}: the agent now asks something "
                f"else. {self.difference[0].removesuffix(':')}."
            )
        self.live_answers += 1
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
        sampling = {name: value for name, value in overrides.items() if name != "on_token"}
        id = self.interaction_id(index)
        return Interaction(
            id=id,
            index=index,
            input_ids=list(input_ids),
            output_ids=[],
            logprobs=[],
            versions=[],
            finish_reason="abort",
            text="",
            params=self._params(sampling, derive_seed(self.resources.seed, id)),
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
        # Older records do not list the tools. But the tokens contain the tools as the template rendered them.
        before, after = then.details.get("tools"), now.details.get("tools", [])
        if before is not None and (found := first_difference(before, after, "tool")):
            return found
        if then.images != now.images:
            return first_difference(list(then.images), list(now.images), "image")
        if then.input_ids != now.input_ids:
            return self._in_tokens(then.input_ids, now.input_ids)
        if not self._sampling_counts:
            return None
        before, after = self._sampling(then), self._sampling(now)
        return first_difference(before, after, "sampling") or first_difference(
            then.details.get("model"), now.details.get("model"), "model"
        )

    def _in_tokens(self, then: list[int], now: list[int]) -> Divergence:
        """Return the first difference in the model's input, as text or else as tokens, if the messages are the same."""
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
        params = {name: value for name, value in vars(request.params).items() if name not in ("seed", "continues")}
        if request.params.seed != derive_seed(self.resources.seed, request.id):
            params["seed"] = request.params.seed - request.index  # the gateway adds the turn to a client's seed
        return json.loads(json.dumps(params))

    def _describe(self, now: Interaction) -> list[str]:
        if not self._unused:
            head = f"request {now.index} is new: every recorded request ({self.recorded}) is already answered:"
            return [head, *_lines(now.prompt)]
        then = next((each for each in self._unused if each.index == now.index), self._unused[0])
        found = self._difference(then, now)
        assert found is not None, "it would have been answered"
        head = f"request {now.index} differs from the recorded {then.id} in {found.where}:"
        return [head, f"-recorded: {found.then}", f"+now:      {found.now}"]


@dataclass(frozen=True)
class Divergence:
    where: str
    """Place in words, such as "message 2 (tool), content, character 14"."""
    then: str
    now: str


AROUND = 60
"""Number of characters shown before and after the first one that differs."""
ABSENT = object()


def first_difference(then: Any, now: Any, where: str) -> Divergence | None:
    """Return the first place where two JSON values differ; None if they are equal.

    In a text, the place is a character position. It is shown with the text around it, in which marks stand for spaces
    and line breaks.
    """
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
    if then == now and isinstance(then, bool) == isinstance(now, bool):  # in Python, True == 1
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
    """Return the text around a position as one line, with a visible mark for each space, line break and tab."""
    marks = {ord(" "): "·", ord("\n"): "⏎", ord("\r"): "␍", ord("\t"): "⇥", 0xA0: "⍽"}
    return around(text, at, AROUND).translate(marks) or "(nothing)"


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


def resources_of(run: RunDirectory, config: Config, engine: Any, reward: Any) -> Resources:
    """Return what a run's episodes share. Tokenizer and image processor come from the oldest checkpoint, if any."""
    versions = run.checkpointed()
    tokenizer = load_tokenizer(str(run.checkpoint(versions[0])) if versions else config.model.path)
    return resources(config, engine, tokenizer, reward, vision=load_vision(tokenizer.name_or_path))


def interactions_of(sequences: Iterable[Row]) -> list[Interaction]:
    """Return the interactions of an episode from its rows, in the order of their indices."""
    interactions = [_interaction(row, recorded) for row in sequences for recorded in row.interactions]
    return sorted(interactions, key=lambda interaction: interaction.index)


def _interaction(row: Row, recorded: dict[str, Any]) -> Interaction:
    first, last = recorded["input_tokens"], recorded["input_tokens"] + recorded["output_tokens"]
    tokens = recorded.get("tokens") or {
        "input_ids": row.input_ids[:first].tolist(),
        "output_ids": row.input_ids[first:last].tolist(),
        "logprobs": row.logprobs[first:last].tolist(),
        "versions": row.versions[first:last].tolist(),
    }
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recorded["sampling"].items()
    }
    return Interaction(
        **tokens,
        finish_reason=recorded["finish_reason"],
        matched=recorded.get("matched"),
        id=recorded["id"],
        index=recorded["turn"],
        images=tuple(recorded.get("images", ())),
        text=recorded["completion"],
        params=SamplingParams(**sampling, seed=recorded["seed"]),
        prompt=recorded["prompt"],
        started_at=recorded["started_at"],
        finished_at=recorded["finished_at"],
        details={name: recorded[name] for name in ("model", "tools") if name in recorded},
    )
