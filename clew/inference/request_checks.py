"""Checks of requests before an engine sees them: those that can never be served are refused. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from clew.errors import EngineError, ImageError
from clew.inference.protocol import GenerateRequest, RequestTooLong, SamplingParams
from clew.models.architecture import context_in
from clew.models.vision import Vision

MAX_STOPS = 64
"""Maximum number of stop strings of a request; the text is searched for them after each token."""

MAX_STOP_LENGTH = 1024
"""Maximum number of characters of a stop string."""

MAX_STOP_IDS = 1024
"""Maximum number of stop IDs of a request."""

PROBE_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1}
"""Largest allowed difference, in nats, between the trainer's and the engine's logprob of the probe, by dtype."""


class ServedModel:
    """Part of an engine that knows its model: its limits, and the values that requests are checked against."""

    def __init__(self, config: Any, generation_config: Any, tokenizer: Any, vision: Vision | None, vocab: int) -> None:
        """Create it from transformers' configurations of the model. Without a tokenizer, it takes no stop strings."""
        self.tokenizer = tokenizer
        self.vision = vision
        self.vocab = vocab
        """Number of token IDs."""
        context, self._context_field = context_in(config)
        self.context = context or 2**40  # a model without positions, such as Mamba
        """Maximum tokens of a prompt with its completion."""
        self.default_stop_ids = default_stop_ids(generation_config, tokenizer, vocab)
        self.version = 0
        self.broken: str | None = None
        """Reason why nothing is served, such as a load that could not be undone; None if all is well."""
        self.generated_tokens = 0

    def check(self, request: GenerateRequest) -> None:
        """Raise EngineError, RequestTooLong or ImageError for a request that can never be served."""
        input_ids, params, images = request.input_ids, request.params, request.images
        if not input_ids:
            raise EngineError("input_ids is empty: a prompt needs at least one token.")
        if not _are_integers(input_ids):
            raise EngineError("input_ids must be a list of integers.")
        if len(input_ids) >= self.context:
            raise RequestTooLong(
                f"the prompt has {len(input_ids)} tokens, the model's context ({self._context_field}) is "
                f"{self.context}, and at least one token must remain. Shorten the prompt."
            )
        if min(input_ids) < 0 or max(input_ids) >= self.vocab:
            bad = next(token for token in input_ids if not 0 <= token < self.vocab)
            raise EngineError(
                f"input_ids holds {bad}; this model's token ids are 0 to {self.vocab - 1}. "
                f"Was the prompt made with another tokenizer?"
            )
        if wrong := _mistyped(params, self.vocab) or _contradiction(params):
            raise EngineError(f"sampling parameters: {wrong}.")
        if params.stop and self.tokenizer is None:
            raise EngineError("stop strings need a tokenizer, and this engine has none. Use stop_token_ids.")
        if self.vision is not None:
            self.vision.check(input_ids, images)
        elif images:
            raise ImageError("the model takes no images.")


def _are_integers(values: Iterable[object]) -> bool:
    # NumPy's integers count, too. The first test is there for speed.
    return all(kind is int or issubclass(kind, Integral) for kind in set(map(type, values)))


def _mistyped(params: SamplingParams, vocab: int) -> str | None:
    for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed", "continues"):
        if not _are_integers([value := getattr(params, name)]):
            return f"{name} is {value!r}, expected a whole number"
    for name in ("temperature", "top_p", "min_p"):
        if not isinstance(value := getattr(params, name), Real):
            return f"{name} is {value!r}, expected a number"
    for stop in params.stop:
        if not isinstance(stop, str):
            return f"stop holds {stop!r}, expected strings"
    for token in params.stop_token_ids or ():
        if not _are_integers([token]) or not 0 <= token < vocab:
            return f"stop_token_ids holds {token!r}; this model's token ids are 0 to {vocab - 1}"
    return None


def _contradiction(params: SamplingParams) -> str | None:
    if params.max_new_tokens < 1:
        return f"max_new_tokens is {params.max_new_tokens}, expected at least 1"
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        return f"min_new_tokens is {params.min_new_tokens}, expected 0 to max_new_tokens ({params.max_new_tokens})"
    if not 0 <= params.temperature < float("inf"):
        return f"temperature is {params.temperature}, expected a number from 0 up"
    if not 0 < params.top_p <= 1:
        return f"top_p is {params.top_p}, expected above 0, at most 1"
    if params.top_k < 0:
        return f"top_k is {params.top_k}, expected 0 (all) or more"
    if not 0 <= params.min_p < 1:
        return f"min_p is {params.min_p}, expected at least 0, below 1"
    if "" in params.stop:
        return "stop holds an empty string"
    if len(params.stop) > MAX_STOPS or max(map(len, params.stop), default=0) > MAX_STOP_LENGTH:
        return f"stop has more than {MAX_STOPS} strings, or one of more than {MAX_STOP_LENGTH} characters"
    if len(params.stop_token_ids or ()) > MAX_STOP_IDS:
        return f"stop_token_ids has {len(params.stop_token_ids or ())} entries, expected at most {MAX_STOP_IDS}"
    return None


def default_stop_ids(generation_config: Any, tokenizer: Any, vocab: int) -> tuple[int, ...]:
    """Return the end tokens of the tokenizer and of the generation config, if the model can draw them.

    The pad token counts only if the tokenizer has no end token, as in `clew.training.demonstrations`: vLLM, SGLang and
    transformers do not stop at a pad token, either.
    """
    named = generation_config.eos_token_id
    ids: set[int | None] = {*named} if isinstance(named, list) else {named}
    if tokenizer is not None:
        ids.add(tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id)
    return tuple(sorted(token for token in ids if token is not None and 0 <= token < vocab))


def stop_window(stops: Sequence[str]) -> int:
    """Return the number of tokens that may hold a stop string: the longest, and 8 more.

    A token may be one byte, and a character has up to four. Its text may depend on the tokens before it.
    """
    return max(len(stop) if stop.isascii() else 4 * len(stop) for stop in stops) + 8


def matched_stop(request: GenerateRequest, output_ids: list[int], tokenizer: Any) -> str | None:
    """Return the stop string that the last of output_ids completes; None if there is none."""
    params = request.params
    if not params.stop or len(output_ids) < params.min_new_tokens:
        return None
    window = stop_window(params.stop)
    recent = output_ids[-window:]
    if len(recent) < window and params.continues:
        earlier = request.input_ids[len(request.input_ids) - params.continues :]
        recent = (earlier + recent)[-window:]
    text, before = tokenizer.decode(recent), tokenizer.decode(recent[:-1])
    return next((stop for stop in params.stop if text.count(stop) > before.count(stop)), None)
