"""The slow reference engine: one sequence at a time, no cache, a full forward pass for each token.

The tests check that `EmbeddedEngine` gives the same results. It also serves the models that the fast path cannot serve:
see `clew.inference.embedded.build_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from clew.inference.engine_core import AbortTarget, Core, Finished, matches
from clew.inference.protocol import FinishReason, GenerateRequest
from clew.inference.request_checks import matched_stop
from clew.inference.sampling import RowParams, choose, uniform
from clew.models.vision import Vision


class ReferenceEngine(Core):
    """Slow engine: one sequence at a time, without a cache. See `Core` for the interface."""

    def __init__(self, model: object, tokenizer: object, vision: Vision | None = None) -> None:
        super().__init__(model, tokenizer, vision)
        self._request: GenerateRequest | None = None
        self._output: list[int] = []
        self._logprobs: list[float] = []
        self._masks: list[torch.Tensor] | None = None

    def running(self) -> int:
        return 0 if self._request is None else 1

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        request = self._request
        if request is None:
            if not self.waiting:
                return []
            request = self._request = self.waiting.popleft()
            self._output, self._logprobs = [], []
            self._masks = [] if request.sampling_mask and request.params.truncates(self.vocab) else None
        params, ids = request.params, request.input_ids + self._output
        stop_ids = params.stop_ids(self.default_stop_ids)
        rows = RowParams.stack([params], self.vocab, self.device)
        banned = self.never_drawn
        if len(self._output) < params.min_new_tokens and stop_ids:
            stops = torch.zeros(1, self.vocab, dtype=torch.bool, device=self.device)
            stops[0, list(stop_ids)] = True
            banned = stops if banned is None else stops | banned
        uniforms = uniform(rows.seeds, torch.tensor([len(ids)], device=self.device))
        drawn = choose(self._logits(ids, request.images), rows, uniforms, banned)
        if self._masks is not None:
            self._masks += drawn.masks([0])
        token, logprob = drawn.ids_R.item(), drawn.logprobs_R.item()
        self._output.append(int(token))
        self._logprobs.append(logprob)
        if request.on_token:
            request.on_token(int(token), logprob)
        if token in stop_ids:
            return [self._finish("stop", int(token))]
        matched = matched_stop(request, self._output, self.tokenizer)
        if matched is not None:
            return [self._finish("stop", matched)]
        if len(ids) + 1 >= self.limit(request):
            return [self._finish("length")]
        return []

    @torch.inference_mode()
    def logprobs(self, input_ids: list[int], images: Sequence[bytes] = ()) -> torch.Tensor:
        return torch.log_softmax(self._logits(input_ids, images).float(), -1)[0]

    def _logits(self, ids: list[int], images: Sequence[bytes]) -> torch.Tensor:
        """Return logits [1, vocab] after the last token."""
        ids_1T = torch.tensor([ids], device=self.device)
        seen = self.vision.inputs(ids_1T, [images], self.model.dtype) if self.vision is not None else {}
        return self.model(ids_1T, use_cache=False, **seen).logits[:, -1]

    def _finish(self, reason: FinishReason, matched: int | str | None = None) -> Finished:
        request, self._request = self._request, None
        assert request is not None
        return request, self.completion(self._output, self._logprobs, reason, matched, self._masks)

    def _abort_running(self, which: AbortTarget) -> list[Finished]:
        if self._request is None or not matches(self._request, which):
            return []
        return [self._finish("abort")]
