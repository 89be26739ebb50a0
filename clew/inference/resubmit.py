"""Completes requests although weights are loaded, or the server dies, in the middle. Imports no torch.

A token's random number depends on its position and the seed alone. So the result with aborts is the same as without
them, except for the version of the weights that made each token.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from clew.inference.protocol import Completion, Engine, EngineUnreachable, GenerateRequest
from clew.waits import waiting

RETRY_S = 0.02
"""Seconds before the first look for a server that is away, or for another one; doubled up to 2 s."""


async def generate_through_aborts(engine: Engine, request: GenerateRequest) -> Completion:
    """Complete one sequence; submit it again with the tokens so far after each abort, until it ends by itself.

    It waits, under a name, for a server that is away or not ready.

    Raises:
        EngineError: The request itself is refused.
        EngineUnreachable: Output held to a JSON schema was cut short. An engine starts a schema with the first token
            that it draws, so it cannot continue there.
    """
    params = request.params
    whole = Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")
    while True:
        done = len(whole.output_ids)
        rest = replace(
            params,
            max_new_tokens=params.max_new_tokens - done,
            min_new_tokens=max(0, params.min_new_tokens - done),
            continues=params.continues + done,
        )
        try:
            with waiting(f"completion {request.id}".strip(), unblocks="the inference engine"):
                part = await engine.generate(
                    replace(request, input_ids=request.input_ids + whole.output_ids, params=rest)
                )
        except EngineUnreachable as error:
            await _until_reachable(engine, error)
            continue
        whole = whole.followed_by(part)
        if part.finish_reason != "abort":
            return whole
        if len(whole.output_ids) >= params.max_new_tokens:
            return replace(whole, finish_reason="length")
        if params.json_schema is not None and whole.output_ids:
            raise EngineUnreachable(
                "of this request",
                "it cut short what it held to a JSON schema, and cannot go on there; ask again",
            )
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
