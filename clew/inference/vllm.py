"""Client that implements `protocol.Engine` over vLLM's OpenAI server: token ids in and out, through /v1/completions.

vLLM does not say which logprobs it reports, so `VLLMEngine.probe` finds out:

=========================== ============================================ =======================================
--logprobs-mode             logprobs of the distribution                 not what training needs
=========================== ============================================ =======================================
raw_logprobs (the default)  before temperature and truncation            at a temperature other than 1 (or 0)
processed_logprobs          after temperature and truncation             with top_p, top_k, min_p, min_tokens
=========================== ============================================ =======================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from clew.errors import EngineError, ImageError
from clew.inference.client import HTTPEngine
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest, SamplingParams

LogprobsMode = Literal["raw", "processed", "unknown"]

PROBE_IDS = [0, 1, 2, 3]
PROBE_TEMPERATURE = 0.5
SMALLEST_GAP = 1e-2
"""Smallest difference, in nats, between two tokens at which the modes can be told apart."""

RESTART = "Start vLLM with --logprobs-mode processed_logprobs"


class VLLMEngine(HTTPEngine):
    """Client of one vLLM server. Others load its weights, so their version is always 0."""

    def __init__(self, address: str, model: str, context: int, api_key: str = "") -> None:
        """Create the client.

        Args:
            address: host:port.
            model: Name under which the server serves the model.
            context: The server's max_model_len.
            api_key: The server's --api-key.
        """
        super().__init__(address, api_key, context)
        self.model = model
        self.logprobs_mode: LogprobsMode = "unknown"

    async def probe(self) -> None:
        """Find out which logprobs the server reports, from the same next token at two temperatures.

        Raises:
            EngineError: The server reports logits in place of logprobs, or does not answer such a request.
        """
        one, other = [await self._likeliest(temperature) for temperature in (1.0, PROBE_TEMPERATURE)]
        if max(sum(map(math.exp, each.values())) for each in (one, other)) > 1 + SMALLEST_GAP:
            raise EngineError(
                f"Cannot use vLLM at {self.address}: it reports logits in the place of logprobs. {RESTART}."
            )
        self.logprobs_mode = mode_of(one, other, PROBE_TEMPERATURE)

    async def _likeliest(self, temperature: float) -> dict[str, float]:
        """Return the logprobs of the likeliest next tokens after the probe, by token."""
        body = {
            "model": self.model,
            "prompt": PROBE_IDS,
            "max_tokens": 1,
            "temperature": temperature,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        try:
            answer = await self._post("/v1/completions", body)
            return dict(answer["choices"][0]["logprobs"]["top_logprobs"][0])
        except EngineUnreachable:
            raise
        except (EngineError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"Cannot find out which logprobs vLLM at {self.address} reports: {error}. {RESTART}, and allow at "
                f"least 5 with --max-logprobs."
            ) from None

    @property
    def advice(self) -> str:
        """Advice about its logprobs for the user who attaches the server; "" if they are right at any temperature."""
        if self.logprobs_mode == "processed":
            return ""
        why = "before temperature" if self.logprobs_mode == "raw" else "of a kind that cannot be told from a probe"
        return (
            f"vLLM at {self.address} reports logprobs {why}: only at temperature 1 can its tokens be trained on. "
            f"{RESTART}"
        )

    def wrong_logprobs(self, params: SamplingParams) -> str:
        """Return why the logprobs of a request with these parameters are not what training needs; "" if they are."""
        reports = f"vLLM at {self.address} reports logprobs"
        if self.logprobs_mode == "processed":
            named = {"top_p": params.top_p < 1, "top_k": params.top_k > 0, "min_p": params.min_p > 0}
            set_ = ", ".join(
                name for name, is_set in (named | {"min_tokens": params.min_new_tokens > 0}).items() if is_set
            )
            if not set_ or params.temperature == 0:
                return ""
            return (
                f"{reports} after {set_}, which are too high by -ln of the probability that was kept, and training "
                f"needs those before. Leave {set_} out"
            )
        if params.temperature in (0, 1):
            return ""
        if self.logprobs_mode == "raw":
            return (
                f"{reports} before temperature, and the temperature is {params.temperature:g}. {RESTART}, or set "
                f"the temperature to 1"
            )
        return f"{reports} of a kind that cannot be told from a probe. {RESTART}"

    async def generate(self, request: GenerateRequest) -> Completion:
        """See the protocol."""
        if request.images:
            raise ImageError(f"{self.address} is a vLLM, which takes no images beside token ids.")
        params = self._fitting(request)
        body = {
            "model": self.model,
            "prompt": request.input_ids,
            "max_tokens": params.max_new_tokens,
            "min_tokens": params.min_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "seed": params.seed,
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(params.stop_token_ids or ()),
            "ignore_eos": params.stop_token_ids is not None,
            "return_token_ids": True,
            "logprobs": 0,
        }
        if params.json_schema is not None:
            body["structured_outputs"] = {"json": params.json_schema}
        if request.on_token is None:
            completion = self._new_of(await self._post("/v1/completions", body), 0)
            assert completion is not None
        else:
            completion = await self._streamed("/v1/completions", body, request.on_token)
        completion = replace(completion, wrong_logprobs=self.wrong_logprobs(params))
        if completion.finish_reason == "stop" and completion.matched is None and completion.output_ids:
            return replace(completion, matched=completion.output_ids[-1])  # an end token goes unnamed
        return completion

    def _new_of(self, answer: dict[str, Any], before: int) -> Completion | None:
        """Return the new tokens of a response or of an event of a stream; None if there is no choice in it.

        Events of vLLM have only the new tokens.
        """
        if not answer["choices"]:  # an event with the usage
            return None
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise EngineError(f"{self.address} returned no token_ids: this vLLM is older than return_token_ids.")
        reason = choice["finish_reason"] or "abort"
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{self.address} ended a completion with finish_reason {reason!r}.")
        return Completion(
            output_ids=ids,
            logprobs=choice["logprobs"]["token_logprobs"] if ids else [],
            versions=[0] * len(ids),
            finish_reason=reason,
            matched=choice.get("stop_reason"),
        )

    async def version(self) -> int:
        """See the protocol."""
        await self._request("GET", "/v1/models", None)
        return 0


def mode_of(at_one: Mapping[str, float], at_other: Mapping[str, float], temperature: float) -> LogprobsMode:
    """Return which logprobs a server reports. After temperature, differences between tokens are divided by it.

    Args:
        at_one: Logprobs of the likeliest tokens at temperature 1.
        at_other: Logprobs of the likeliest tokens at `temperature`.
        temperature: The other temperature, neither 0 nor 1.
    """
    both = sorted(at_one.keys() & at_other.keys(), key=lambda token: at_one[token])
    if not both:
        return "unknown"
    low, high = both[0], both[-1]
    gap, other_gap = at_one[high] - at_one[low], at_other[high] - at_other[low]
    if not gap >= SMALLEST_GAP:
        return "unknown"
    return "raw" if abs(other_gap - gap) < abs(other_gap - gap / temperature) else "processed"
