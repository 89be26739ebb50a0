"""The sessions of `clew serve`: opened by whoever comes, kept until they are ended or forgotten, and recorded."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from clew.record.inbox import group_name
from clew.record.run import RunDirectory
from clew.rollout.episode import sequences_of
from clew.rollout.gateway.chat import Refusal
from clew.rollout.gateway.sessions import AgentSession, Limits
from clew.rollout.session import Resources, Session

IDLE_S = 3600.0
"""A session that nobody used for so long is ended."""


class ServedSessions:
    """On a loopback address any key opens a session of its own, also none; elsewhere /rl/start_session gives keys to
    who has the server's token."""

    def __init__(self, resources: Resources, models: Sequence[str], *, token: str, record: Path | None) -> None:
        """token: empty where any key will do. record: the run directory that ended sessions are filed in."""
        self.models = models
        self._resources = resources
        self._token = token
        self._run = RunDirectory(record) if record is not None else None
        self._sessions: dict[str, AgentSession] = {}
        settled = self._run.inbox.names() if self._run is not None else set()
        self._count = 1 + max((int(name[1:]) for name in settled), default=-1)

    def find(self, key: str) -> AgentSession:
        """See the protocol."""
        if key not in self._sessions:
            if self._token:
                message = "unknown API key; POST /rl/start_session, with the server's token as bearer, gives one."
                raise Refusal(401, message, code="invalid_api_key")
            self._open(key)
        return self._sessions[key]

    def start(self, key: str) -> tuple[AgentSession, str]:
        """See the protocol."""
        if self._token and not secrets.compare_digest(key.encode(), self._token.encode()):
            raise Refusal(401, "/rl/start_session wants the server's token as bearer; `clew serve` printed it.")
        new = f"sk-clew-{secrets.token_urlsafe(12)}"
        self._open(new)
        return self._sessions[new], new

    async def end(self, key: str) -> None:
        """See the protocol. A later request with the same key opens another session, where any key will do."""
        session = self._sessions.pop(key)
        session.end("its client ended it")
        self._file(session)

    async def end_idle(self) -> None:
        """End the sessions that nobody uses, for ever."""
        while True:
            await asyncio.sleep(IDLE_S / 60)
            since = time.monotonic() - IDLE_S
            for key in [key for key, session in self._sessions.items() if session.last_used < since]:
                await self.end(key)

    async def close(self) -> None:
        """End all of them."""
        for key in list(self._sessions):
            await self.end(key)

    def _open(self, key: str) -> None:
        episode_id = f"{group_name(self._count)}.e0"
        self._count += 1
        self._sessions[key] = AgentSession(Session(self._resources, episode_id), Limits())

    def _file(self, session: AgentSession) -> None:
        """As a group of one episode; its reward is NaN where nobody gave one."""
        if self._run is None or not session.session.interactions:
            return
        group_id = session.id.partition(".")[0]
        known = {
            "group_id": group_id,
            "episode_id": session.id,
            "data": session.data,
            "admitted_at": session.started_at,
            "started_at": session.started_at,
            "finished_at": time.time(),
        }
        reward = 0.0 if session.rewards else float("nan")
        self._run.inbox.put(group_id, sequences_of(session.session, reward, known))
