"""API keys of agents: a new one for each running episode, which finds its session."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Generic, TypeVar

from clew.gateway.agent_session import AgentSession
from clew.gateway.dialect import Refusal

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

    def end(self, key: str) -> None:
        """See `Sessions.end`: requests are refused from now on. Everything so far counts when the episode ends."""
        self.find(key).end("it was closed")
