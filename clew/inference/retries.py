"""Completion of requests even if weights are loaded, or the server dies, in the middle of one. Imports no torch.

In the embedded engine, a token's random number depends on its position and the seed alone. So the result with aborts is
the same as without them, except for the version of the weights that made each token.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from clew.inference.protocol import (
    Completion,
    Engine,
    EngineUnreachable,
    FaultyAnswer,
    GenerateRequest,
    RequestTooLong,
)
from clew.waits import waiting

MAX_EMPTY_ABORTS = 20
"""Number of aborts without a token, under one version of the weights, after which a request fails (half a minute)."""

ALWAYS_EMPTY = (
    f"the request was aborted {MAX_EMPTY_ABORTS} times in a row without a token, and no update was the reason. The "
    f"server's log may say why; its cache may be too small for the request."
)

TRIES = 5
"""Number of faulty answers in a row after which a request fails."""

RETRY_S = 0.02
"""Seconds before a server that is away is asked again, doubled up to 2 s; also the base of the pause after a fault."""


async def generate_through_aborts(engine: Engine, request: GenerateRequest, *, restart: bool = False) -> Completion:
    """Complete one sequence; submit it again with the tokens so far after each abort, until it ends by itself.

    It waits for a server that is away or not ready, and reports the wait (`clew.waits`). After a faulty answer it asks
    again, which reaches another server if there is one.

    Args:
        restart: True submits it without the tokens so far, so that one version of the weights makes all tokens.

    Raises:
        EngineError: The request itself is refused.
        FaultyAnswer: No answer could be used.
        EngineUnreachable: The output follows a JSON schema and was cut short, so it cannot be continued.
    """
    params = request.params
    if restart:  # tokens that were passed on cannot be taken back
        request = replace(request, on_token=None)
    so_far = nothing = Completion(output_ids=[], logprobs=[], versions=[], finish_reason="abort")
    faults = empty = 0
    version: int | None = None
    while True:
        rest = request.continued(so_far.output_ids)
        try:
            with waiting(f"completion {request.id}".strip(), unblocks="the inference engine"):
                part = await engine.generate(rest)
        except RequestTooLong:
            if not so_far.output_ids:
                raise
            return replace(so_far, finish_reason="length")  # what it has generated fills the context
        except EngineUnreachable as error:
            await _until_reachable(engine, error)
            continue
        except FaultyAnswer as error:
            faults += 1
            if faults == TRIES:
                raise FaultyAnswer(error.address, f"{error.reason} The request was tried {TRIES} times.") from error
            await asyncio.sleep(RETRY_S * 2**faults)
            continue
        faults, has_tokens = 0, bool(part.output_ids)
        if has_tokens:
            empty, version = 0, None
        if restart and part.finish_reason == "abort":
            part = nothing
        so_far = so_far.followed_by(part)
        if part.finish_reason != "abort":
            return so_far
        if len(so_far.output_ids) >= params.max_new_tokens:
            return replace(so_far, finish_reason="length")
        # An engine starts a schema with the first token that it draws, so it cannot continue in the middle of one.
        if params.json_schema is not None and so_far.output_ids:
            reason = "the server cut short what it held to a JSON schema, and cannot continue there"
            raise EngineUnreachable("", f"Cannot finish this completion: {reason}. Send the request again.")
        if not has_tokens:  # the engine is about to load weights, or it never returns a token for this request
            before = version
            with suppress(EngineUnreachable, FaultyAnswer):
                version = await engine.version()
            empty = empty + 1 if version == before else 0
            if empty == MAX_EMPTY_ABORTS:
                raise FaultyAnswer("", ALWAYS_EMPTY)
            await asyncio.sleep(min(RETRY_S * 2**empty, 2.0))


async def _until_reachable(engine: Engine, error: EngineUnreachable) -> None:
    delay, reason = RETRY_S, error.reason
    with waiting(f"inference server {error.address}".strip(), unblocks="clew serve", numbers=lambda: reason):
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)
            try:
                await engine.version()
                return
            except EngineUnreachable as again:
                reason = again.reason
            except FaultyAnswer:
                return  # it answers: the next request will show what
