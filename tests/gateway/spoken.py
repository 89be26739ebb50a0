"""An engine that says what a script tells it, token by token in its own way; sessions on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from clew.gateway.episode_engine import EpisodeEngine, Resources
from clew.inference.protocol import Completion, GenerateRequest, SamplingParams
from tests.gateway.chatml import odd_ids

Script = Callable[[str], str]
"""Function from the prompt's text to what the model says; it ends its turn itself when that ends with <|im_end|>."""


class Spoken:
    """An engine without a model."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script, delay_s: float = 0.0) -> None:
        self.tokenizer, self.script, self.delay_s = tokenizer, script, delay_s
        self.speaks: Callable[[int], Awaitable[None]] | None = None
        """Called before the n-th token is told; None: no stream."""
        self.requests: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.images: list[list[bytes]] = []
        self.failure: Exception | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        input_ids, params, on_token = request.input_ids, request.params, request.on_token
        self.requests.append(list(input_ids))
        self.params.append(params)
        self.images.append(list(request.images))
        await asyncio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        text = self.script(str(self.tokenizer.decode(input_ids, skip_special_tokens=False)))
        matched: int | str | None = None
        for stop in params.stop:
            if stop in text:
                text, matched = text[: text.index(stop) + len(stop)], stop
        ids = odd_ids(self.tokenizer, text)
        if len(ids) > params.max_new_tokens:
            ids, matched = ids[: params.max_new_tokens], None
        for number, token in enumerate(ids if self.speaks and on_token else ()):
            assert self.speaks and on_token
            await self.speaks(number)
            on_token(token, -0.25)
        ended = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        return Completion(
            output_ids=ids,
            logprobs=[-0.25] * len(ids),
            versions=[3] * len(ids),
            finish_reason="stop" if ended or matched else "length",
            matched=matched if matched is not None else ids[-1] if ended else None,
        )

    async def version(self) -> int:
        return 3


def session_on(engine: Any, episode_id: str = "g000000.e0", **sampling: Any) -> EpisodeEngine:
    """A session of an episode."""
    resources = Resources(
        engine=engine,
        tokenizer=engine.tokenizer,
        sampling=SamplingParams(max_new_tokens=200, **sampling),
        seed=1,
        prompt_column="prompt",
        reward=None,
    )
    return EpisodeEngine(resources, episode_id)
