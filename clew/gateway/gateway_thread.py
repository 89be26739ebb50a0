"""The gateway in a thread with its own event loop: an agent that blocks its own loop is slow, but does not deadlock."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.app import AnyBase, application
from clew.gateway.episode_engine import EpisodeEngine
from clew.gateway.episode_keys import EpisodeSessions
from clew.http_server import ASGI, Access, GuardedServer, new_event_loop

T = TypeVar("T")


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
