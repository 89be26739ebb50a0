"""`protocol.Engine` over vLLM's OpenAI server: token ids in, token ids out, through /v1/completions.

The behaviour logprobs are those of the distribution after temperature only when the server runs with
``--logprobs-mode processed_logprobs``; vLLM's default gives those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clew.errors import EngineError, ImageError
from clew.inference.client import HTTPEngine
from clew.inference.protocol import Completion, OnToken, SamplingParams
from clew.record.weights import WeightRef


class VLLMEngine(HTTPEngine):
    """One server. Its weights are loaded by others: their version is 0."""

    def __init__(self, address: str, model: str, context: int, api_key: str = "") -> None:
        """model: the name under which the server serves it. context: its max_model_len. api_key: its --api-key."""
        super().__init__(address, api_key, context)
        self.model = model

    async def generate(
        self,
        input_ids: list[int],
        params: SamplingParams,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        on_token: OnToken | None = None,
    ) -> Completion:
        """See the protocol."""
        if images:
            raise ImageError(f"{self.address} is a vLLM, which takes no images beside token ids.")
        params = self._fitting(input_ids, params)
        body = {
            "model": self.model,
            "prompt": input_ids,
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
        if on_token is None:
            completion = self._new_of(await self._post("/v1/completions", body), 0)
            assert completion is not None
        else:
            completion = await self._streamed("/v1/completions", body, on_token)
        if completion.finish_reason == "stop" and completion.matched is None and completion.output_ids:
            return replace(completion, matched=completion.output_ids[-1])  # an end token goes unnamed
        return completion

    def _new_of(self, answer: dict[str, Any], before: int) -> Completion | None:
        """Of a response, or an event of a stream, which has the tokens that are new."""
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

    async def load_weights(self, ref: WeightRef) -> None:
        """Not through this interface."""
        raise EngineError("vLLM's weights are not loaded through its OpenAI server; serve them with `clew serve`.")

    async def abort(self, request_id: str | None = None) -> None:
        """Nothing: a request ends when its connection closes."""
