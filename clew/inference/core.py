"""Common part of the two engines that run inside a process: requests, the queue, stop rules, loading weights.

An engine is synchronous and single-threaded here: `submit`, `step` until there is no work, `abort`, `load_weights`.
`clew.inference.local` puts it behind the asynchronous protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from clew.errors import EngineError, ImageError, described
from clew.inference.loading import backed_up, check_weights, copy_weights, restore
from clew.inference.protocol import (
    Completion,
    FinishReason,
    GenerateRequest,
    RequestTooLong,
    SamplingParams,
    SchemaUnsupported,
)
from clew.models.architecture import context_in
from clew.models.vision import Vision
from clew.record.weights import WeightRef

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest allowed difference, in nats, between the probe's logprobs of trainer and engine, by dtype."""


MAX_STOPS = 64
"""Maximum number of stop strings of a request; the text is searched for them after each token."""

MAX_STOP_LENGTH = 1024
"""Maximum number of characters of a stop string."""

MAX_STOP_IDS = 1024
"""Maximum number of stop IDs of a request."""

_UNBOUNDED = 2**40
"""Context length for models without positions (Mamba)."""

Finished = tuple[GenerateRequest, Completion]

Aborted = GenerateRequest | str | None
"""Requests that an abort means: this one, those with this ID, or all (None)."""


def is_meant(request: GenerateRequest, which: Aborted) -> bool:
    """Return whether an abort of `which` includes this request."""
    return which is None or which is request or which == request.id


class Core:
    """Base class of `EmbeddedEngine` and `ReferenceEngine`."""

    def __init__(self, model: Any, tokenizer: Any, vision: Vision | None = None) -> None:
        """Create the engine.

        Args:
            model: A causal language model of transformers, in eval mode.
            tokenizer: May be None if neither stop strings nor default stop IDs are needed.
            vision: The image inputs of a model that takes images.
        """
        self.model = model
        self.vision = vision
        self.tokenizer = tokenizer
        self.device: torch.device = model.device
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        context, self._context_field = context_in(model.config)
        self.context = context or _UNBOUNDED
        self.default_stop_ids = _default_stop_ids(model, tokenizer, self.vocab)
        self.never_drawn: Tensor | None = None
        """Mask [1, vocab] bool of the token that stands for images, which the model must not generate."""
        if vision is not None:
            self.never_drawn = torch.zeros(1, self.vocab, dtype=torch.bool, device=self.device)
            self.never_drawn[0, vision.image_id] = True
        self.version = 0
        self.broken: str | None = None
        """Reason why nothing is served: a step failed, or a load that could not be undone. None if all is well."""
        self.waiting: deque[GenerateRequest] = deque()
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.finished_requests = 0

    # To be given by the two ------------------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Generate the next token of the running sequences; return those that ended."""
        raise NotImplementedError

    def running(self) -> int:
        """Return the number of sequences that are being generated."""
        raise NotImplementedError

    def _abort_running(self, which: Aborted) -> list[Finished]:
        raise NotImplementedError

    def logprobs(self, input_ids: list[int], images: Sequence[bytes] = ()) -> Tensor:
        """Return the logprobs [vocab] of the token after input_ids at temperature 1, by the path that serves them."""
        raise NotImplementedError

    def score(self, input_ids: list[int]) -> float:
        """Return the logprob of the last token, given those before it."""
        return float(self.logprobs(input_ids[:-1])[input_ids[-1]])

    def cache_bytes(self) -> int:
        """Return the bytes that keys and values take now."""
        return 0

    def _drop_cache(self) -> None:
        """Free the memory of the cache while nothing runs; it is taken again as requests need it."""

    # The interface ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.running() > 0

    def stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the IDs that end this request's sequence."""
        own = request.params.stop_token_ids
        return self.default_stop_ids if own is None else own

    def limit(self, request: GenerateRequest) -> int:
        """Return the length of prompt and output together at which this request's sequence ends."""
        return min(len(request.input_ids) + request.params.max_new_tokens, self.context)

    def submit(self, request: GenerateRequest) -> None:
        """Put a request into the queue.

        Raises:
            EngineError: The request can never be served.
        """
        if self.broken:
            raise EngineError(f"Cannot serve anything: {self.broken}")
        self.check(request)
        self.waiting.append(request)

    def check(self, request: GenerateRequest) -> None:
        """Raise an error for a request that can never be served, so that it is refused and cannot break the engine.

        Raises:
            EngineError: The prompt is empty or not of this vocabulary, or the parameters contradict one another or
                cannot be computed with.
            RequestTooLong: The prompt is too long for the model's context.
            SchemaUnsupported: The parameters have a JSON schema.
            ImageError: The model takes no images, or the prompt does not fit these images.
        """
        input_ids, params, images = request.input_ids, request.params, request.images
        if not input_ids:
            raise EngineError("input_ids is empty: a prompt needs at least one token.")
        if not _whole(input_ids):
            raise EngineError("input_ids must be a list of integers.")
        if len(input_ids) >= self.context:
            raise RequestTooLong(
                f"the prompt has {len(input_ids)} tokens, the model's context ({self._context_field}) "
                f"is {self.context}, and at least one token must remain. Shorten the prompt."
            )
        if min(input_ids) < 0 or max(input_ids) >= self.vocab:
            bad = next(token for token in input_ids if not 0 <= token < self.vocab)
            raise EngineError(
                f"input_ids holds {bad}; this model's token ids are 0 to {self.vocab - 1}. "
                f"Was the prompt made with another tokenizer?"
            )
        wrong = _mistyped(params, self.vocab) or _contradiction(params)
        if wrong:
            raise EngineError(f"sampling parameters: {wrong}.")
        if params.stop and self.tokenizer is None:
            raise EngineError("stop strings need a tokenizer, and this engine has none. Use stop_token_ids.")
        if params.json_schema is not None:
            raise SchemaUnsupported("the embedded engine cannot hold its output to a JSON schema; vLLM and SGLang can.")
        if images and self.vision is None:
            raise ImageError("the model takes no images.")
        if self.vision is not None:
            self.vision.check(input_ids, images)

    @torch.inference_mode()
    def abort(self, which: Aborted = None) -> list[Finished]:
        """Abort one request, those with this ID, or all (None); return them with their tokens so far."""
        waiting = [request for request in self.waiting if is_meant(request, which)]
        self.waiting = deque(request for request in self.waiting if not is_meant(request, which))
        never_ran = [
            (request, Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")) for request in waiting
        ]
        return self._abort_running(which) + never_ran

    @torch.inference_mode()
    def release_memory(self) -> list[Finished]:
        """Give the cache's memory back to the device.

        Running requests are aborted and returned with their tokens so far; waiting ones keep waiting.
        """
        aborted = self._abort_running(None)
        self._drop_cache()
        torch.cuda.empty_cache()
        return aborted

    def load_weights(self, ref: WeightRef) -> None:
        """Load weights in place and score the probe. The caller has aborted what was in flight.

        The files are checked before a live weight is touched. If a file breaks or the probe differs, the old weights
        are put back, so that a failed load changes nothing. During the load, a copy of the model's weights is kept in
        main memory.

        Raises:
            EngineError: The weights are refused, and the old ones are still served. If the old ones could not be put
                back, `broken` says so, and nothing is served until a load succeeds.
        """
        files = check_weights(self.model, ref.path, ref.digest)
        self.abort()  # what a failed step may have left; what was in flight has been aborted by the caller
        before, backup = self.broken, backed_up(self.model)
        self.broken = f"loading version {ref.version} from {ref.path} did not finish"
        try:
            copy_weights(self.model, ref.path, files)
            self._check_probe(ref)
        except Exception as error:  # the device may be out of memory, for example
            restore(self.model, backup)
            self.broken = before
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"Cannot load version {ref.version} from {ref.path}: {described(error)}.") from error
        self.version, self.broken = ref.version, None

    def _check_probe(self, ref: WeightRef) -> None:
        if len(ref.probe_ids) < 2:
            return
        tolerance = PROBE_TOLERANCE.get(self.model.dtype, 0.1)
        logprob = self.score(ref.probe_ids)
        if not abs(logprob - ref.probe_logprob) <= tolerance:  # NaN too
            raise EngineError(
                f"Cannot load version {ref.version} from {ref.path}: the engine gives the probe the logprob "
                f"{logprob:.6f}, the trainer gave it {ref.probe_logprob:.6f} (tolerance {tolerance:g}, "
                f"{str(self.model.dtype).removeprefix('torch.')}). They do not hold the same weights, or do not "
                f"compute the same model. The server continues with the weights from before."
            )

    # Stop rules ------------------------------------------------------------------------------------------------------

    def matched_stop(self, request: GenerateRequest, output_ids: list[int]) -> str | None:
        """Return the stop string that the last of output_ids completes; None if there is none."""
        params = request.params
        if not params.stop or len(output_ids) < params.min_new_tokens:
            return None
        # One token is at least one character, but for multi-byte characters: 8 tokens of room for these.
        window = max(map(len, params.stop)) + 8
        recent = output_ids[-window:]
        if len(recent) < window and params.continues:
            earlier = request.input_ids[len(request.input_ids) - params.continues :]
            recent = (earlier + recent)[-window:]
        text, before = self.tokenizer.decode(recent), self.tokenizer.decode(recent[:-1])
        return next((stop for stop in params.stop if text.count(stop) > before.count(stop)), None)

    def completion(
        self, output_ids: list[int], logprobs: list[float], reason: FinishReason, matched: int | str | None = None
    ) -> Completion:
        """Return a completion by the present weights, and count it.

        A load aborts all requests, so no sequence spans two versions.
        """
        self.generated_tokens += len(output_ids)
        self.finished_requests += 1
        return Completion(
            output_ids=output_ids,
            logprobs=logprobs,
            versions=[self.version] * len(output_ids),
            finish_reason=reason,
            matched=matched,
        )


def _whole(values: Iterable[object]) -> bool:
    return all(issubclass(kind, Integral) for kind in set(map(type, values)))  # NumPy's too


def _mistyped(params: SamplingParams, vocab: int) -> str | None:
    for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed", "continues"):
        if not _whole([value := getattr(params, name)]):
            return f"{name} is {value!r}, expected a whole number"
    for name in ("temperature", "top_p", "min_p"):
        if not isinstance(value := getattr(params, name), Real):
            return f"{name} is {value!r}, expected a number"
    for stop in params.stop:
        if not isinstance(stop, str):
            return f"stop holds {stop!r}, expected strings"
    for token in params.stop_token_ids or ():
        if not _whole([token]) or not 0 <= token < vocab:
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


def _default_stop_ids(model: Any, tokenizer: Any, vocab: int) -> tuple[int, ...]:
    """Return the tokenizer's end and pad tokens, and the end tokens of the model's generation config.

    Tokens that the model cannot generate are left out.
    """
    ids: set[int] = set()
    if tokenizer is not None:
        ids |= {token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None}
    named = model.generation_config.eos_token_id
    ids |= set(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(token for token in ids if 0 <= token < vocab))
