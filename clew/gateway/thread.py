"""The gateway in a thread with its own event loop: an agent that blocks its own loop is slow, but does not deadlock."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.app import ASGI, AnyBase, application
from clew.gateway.dialect import Refusal
from clew.gateway.episode_engine import EpisodeEngine
from clew.http_server import Access, GuardedServer, new_event_loop

T = TypeVar("T")

REMEMBERED = 16384
"""Number of keys of ended sessions that are remembered, so that a late request gets a clear error."""


class EpisodeKeys(Generic[T]):
    """API keys, one for each running episode, and a value kept for each key."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, T]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def open(self, episode_id: str, kept: T) -> str:
        """Make a new key for an episode."""
        key = f"sk-{episode_id}-{secrets.token_urlsafe(12)}"
        self._kept[key] = episode_id, kept
        return key

    def count(self) -> int:
        return len(self._kept)

    def find(self, key: str) -> T:
        """Return the value kept for a key.

        Raises:
            Refusal: The key is unknown, or its episode has ended.
        """
        if key in self._kept:
            return self._kept[key][1]
        if key in self._ended:
            raise Refusal(401, f"session {self._ended[key]} has ended: its episode is over.", code="session_ended")
        shown = f"{key[:12]}…" if len(key) > 12 else key
        message = f"Cannot find the session: no session has the API key {shown!r}. Use the key that the agent got."
        raise Refusal(401, message, code="invalid_api_key")

    own = find  # here, not even `find` opens a session

    def close(self, key: str) -> T:
        """Drop the key of an episode that has ended, and return the value that was kept for it."""
        self._ended[key], kept = self._kept.pop(key)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return kept


class EpisodeSessions(EpisodeKeys[AgentSession]):
    """Sessions that `application` serves in training. Every model name is served."""

    models: None = None

    def start(self, key: str) -> tuple[AgentSession, str]:
        """See `Sessions.start`: always refused, because in training each episode has its session already."""
        message = "Cannot start a session: in training, each episode already has one. Use the agent's API key."
        raise Refusal(400, message)

    async def end(self, key: str) -> None:
        """See `Sessions.end`: requests are refused from now on. Everything so far counts when the episode ends."""
        self.find(key).end("it was closed")


class ServingThread:
    """Serves an application on a free port of this machine until `stop`."""

    def __init__(self, app: ASGI, close: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start serving. `close`, if given, is called on the application's loop after all requests were served."""
        self.loop = new_event_loop()
        """Event loop that the application runs on."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._server = GuardedServer(AnyBase(app), Access())
        self._close = close
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the gateway's loop, and wait for it on the caller's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._server.serve(sockets=[self._listener]))
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        if self._close is not None:
            self.loop.run_until_complete(self._close())
        self.loop.close()


class GatewayThread(ServingThread):
    """The gateway, and the engine that its sessions use."""

    def __init__(self, limits: Limits, close: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start serving. `close` closes the engine; None if others use the engine, too."""
        self.sessions = EpisodeSessions()
        self._limits = limits
        super().__init__(application(self.sessions), close)

    def open(self, engine: EpisodeEngine) -> tuple[str, AgentSession]:
        """Open a session, and return its API key and the session. Until it is closed, use it only on `loop`."""
        session = AgentSession(engine, self._limits)
        return self.sessions.open(session.id, session), session

    async def close(self, key: str) -> None:
        """End an episode's session. May be called from any event loop."""

        async def close() -> None:
            self.sessions.close(key).end("its episode is over")

        await self.call(close())
