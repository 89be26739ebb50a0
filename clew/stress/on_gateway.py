"""Runs a stress with a gateway as in training, in front of an engine or of a provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from clew.gateway.agent_session import Limits
from clew.gateway.episode_engine import MAX_NEW_TOKENS, EpisodeEngine, Resources
from clew.gateway.front import PassedOn
from clew.gateway.thread import GatewayThread, ServingThread
from clew.inference.protocol import Engine, SamplingParams
from clew.models.vision import Sight
from clew.rollout.agents import SharedClient
from clew.stress.child import Source
from clew.stress.provider import NotedProvider
from clew.stress.report import Report
from clew.stress.requests import Noted, Requests
from clew.stress.run import stress
from clew.stress.stage import TIMEOUT_S
from clew.stress.stuck import STUCK_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Gateway(Protocol):
    """A gateway that runs in a thread of its own and notes the requests of the episodes."""

    requests: Requests
    base_url: str

    def open(self, episode_id: str) -> str:
        """Open a session for an episode that begins, and return its API key."""
        ...

    async def close(self, key: str) -> None:
        """Close the session of an episode that is over."""
        ...

    def sessions(self) -> int:
        """Return the number of sessions that the gateway holds open."""
        ...

    def stop(self) -> None:
        """Stop the gateway's thread."""
        ...


class BeforeEngine:
    """The gateway that training uses, in front of an engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        vision: Sight | None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Start the gateway.

        Args:
            engine: Answers the requests.
            tokenizer: Tokenizer of the engine's model.
            vision: Image processing, for a model that takes images.
            close: Closes the engine; called at the end.
        """
        self.requests = Requests()
        self._shared = Resources(
            engine=Noted(engine, tokenizer, self.requests),
            tokenizer=tokenizer,
            sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS),
            seed=0,
            prompt_column="prompt",
            reward=None,
            vision=vision,
        )
        self._thread = GatewayThread(Limits(), close)
        self.base_url, self.sessions = self._thread.base_url, self._thread.sessions.count
        self.close, self.stop = self._thread.close, self._thread.stop

    def open(self, episode_id: str) -> str:
        """See the protocol."""
        return self._thread.open(EpisodeEngine(self._shared, episode_id))[0]


class BeforeProvider:
    """A gateway that passes requests on to a provider unchanged."""

    def __init__(self, url: str, api_key: str) -> None:
        """Start the gateway.

        Args:
            url: Address of the provider.
            api_key: Key of the provider.
        """
        self.requests = Requests()
        passed_on = PassedOn(url, api_key)
        self._provider = NotedProvider(passed_on, self.requests)
        self._thread = ServingThread(self._provider, close=passed_on.close)
        self.base_url, self.sessions = self._thread.base_url, self._provider.keys.count
        self.open, self.stop = self._provider.open, self._thread.stop

    async def close(self, key: str) -> None:
        """See the protocol."""
        await self._thread.call(self._provider.close(key))


def stressed(
    agent: Any,
    rows: Sequence[dict[str, Any]],
    *,
    gateway: Gateway,
    batch: int,
    group: int,
    dp: int = 1,
    timeout_s: float = TIMEOUT_S,
    stuck_s: float = STUCK_S,
    source: Source | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run `clew.stress.run.stress` on this thread's event loop, and stop the gateway at the end."""

    async def work() -> Report:
        client = SharedClient()

        @asynccontextmanager
        async def open_episode(id: str) -> AsyncIterator[tuple[str, str, SharedClient]]:
            key = gateway.open(id)
            try:
                yield gateway.base_url, key, client
            finally:
                await asyncio.shield(gateway.close(key))

        try:
            return await stress(
                agent,
                rows,
                open_episode=open_episode,
                requests=gateway.requests,
                batch=batch,
                group=group,
                dp=dp,
                timeout_s=timeout_s,
                stuck_s=stuck_s,
                source=source,
                sessions=gateway.sessions,
                say=say,
            )
        finally:
            await client.really_close()

    try:
        return asyncio.run(work())
    finally:
        gateway.stop()
