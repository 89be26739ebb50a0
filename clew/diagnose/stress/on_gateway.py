"""The stress with the gateway that training has, in front of a stand-in or a served model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from clew.diagnose.agent_run import MAX_NEW_TOKENS
from clew.diagnose.stress.report import Report
from clew.diagnose.stress.requests import Noted, Requests
from clew.diagnose.stress.run import stress
from clew.diagnose.stress.stuck import STUCK_S
from clew.inference.protocol import Engine, SamplingParams
from clew.rollout.agents import SharedClient
from clew.rollout.gateway.sessions import Limits
from clew.rollout.gateway.thread import GatewayThread
from clew.rollout.session import Resources, Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stressed(
    agent: Any,
    rows: Sequence[dict[str, Any]],
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    batch: int,
    group: int,
    dp: int = 1,
    timeout_s: float | None = None,
    stuck_s: float = STUCK_S,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """See `clew.diagnose.stress.run.stress`. The agent's code runs on this thread's event loop."""
    requests, gateway = Requests(), GatewayThread(Limits())
    shared = Resources(
        engine=Noted(engine, tokenizer, requests),
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
        seed=0,
        prompt_column="prompt",
        reward=None,
    )

    async def work() -> Report:
        client = SharedClient()

        @asynccontextmanager
        async def open_episode(id: str) -> AsyncIterator[tuple[str, str, SharedClient]]:
            key, _ = gateway.open(Session(shared, id))
            try:
                yield gateway.base_url, key, client
            finally:
                await asyncio.shield(gateway.close(key))

        try:
            return await stress(
                agent,
                rows,
                open_episode=open_episode,
                requests=requests,
                batch=batch,
                group=group,
                dp=dp,
                timeout_s=timeout_s,
                stuck_s=stuck_s,
                sessions=gateway.sessions.count,
                say=say,
            )
        finally:
            await client.really_close()

    try:
        return asyncio.run(work())
    finally:
        gateway.stop()
