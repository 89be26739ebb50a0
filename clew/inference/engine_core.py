"""Common part of the two engines that run inside a process: the queue, aborts, loading weights, completions.

An engine is synchronous and single-threaded here: `submit`, `step` until there is no work, `abort`, `load_weights`.
`clew.inference.local` puts it behind the asynchronous protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from clew.errors import EngineError, described
from clew.inference.loading import Named, Received, backed_up, copy_weights, restore, weights_of
from clew.inference.protocol import Completion, FinishReason, GenerateRequest, SchemaUnsupported, UpdateTimer
from clew.inference.request_checks import PROBE_TOLERANCE, ServedModel
from clew.models.vision import Vision
from clew.record.weights import WeightRef

Finished = tuple[GenerateRequest, Completion]

AbortTarget = GenerateRequest | str | None
"""Requests that an abort applies to: this one, those with this ID, or all (None)."""


def matches(request: GenerateRequest, which: AbortTarget) -> bool:
    """Return whether an abort of `which` includes this request."""
    return which is None or which is request or which == request.id


class Core(ServedModel):
    """Base class of `EmbeddedEngine` and `ReferenceEngine`."""

    def __init__(self, model: Any, tokenizer: Any, vision: Vision | None = None) -> None:
        """Create the engine for a causal language model of transformers, in eval mode."""
        vocab: int = model.get_output_embeddings().weight.shape[0]
        super().__init__(model.config, model.generation_config, tokenizer, vision, vocab)
        self.model = model
        self.device: torch.device = model.device
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.probe_tolerance = PROBE_TOLERANCE[self.dtype_name]
        self.never_drawn: Tensor | None = None
        """Mask [1, vocab] bool of the token that stands for images, which the model must not generate."""
        if vision is not None:
            self.never_drawn = torch.zeros(1, self.vocab, dtype=torch.bool, device=self.device)
            self.never_drawn[0, vision.image_id] = True
        self.pending_weights: Received | None = None
        """Weights that the trainer has broadcast and that are not loaded yet."""
        self.waiting: deque[GenerateRequest] = deque()

    # Implemented by the two engines ----------------------------------------------------------------------------------

    def step(self) -> list[Finished]:
        """Generate the next token of the running sequences; return those that ended."""
        raise NotImplementedError

    def running(self) -> int:
        raise NotImplementedError

    def _abort_running(self, which: AbortTarget) -> list[Finished]:
        raise NotImplementedError

    def logprobs(self, input_ids: list[int], images: Sequence[bytes] = ()) -> Tensor:
        """Return the logprobs [vocab] of the token after input_ids at temperature 1, computed as for requests."""
        raise NotImplementedError

    def score(self, input_ids: list[int]) -> float:
        """Return the logprob of the last token, given those before it."""
        return float(self.logprobs(input_ids[:-1])[input_ids[-1]])

    def cache_bytes(self) -> int:
        """Return the bytes that keys and values take now."""
        return 0

    def _drop_cache(self) -> None:
        """Free the memory of the cache while nothing runs. It is allocated again when requests need it."""

    # The interface ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.running() > 0

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
        if request.params.json_schema is not None:
            raise SchemaUnsupported("the embedded engine cannot hold its output to a JSON schema; vLLM and SGLang can.")
        super().check(request)

    @torch.inference_mode()
    def abort(self, which: AbortTarget = None) -> list[Finished]:
        """Abort one request, those with this ID, or all (None); return them with their tokens so far."""
        never_ran = self.abort_waiting(which)
        return self._abort_running(which) + never_ran

    def abort_waiting(self, which: AbortTarget = None) -> list[Finished]:
        """Abort only requests that are still in the queue; otherwise like `abort`."""
        waiting = [request for request in self.waiting if matches(request, which)]
        self.waiting = deque(request for request in self.waiting if not matches(request, which))
        return [
            (request, Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")) for request in waiting
        ]

    @torch.inference_mode()
    def release_memory(self) -> list[Finished]:
        """Give the cache's memory back to the device; return running requests as aborted. The queue stays."""
        aborted = self._abort_running(None)
        self._drop_cache()
        torch.cuda.empty_cache()
        return aborted

    def load_weights(
        self, ref: WeightRef, clock: UpdateTimer | None = None, weights: Callable[[], Iterator[Named]] | None = None
    ) -> None:
        """Load weights in place and score the probe. The caller has aborted all running requests.

        The weights are checked before the model's own are changed. If a file is damaged or the probe differs, the old
        weights are restored, so that a failed load changes nothing. During the load, a copy of the model's weights is
        kept in main memory.

        Args:
            clock: Measures how long each part takes.
            weights: Result of `weights_of`, if it was called already: for a broadcast, it takes a long time.

        Raises:
            EngineError: The weights are refused, and the old ones are still served. Any other error means that the old
                ones could not be restored; `broken` then says so.
        """
        clock, weights = clock or UpdateTimer(), weights or weights_of(self.model, ref, self.pending_weights)
        self.abort()  # a failed step may have left requests
        broken_before, backup = self.broken, {}
        try:
            with clock("load"):
                backup = backed_up(self.model)
                copy_weights(self.model, ref.path, weights())
            with clock("verify"):
                self._check_probe(ref)
        except Exception as error:  # the device may be out of memory, for example
            # Not set during the load itself: requests that arrive then wait for its end, and must not be refused.
            self.broken = f"loading version {ref.version} from {ref.path} did not finish"
            restore(self.model, backup)
            self.broken = broken_before
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"Cannot load version {ref.version} from {ref.path}: {described(error)}.") from error
        self.version, self.broken, self.pending_weights = ref.version, None, None

    def _check_probe(self, ref: WeightRef) -> None:
        if len(ref.probe_ids) < 2:
            return
        logprob = self.score(ref.probe_ids)
        if not abs(logprob - ref.probe_logprob) <= self.probe_tolerance:  # NaN too
            raise EngineError(
                f"Cannot load version {ref.version} from {ref.path}: the engine gives the probe the logprob "
                f"{logprob:.6f}, the trainer gave it {ref.probe_logprob:.6f} (tolerance {self.probe_tolerance:g}, "
                f"{self.dtype_name}). Their weights differ, or they compute the model differently. The server "
                f"continues with the weights from before."
            )

    # Completions -----------------------------------------------------------------------------------------------------

    def completion(
        self,
        output_ids: list[int],
        logprobs: list[float],
        reason: FinishReason,
        matched: int | str | None = None,
        masks: list[Tensor] | None = None,
    ) -> Completion:
        """Return a completion and count its tokens. All are by the current weights, as a load aborts all requests."""
        self.generated_tokens += len(output_ids)
        return Completion(
            output_ids=output_ids,
            logprobs=logprobs,
            versions=[self.version] * len(output_ids),
            finish_reason=reason,
            matched=matched,
            sampling_mask=None if masks is None else [mask.tolist() for mask in masks],
        )
