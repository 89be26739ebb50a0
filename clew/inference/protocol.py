"""What every inference engine does, and the values that travel to it and back. Imports no torch.

One protocol serves the embedded engine in this process, `clew serve` over HTTP, and SGLang (whose native HTTP shapes
`clew serve` speaks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from clew.errors import EngineError
from clew.record.weights import WeightRef

FinishReason = Literal["stop", "length", "abort"]
"""stop: a stop id or stop string; length: `max_new_tokens` or the context is full; abort: cut short, resubmit."""


OnToken = Callable[[int, float], None]
"""Is told a token and its logprob while those after it are still being generated."""


class EngineUnreachable(EngineError):
    """The engine is not there, not ready or serves nothing at present. The same request may succeed later:
    `clew.inference.resubmit` tries again until it does."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"inference server {address}: {reason}")
        self.address = address
        self.reason = reason


class RequestTooLong(EngineError):
    """The request does not fit into the model's context, or the engine's cache; a shorter one would."""


class SchemaUnsupported(EngineError):
    """The engine cannot hold its output to a JSON schema, or not so that the output could be trained on."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn."""

    max_new_tokens: int = 256
    """Tokens, at most."""
    min_new_tokens: int = 0
    """No stop id is drawn (its probability is 0) and no stop string counts before this many tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token, whose logprob is then that at temperature 1."""
    top_p: float = 1.0
    """Nucleus: the fewest likeliest tokens whose probability reaches this."""
    top_k: int = 0
    """The likeliest k tokens; 0: all."""
    min_p: float = 0.0
    """Tokens at least this share as likely as the likeliest."""
    stop_token_ids: tuple[int, ...] | None = None
    """End a sequence, and are part of it. None: the tokenizer's end and pad tokens and the model's generation
    config's. (): none."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence; the tokens that complete one are part of it."""
    seed: int = 0
    """The token at position p (counted from the first prompt token) is drawn with one uniform number derived from
    (seed, p) alone, so it depends neither on who shares the batch nor on interruptions."""
    continues: int = 0
    """The last so many of input_ids are this request's own output from before an abort: a stop string may begin
    in them."""
    json_schema: str | None = None
    """JSON text of the schema that the output is held to. For vLLM and SGLang; their logprobs are then those among the
    tokens that the schema allows."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the model said to one request. Aligned lists, one entry a generated token."""

    output_ids: list[int]
    logprobs: list[float]
    """Of the distribution after temperature and before truncation (top_p, top_k, min_p), in nats."""
    versions: list[int]
    """Of the weights that made each token."""
    finish_reason: FinishReason
    matched: int | str | None = None
    """The stop id or stop string that ended it."""
    wrong_logprobs: str = ""
    """Why the logprobs are not of that distribution, and what to do; "" if they are."""


class Engine(Protocol):
    """An inference engine, as rollout and the weight publisher see it."""

    async def generate(
        self,
        input_ids: list[int],
        params: SamplingParams,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        on_token: OnToken | None = None,
    ) -> Completion:
        """Complete one sequence. An abort (weights are being loaded, or somebody asked) returns the tokens so far
        with finish_reason "abort"; `generate_through_aborts` resubmits them.

        images: files that the tokens show, in order; what stands for each is among input_ids already.
        on_token: called on the caller's event loop with the first tokens of what is returned, in order: with all of
        them, or with fewer where the engine has no stream.
        Raises EngineError: unreachable (then on_token was told nothing), contradictory parameters; RequestTooLong:
        longer than the context; SchemaUnsupported; ImageError: the model takes no images, or not these."""
        ...

    async def load_weights(self, ref: WeightRef) -> None:
        """Abort what is in flight, load in place, score the probe, resume. Raises EngineError when the probe differs:
        the engine then serves nothing until a load succeeds."""
        ...

    async def abort(self, request_id: str | None = None) -> None:
        """Cut one request short, or all (None); their tokens so far come back."""
        ...

    async def version(self) -> int:
        """The version of the weights that it serves."""
        ...
