"""Completes requests although weights are loaded, or the server dies, in the middle. Imports no torch.

A token's random number depends on its position and the seed alone. So the result with aborts is the same as without
them, except for the version of the weights that made each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from clew.inference.protocol import Completion, Engine, EngineUnreachable, OnToken, SamplingParams
from clew.waits import waiting

RETRY_S = 0.02
"""Seconds before the first look for a server that is away, or for another one; doubled up to 2 s."""


async def generate_through_aborts(
    engine: Engine,
    input_ids: list[int],
    params: SamplingParams,
    *,
    images: Sequence[bytes] = (),
    request_id: str = "",
    on_token: OnToken | None = None,
) -> Completion:
    """Complete one sequence; submit it again with the tokens so far after each abort, until it ends by itself.

    It waits, under a name, for a server that is away or not ready.

    Args:
        on_token: Callback as for `Engine.generate`, for the tokens of the whole result.

    Raises:
        EngineError: The request itself is refused.
        EngineUnreachable: Output held to a JSON schema was cut short. An engine starts a schema with the first token
            that it draws, so it cannot continue there.
    """
    output_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    while True:
        done = len(output_ids)
        rest = replace(
            params,
            max_new_tokens=params.max_new_tokens - done,
            min_new_tokens=max(0, params.min_new_tokens - done),
            continues=params.continues + done,
        )
        told = 0

        def tell(token: int, logprob: float) -> None:
            nonlocal told
            told += 1
            assert on_token is not None
            on_token(token, logprob)

        try:
            with waiting(f"completion {request_id}".strip(), unblocks="the inference engine"):
                part = await engine.generate(
                    input_ids + output_ids,
                    rest,
                    images=images,
                    request_id=request_id,
                    on_token=None if on_token is None else tell,
                )
        except EngineUnreachable as error:
            await _until_reachable(engine, error)
            continue
        output_ids += part.output_ids
        logprobs += part.logprobs
        versions += part.versions
        if part.finish_reason != "abort" or len(output_ids) >= params.max_new_tokens:
            reason = "length" if part.finish_reason == "abort" else part.finish_reason
            return Completion(
                output_ids=output_ids,
                logprobs=logprobs,
                versions=versions,
                finish_reason=reason,
                matched=part.matched,
                wrong_logprobs=part.wrong_logprobs,
            )
        if params.json_schema is not None and output_ids:
            raise EngineUnreachable(
                "of this request",
                "it cut short what it held to a JSON schema, and cannot go on there; ask again",
            )
        if on_token is not None:  # what follows them is told after them
            for token, logprob in zip(part.output_ids[told:], part.logprobs[told:], strict=True):
                on_token(token, logprob)
        if not part.output_ids:
            await asyncio.sleep(0.02)  # the engine is about to load: not a wait of its own, but no spinning either


async def _until_reachable(engine: Engine, error: EngineUnreachable) -> None:
    delay, reason = RETRY_S, error.reason
    with waiting(f"inference server {error.address}", unblocks="clew serve", numbers=lambda: reason):
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)
            try:
                await engine.version()
                return
            except EngineUnreachable as again:
                reason = again.reason
