"""The sessions of `clew serve`: opened by whoever comes, kept until they are ended or forgotten, and recorded."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clew.record.inbox import group_name
from clew.record.run import RunDirectory
from clew.rollout.episode import sequences_of
from clew.rollout.gateway.chat import Refusal
from clew.rollout.gateway.sessions import AgentSession, Limits
from clew.rollout.session import Resources, Session, WarningLog

log = logging.getLogger("clew.gateway")

IDLE_S = 3600.0
"""A session that nobody used for so long is ended."""

MAX_SESSIONS = 4096
"""Open at once. Where there are more, the one that was not used for longest is ended ..."""

MAX_BYTES = 2**30
"""... and so it is where their requests have more bytes than this, together; all of them are kept in memory."""

UNUSED_S = 60.0
"""Only a session that was not used for so long is ended to make room."""


class ServedSessions:
    """Any key that `clew.listening.Guard` lets in opens a session of its own, also none; /rl/start_session, which needs
    the run's token, gives further keys."""

    def __init__(self, resources: Resources, models: Sequence[str], *, record: Path | None) -> None:
        """record: the run directory that ended sessions are filed in."""
        self.models = models
        self._resources = replace(resources, on_warning=WarningLog(log).add)
        self._run = RunDirectory(record) if record is not None else None
        self._sessions: dict[str, AgentSession] = {}
        settled = self._run.inbox.names() if self._run is not None else set()
        self._count = 1 + max((int(name[1:]) for name in settled), default=-1)

    def find(self, key: str) -> AgentSession:
        """See the protocol."""
        self._make_room(sessions=0 if key in self._sessions else 1)
        if key not in self._sessions:
            self._open(key)
        return self._sessions[key]

    def own(self, key: str) -> AgentSession:
        """See the protocol."""
        if not key or key not in self._sessions:
            message = "no open session has this API key. A session is rewarded and ended with its own key."
            raise Refusal(401, message, code="invalid_api_key")
        return self._sessions[key]

    def has_session(self, key: str) -> bool:
        """Whether an open session has this key."""
        return key in self._sessions

    def start(self, key: str) -> tuple[AgentSession, str]:
        """See the protocol."""
        self._make_room(sessions=1)
        new = f"sk-clew-{secrets.token_urlsafe(12)}"
        self._open(new)
        return self._sessions[new], new

    async def end(self, key: str) -> None:
        """See the protocol. A later request with the same key opens another session, where any key will do."""
        self._end(key)

    async def end_idle(self) -> None:
        """End the sessions that nobody uses, for ever."""
        while True:
            await asyncio.sleep(IDLE_S / 60)
            since = time.monotonic() - IDLE_S
            for key in [key for key, session in self._sessions.items() if session.last_used < since]:
                self._end(key)

    async def close(self) -> None:
        """End all of them."""
        for key in list(self._sessions):
            self._end(key)

    def _make_room(self, *, sessions: int) -> None:
        """End the sessions that were not used for longest, until there is room for a request and so many new sessions.
        Raises Refusal when those that are left are in use."""
        while len(self._sessions) + sessions > MAX_SESSIONS or self._bytes() >= MAX_BYTES:
            key, oldest = min(self._sessions.items(), key=lambda entry: (entry[1].busy, entry[1].last_used))
            if oldest.busy or oldest.last_used > time.monotonic() - UNUSED_S:
                raise Refusal(
                    429,
                    f"Cannot take another request: {len(self._sessions)} sessions are open (limit {MAX_SESSIONS}), "
                    f"with {self._bytes() >> 20} MiB of requests (limit {MAX_BYTES >> 20}). End those that are over, "
                    f"with POST /rl/end_session and their key, or wait {UNUSED_S:g} s.",
                    code="rate_limit_exceeded",
                )
            self._end(key)

    def _bytes(self) -> int:
        return sum(session.received_bytes for session in self._sessions.values())

    def _end(self, key: str) -> None:
        session = self._sessions.pop(key)
        session.end("its client ended it")
        self._file(session)

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
