"""A provider behind per-episode API keys: requests are passed on, and each episode's requests and answers are noted.

Their text is read in any of the API dialects. IDs are left out: a provider draws them by chance, and they come back in
later requests.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request as HTTPRequest
from starlette.types import Message, Receive, Scope, Send

from clew.gateway.app import dialect_of, json_response, key_of
from clew.gateway.dialect import Refusal
from clew.gateway.episode_keys import EpisodeKeys
from clew.gateway.gateway_thread import ServingThread
from clew.gateway.proxy import PassThrough
from clew.stress.requests import Request, Requests

MODEL_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
"""Paths at which a model is asked. Others (a list of models, a token count) are passed on, but not noted."""

ASKED = ("instructions", "system", "tools", "messages", "input", "prompt")
"""Fields of a request that the model reads."""

CHANCE = frozenset(("id", "call_id", "tool_call_id", "tool_use_id", "signature", "encrypted_content"))
"""Fields whose values a provider draws by chance."""

FORM = frozenset(("role", "type", "status", "phase", "index", "stop_reason", "stop_sequence"))
"""Fields of an answer that hold no words of the model."""

SAID = ("message", "delta", "text")
"""Fields that hold the words in the choices of OpenAI's dialect. Providers add many fields of their own."""

OPAQUE = 4096
"""A text that begins with this many ASCII characters without a space counts as data, perhaps an image."""


@dataclass(kw_only=True, eq=False)
class Exchange:
    """A request, and as much of its answer as has arrived."""

    episode: str
    came: float
    done: float
    """time.monotonic() when its last message passed."""
    asked: bytes = b""
    status: int = 0
    """HTTP status; 0: there is no answer yet."""
    streamed: bool = False
    answered: bytearray = field(default_factory=bytearray)

    def hear(self, message: Message) -> None:
        if message["type"] == "http.request":
            self.asked += message.get("body", b"")
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            self.streamed = b"event-stream" in dict(message["headers"]).get(b"content-type", b"")
        elif message["type"] == "http.response.body":
            self.answered += message.get("body", b"")
        self.done = time.monotonic()

    def as_request(self) -> Request:
        body = bytes(self.answered)
        answer = Answer()
        if self.status >= 400:
            answer = Answer(error=refused(self.status, body))
        elif self.status:
            answer = answer_of_stream(body) if self.streamed else answer_of(body)
        return Request(
            episode=self.episode,
            asked=asked_in(self.asked),
            answered=answer.words or answer.error,
            came=self.came,
            done=self.done,
            id=answer.id,
            refused=answer.error,
        )


@dataclass(kw_only=True)
class Asking:
    episode: str
    exchanges: list[Exchange] = field(default_factory=list)


class ProviderGateway(ServingThread):
    """A gateway that passes requests on to a provider unchanged, and notes them with their answers."""

    def __init__(self, url: str, api_key: str) -> None:
        self.requests = Requests()
        self.sessions: EpisodeKeys[Asking] = EpisodeKeys()
        self._passed_on = PassThrough(url, api_key)
        super().__init__(self._answer, close=self._passed_on.close)

    def open_episode(self, episode_id: str) -> str:
        """Open a session for an episode that begins, and return its API key."""
        return self.sessions.open(episode_id, Asking(episode=episode_id))

    async def close(self, key: str) -> None:
        """End an episode, and note its unfinished exchanges as they stand. May be called from any event loop."""

        async def close() -> None:
            asking = self.sessions.close(key)
            while asking.exchanges:
                self.requests.note(asking.exchanges.pop().as_request())

        await self.call(close())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        http, now = HTTPRequest(scope), time.monotonic()
        path = http.url.path
        try:
            asking = self.sessions.find(key_of(http))
        except Refusal as refusal:
            await json_response(dialect_of(path).refuse(refusal), refusal.status)(scope, receive, send)
            return
        if path not in MODEL_PATHS:
            await self._passed_on(scope, receive, send)
            return
        exchange = Exchange(episode=asking.episode, came=now, done=now)

        async def receive_noted() -> Message:
            message = await receive()
            exchange.hear(message)
            return message

        async def send_noted(message: Message) -> None:
            exchange.hear(message)
            await send(message)

        asking.exchanges.append(exchange)
        try:
            with self.requests.asking(asking.episode):
                await self._passed_on(scope, receive_noted, send_noted)
        finally:
            if exchange in asking.exchanges:
                asking.exchanges.remove(exchange)
                self.requests.note(exchange.as_request())


@dataclass(frozen=True, kw_only=True)
class Answer:
    id: str = ""
    words: str = ""
    error: str = ""
    """Error instead of an answer or in the middle of a stream; empty if there was none."""


def asked_in(body: bytes) -> str:
    """Return the part of a request that the model reads, as text."""
    request = _object(body)
    if request is None:
        return body.decode(errors="replace")
    return "\n".join(texts({name: request[name] for name in ASKED if name in request}, CHANCE))


def answer_of(body: bytes) -> Answer:
    """Return the answer in a complete response body."""
    whole = _object(body)
    if whole is None:
        return Answer(words=body.decode(errors="replace"))
    said = _choices(whole) or whole.get("output") or whole.get("content")
    return Answer(id=str(whole.get("id", "")), words="\n".join(texts(said, CHANCE | FORM)), error=_error(whole))


def answer_of_stream(body: bytes) -> Answer:
    """Return the answer in the server-sent events that arrived.

    The pieces of each text (of a choice, a block or a tool call) are joined.
    """
    id, error = "", ""
    texts_by_path: dict[tuple[Any, ...], str] = {}

    def add(path: tuple[Any, ...], piece: Any) -> None:
        if isinstance(piece, str):
            texts_by_path[path] = texts_by_path.get(path, "") + piece
        elif isinstance(piece, dict):
            for name, each in piece.items():
                if name not in CHANCE | FORM:
                    add((*path, name), each)
        elif isinstance(piece, list):
            for number, each in enumerate(piece):
                add((*path, each.get("index", number) if isinstance(each, dict) else number), each)

    for line in body.splitlines():
        event = _object(line.removeprefix(b"data:")) if line.startswith(b"data:") else None
        if event is None:
            continue
        about = next((event[name] for name in ("response", "message") if isinstance(event.get(name), dict)), event)
        id, error = id or str(about.get("id", "")), error or _error(about)
        add((), _choices(event))
        place = event.get("output_index"), event.get("content_index"), event.get("index")
        add(place, event.get("content_block"))
        add(place, event.get("delta"))
        if event.get("type") == "response.output_item.added":
            add(place, event.get("item"))
    return Answer(id=id, words="\n".join(filter(None, texts_by_path.values())), error=error)


def refused(status: int, body: bytes) -> str:
    said = _error(_object(body) or {}) or body.decode(errors="replace")[:200].strip()
    return f"HTTP {status}: {said}" if said else f"HTTP {status}"


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = [each for each in answer.get("choices") or () if isinstance(each, dict)]
    return [{name: each[name] for name in ("index", *SAID) if name in each} for each in choices]


def _error(answer: dict[str, Any]) -> str:
    """Return the error message in an answer, in any dialect; empty if there is none."""
    error = answer if answer.get("type") == "error" and "message" in answer else answer.get("error")
    return str(error.get("message") or error) if isinstance(error, dict) else str(error or "")


def texts(value: Any, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the texts within a value, in order.

    Tools, and the arguments of a tool call, are given as JSON; data (see `OPAQUE`) as its length and digest.
    """
    if isinstance(value, str):
        start = value[:OPAQUE]
        is_text = len(start) < OPAQUE or not start.isascii() or len(start.split(maxsplit=1)) > 1
        yield value if is_text else f"{len(value)} characters: {hashlib.sha256(value.encode()).hexdigest()}"
    elif isinstance(value, list):
        for each in value:
            yield from texts(each, left_out)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name == "tools" or (name in ("input", "arguments") and isinstance(each, dict)):
                yield json.dumps(each, ensure_ascii=False, default=str)
            elif name not in left_out:
                yield from texts(each, left_out)
    elif value is not None:
        yield str(value)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
