"""Protocol of every inference engine, and the values that are sent to it and come back. Imports no torch.

It covers the embedded engine in this process, `clew serve` over HTTP (in SGLang's native shapes), and servers of vLLM
and SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
from typing_extensions import TypedDict

from clew.errors import EngineError

FinishReason = Literal["stop", "length", "abort"]
"""Reason why a completion ended.

stop: a stop ID or stop string; length: `max_new_tokens` or the context is full; abort: cut short, submit it again.
"""

FINISH_REASONS = get_args(FinishReason)

OnToken = Callable[[int, float], None]
"""Callback that receives a token and its logprob while the tokens after it are still being generated."""

Timings = dict[str, float]
"""Seconds that each part of a weight update took in an engine: abort, load and verify, or receive.

No request is served meanwhile, except while `LocalEngine` receives.
"""


class UpdateTimer:
    """A stopwatch for the parts of a weight update."""

    def __init__(self) -> None:
        self.seconds: Timings = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began


class ServerFault(EngineError):
    """Base class of the errors that are the server's fault and not the request's."""

    def __init__(self, address: str, reason: str) -> None:
        """Create it; the address is "" if the engine that raises it is the faulty one."""
        super().__init__(f"inference server {address}: {reason}" if address else reason)
        self.address = address
        self.reason = reason


class EngineUnreachable(ServerFault):
    """Raised when the engine is not there, not ready, or serves nothing at present.

    The same request may succeed later: `clew.inference.retries` tries again until it does.
    """


class FaultyAnswer(ServerFault):
    """Raised when an answer cannot be right, such as logprobs that are NaN, or a web page instead of JSON.

    Another server may do better: `clew.inference.retries` tries again a few times.
    """


class RequestTooLong(EngineError):
    """Raised when the request does not fit into the model's context or the engine's cache; a shorter one would."""


class SchemaUnsupported(EngineError):
    """Raised when the engine cannot hold its output to a JSON schema, or cannot do so in a way that allows training."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for sampling tokens."""

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    """Minimum number of tokens. Until then, no stop ID is drawn (its probability is 0), and no stop string counts."""
    temperature: float = 1.0
    """Number that logits are divided by. 0 takes the likeliest token, and its logprob is that at temperature 1."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the smallest set of likeliest tokens whose probabilities add up to this."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0: all."""
    min_p: float = 0.0
    """Minimum probability of a token, as a share of the likeliest token's."""
    stop_token_ids: tuple[int, ...] | None = None
    """IDs that end a sequence and are part of it; None: the model's own, see `default_stop_ids`."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence. The tokens that complete one are part of it."""
    seed: int = 0
    """Seed of the random numbers.

    The embedded engine draws the token at position p (counted from the first prompt token) with one uniform number
    derived from (seed, p) alone. So it depends neither on who shares the batch nor on interruptions.
    """
    continues: int = 0
    """Number of tokens at the end of input_ids that are this request's own output from before an abort.

    A stop string may begin in them.
    """
    json_schema: str | None = None
    """JSON text of the schema that the output is held to, for vLLM and SGLang.

    Their logprobs are then relative to the tokens that the schema allows.
    """

    def stop_ids(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the IDs that end a sequence; `default` are the model's own."""
        return default if self.stop_token_ids is None else self.stop_token_ids

    def truncates(self, vocab: float) -> bool:
        """Return whether tokens are drawn from only a part of the `vocab` IDs; False for greedy decoding."""
        return self.temperature > 0 and (self.top_p < 1 or 0 < self.top_k < vocab or self.min_p > 0)


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """One sequence to complete, on its way from an episode to the engine."""

    input_ids: list[int]
    params: SamplingParams
    images: tuple[bytes, ...] = ()
    """Image files, in order; the tokens that stand for each are in input_ids already."""
    id: str = ""
    """ID for `abort`."""
    on_token: OnToken | None = None
    """Callback for all tokens that are returned, in order, as they are generated, on the caller's event loop.

    It is never called if the engine does not stream.
    """
    sampling_mask: bool = False
    """True asks for `Completion.sampling_mask` if `params` cut the distribution, with logprobs relative to it."""

    def continued(self, output_ids: list[int]) -> GenerateRequest:
        """Return the request for the rest of a completion that begins with `output_ids`."""
        params, done = self.params, len(output_ids)
        left = replace(
            params,
            max_new_tokens=params.max_new_tokens - done,
            min_new_tokens=max(0, params.min_new_tokens - done),
            continues=params.continues + done,
        )
        return replace(self, input_ids=self.input_ids + output_ids, params=left)


class Span(TypedDict):
    """Tokens from `start` to `end` (excluded) that one server sampled."""

    start: int
    end: int
    server: str
    version: str | None
    """The server's own label of the weights."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Completion of one request by the model. The lists are aligned: one entry per generated token."""

    output_ids: list[int]
    logprobs: list[float]
    """Logprobs under the distribution after temperature and before truncation (top_p, top_k, min_p), in nats.

    If there is a `sampling_mask`, they are renormalised over it, which is after truncation.
    """
    versions: list[int]
    """Version of the weights that made each token."""
    finish_reason: FinishReason
    matched: int | str | None = None
    """Stop ID or stop string that ended it."""
    wrong_logprobs: str = ""
    """Reason why the logprobs are not those that `logprobs` describes, and what to do; "" if they are."""
    sampling_mask: list[list[int]] | None = None
    """IDs that each token was drawn from; None if nothing was cut off, or if the engine does not say what."""
    sampled_by: list[Span] = field(default_factory=list)
    """Servers that sampled the tokens, with their own labels of their weights; empty if they have none."""
    routed_experts: np.ndarray | None = None
    """Experts of each token of prompt and output except the last, [tokens - 1, layers, experts], if reported."""

    def followed_by(self, more: Completion) -> Completion:
        """Return this completion followed by `more`, with which an engine continued it after an abort."""
        masks, wrong = self.sampling_mask, more.wrong_logprobs or self.wrong_logprobs
        if not self.output_ids:
            masks = more.sampling_mask
        elif more.output_ids and (masks is None) != (more.sampling_mask is None):
            masks, wrong = None, "only one of two servers said which tokens top_p, top_k or min_p had left"
        elif masks is not None:
            masks = masks + (more.sampling_mask or [])
        done, experts = len(self.output_ids), more.routed_experts
        if self.routed_experts is not None and experts is not None:
            experts = np.concatenate([self.routed_experts, experts[len(self.routed_experts) :]])
        elif done:
            experts = self.routed_experts if not more.output_ids else None
        return replace(
            more,
            output_ids=self.output_ids + more.output_ids,
            logprobs=self.logprobs + more.logprobs,
            versions=self.versions + more.versions,
            wrong_logprobs=wrong,
            sampling_mask=masks,
            sampled_by=self.sampled_by + shift_spans(more.sampled_by, done),
            routed_experts=experts,
        )

    def first(self, count: int) -> Completion:
        """Return the first tokens of this completion."""
        experts = self.routed_experts
        spans = [Span(**{**span, "end": min(span["end"], count)}) for span in self.sampled_by if span["start"] < count]
        return replace(
            self,
            output_ids=self.output_ids[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            sampling_mask=self.sampling_mask and self.sampling_mask[:count],
            sampled_by=spans,
            routed_experts=None if experts is None else experts[: len(experts) - len(self.output_ids) + count],
        )


def spans_of(reported: Iterable[Mapping[str, Any]], server: str) -> list[Span]:
    """Return the spans of versions that a server reports, with its name unless they name the server behind it."""
    spans: list[Span] = []
    for each in reported:
        start, end = int(each["start"]), int(each["end"])
        if end > start:
            spans.append(Span(start=start, end=end, server=str(each.get("server", server)), version=each["version"]))
    return spans


def shift_spans(spans: Iterable[Span], offset: int) -> list[Span]:
    """Return the spans with `offset` added to `start` and `end`."""
    return [{**span, "start": span["start"] + offset, "end": span["end"] + offset} for span in spans]


class Engine(Protocol):
    """Inference engine, as rollout sees it."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Complete one sequence.

        If it is aborted (because weights are loaded, or on request), the tokens so far are returned with finish_reason
        "abort". `generate_through_aborts` submits them again.

        Raises:
            EngineError: The parameters contradict one another.
            EngineUnreachable: The engine cannot be reached; on_token was not called.
            FaultyAnswer: The answer cannot be right; on_token was not called.
            RequestTooLong: The request is longer than the context.
            SchemaUnsupported: The engine cannot hold its output to the schema.
            ImageError: The model takes no images, or not these.
        """
        ...

    async def version(self) -> int:
        """Return the version of the weights that it serves."""
        ...
