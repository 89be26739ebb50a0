"""The gateway of `clew serve`, without a run.

The first request with a new API key opens a session. A session ends when its client ends it, when it has been unused
for too long, to make room for another one, or when the server stops. It is then recorded if the user asked for that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.config import TOKEN_VARIABLE, Config
from clew.gateway.agent_session import AgentSession, Limits
from clew.gateway.app import AnyBase, application
from clew.gateway.dialect import Refusal
from clew.gateway.episode_engine import EpisodeEngine, Resources, WarningLog, resources
from clew.gateway.sequences import sequences_of
from clew.models.vision import ImageExpander
from clew.printing import print
from clew.record.inbox import group_name
from clew.record.run import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("clew.gateway")

IDLE_S = 3600.0
"""Seconds after which an unused session is ended."""

MAX_SESSIONS = 4096
"""Maximum number of open sessions. Beyond it, the session that was unused for longest is ended."""

MAX_BYTES = 2**30
"""Maximum size of the requests of all sessions, in bytes; they are kept in memory. Beyond it, sessions end as above."""

ANY_KEY = "sk-clew"
"""API key shown to clients if any key will do, as on a loopback address."""

UNUSED_S = 60.0
"""Seconds that a session must have been unused before it may be ended to make room."""


class StandaloneGateway:
    """The gateway's application and its open sessions. `clew.inference.serve` or `gateway.proxy` runs it on a port.

    There is one session for each key. The first request with a key opens it, if `http_server.Guard` lets the request
    in; an empty key counts as a key. /rl/start_session, which needs the token in `TOKEN_VARIABLE`, hands out further
    keys. The methods that requests use (`find`, `own`, `start`, `end`) are described in `clew.gateway.app.Sessions`.
    """

    def __init__(self, resources: Resources, models: Sequence[str], *, key: str, record: Path | None) -> None:
        """Start without open sessions.

        Args:
            models: Names that clients may ask for; one at least.
            key: API key that clients have to send; empty if any will do.
            record: Run directory that ended sessions are written to; None: nothing is recorded.
        """
        self.app = AnyBase(application(self))
        self.models = models
        self._key = key
        self._resources = replace(resources, on_warning=WarningLog(log).add)
        self._run = RunDirectory(record) if record is not None else None
        self._sessions: dict[str, AgentSession] = {}
        self._count = 0
        if self._run is not None:
            self._lock = self._run.hold("rollout")  # two processes would give their groups the same numbers
            numbers = (int(name[1:]) for name in self._run.finished_groups() if name[1:].isdecimal())
            self._count = 1 + max(numbers, default=-1)

    def find(self, key: str) -> AgentSession:
        self._make_room(key)
        if key not in self._sessions:
            self._open(key)
        return self._sessions[key]

    def own(self, key: str) -> AgentSession:
        if not key or key not in self._sessions:
            message = "Cannot find the session: no open session has this API key. Use the key of the session itself."
            raise Refusal(401, message, code="invalid_api_key")
        return self._sessions[key]

    def has_session(self, key: str) -> bool:
        return key in self._sessions

    def start(self, key: str) -> tuple[AgentSession, str]:
        new = f"sk-clew-{secrets.token_urlsafe(12)}"
        self._make_room(new)
        self._open(new)
        return self._sessions[new], new

    def end(self, key: str) -> None:
        """End a session. If any key will do, a later request with the same key opens another session."""
        session = self._sessions[key]
        session.end("it was closed")
        self._file(session)
        del self._sessions[key]  # only once it is on disk: a client whose call failed may call again

    async def run(self) -> None:
        """End unused sessions while the server runs, and all sessions when it stops."""
        try:
            while True:
                await asyncio.sleep(IDLE_S / 60)
                for key in self._unused(time.monotonic() - IDLE_S):
                    self._end_unasked(key)
        finally:
            for key in list(self._sessions):
                self._end_unasked(key)

    def _unused(self, since: float) -> list[str]:
        """Return the keys of the sessions that were not used since that time, the one unused for longest first."""
        unused = [key for key, session in self._sessions.items() if session.last_used < since and not session.busy]
        return sorted(unused, key=lambda key: self._sessions[key].last_used)

    def _make_room(self, key: str) -> None:
        """End the sessions that were unused for longest, until there is room for a request with this key.

        The session of this key is not ended, because that would split a conversation into two episodes. The request is
        refused if the remaining sessions are in use.
        """
        new = key not in self._sessions
        while len(self._sessions) + new > MAX_SESSIONS or self._bytes() >= MAX_BYTES:
            oldest = next((each for each in self._unused(time.monotonic() - UNUSED_S) if each != key), None)
            if oldest is None:
                raise Refusal(
                    429,
                    f"Cannot take another request: {len(self._sessions)} sessions are open (limit {MAX_SESSIONS}), "
                    f"with {self._bytes() >> 20} MiB of requests (limit {MAX_BYTES >> 20}). End sessions that you no "
                    f"longer need (POST /rl/end_session with the session's key). To make room, sessions are ended that "
                    f"have been unused for {UNUSED_S:g} s.",
                    code="rate_limit_exceeded",
                )
            self._end_unasked(oldest)

    def _bytes(self) -> int:
        return sum(session.received_bytes for session in self._sessions.values())

    def _end_unasked(self, key: str) -> None:
        """End a session although no client has asked for it. If it cannot be recorded, the other sessions go on."""
        session = self._sessions[key]
        try:
            self.end(key)
        except Exception as error:
            log.error("session %s is lost: it cannot be recorded: %s: %s", session.id, type(error).__name__, error)
            self._sessions.pop(key, None)

    def _open(self, key: str) -> None:
        episode_id = f"{group_name(self._count)}.e0"
        self._count += 1
        self._sessions[key] = AgentSession(EpisodeEngine(self._resources, episode_id), Limits())

    def _file(self, session: AgentSession) -> None:
        """File the session as a group of one episode; its reward is NaN if nobody gave one."""
        if self._run is None or not session.engine.interactions:
            return
        group_id = session.id.partition(".")[0]
        columns = {
            "group_id": group_id,
            "episode_id": session.id,
            "data": session.data,
            "admitted_at": session.started_at,
            "started_at": session.started_at,
            "finished_at": time.time(),
        }
        rewards = {"reward": 0.0 if session.rewards else float("nan")}  # the rewards of interactions are added to it
        self._run.inbox.put(group_id, sequences_of(session.engine, rewards, columns))

    def launched(self, address: str) -> None:
        """Print the gateway's addresses, and commands for a shell that use them."""
        key = self._key or ANY_KEY
        path, asked = "completions", {"prompt": "Hello"}
        if self._resources.tokenizer.chat_template is not None:
            path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
        body = json.dumps({"model": self.models[0], **asked, "max_tokens": 16})
        print(
            f"OpenAI     http://{address}/v1    Anthropic  http://{address}\n"
            f"export OPENAI_BASE_URL=http://{address}/v1 OPENAI_API_KEY={key}\n"
            f"export ANTHROPIC_BASE_URL=http://{address} ANTHROPIC_API_KEY={key}\n"
            f"curl http://{address}/v1/{path} -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' "
            f"-d '{body}'",
            flush=True,
        )
        if self._key:
            print(
                f"All requests with this key are one session. For another: curl -X POST http://{address}"
                f'/rl/start_session -H "Authorization: Bearer ${TOKEN_VARIABLE}"',
                flush=True,
            )


def gateway_factory(config: Config, record: Path | None) -> Callable[[Any, str], StandaloneGateway]:
    """Return a function that makes the gateway; the server calls it once it has its engine."""

    def make(engine: Any, key: str) -> StandaloneGateway:
        core = engine.core
        return make_gateway(config, engine, core.tokenizer, config.model.path, record, key, vision=core.vision)

    return make


def make_gateway(
    config: Config,
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    record: Path | None,
    key: str,
    *,
    vision: ImageExpander | None,
) -> StandaloneGateway:
    """Return a gateway for an engine that runs on this event loop.

    Args:
        model: Folder or hub name of the model.
        record: Run directory that ended sessions are written to; None: nothing is recorded.
        key: API key that clients have to send; empty if any will do.
        vision: Image input, if the model and the engine take images.
    """
    media = RunDirectory(record).media if record is not None else None
    shared = resources(config, engine, tokenizer, None, vision=vision, media=media)
    names = dict.fromkeys([model, Path(model).name])
    return StandaloneGateway(shared, list(names), key=key, record=record)
