"""A provider behind per-episode API keys: requests are passed on, and each episode's requests and answers are noted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request as HTTPRequest
from starlette.types import Message, Receive, Scope, Send

from clew.gateway.app import dialect_of, json_response, key_of
from clew.gateway.dialect import Refusal
from clew.gateway.front import PassedOn
from clew.gateway.thread import EpisodeKeys
from clew.stress import words
from clew.stress.requests import Request, Requests

MODEL_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
"""Paths at which a model is asked. Others (a list of models, a token count) are passed on, but not noted."""


@dataclass(kw_only=True, eq=False)
class Exchange:
    """A request, and as much of its answer as has arrived."""

    episode: str
    came: float
    """time.monotonic()"""
    done: float
    """time.monotonic() when its last message passed."""
    asked: bytes = b""
    status: int = 0
    """HTTP status; 0: there is no answer yet."""
    streamed: bool = False
    answered: bytearray = field(default_factory=bytearray)

    def hear(self, message: Message) -> None:
        """Add a message of the request or of the answer."""
        if message["type"] == "http.request":
            self.asked += message.get("body", b"")
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            self.streamed = any(
                name == b"content-type" and b"event-stream" in each for name, each in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self.answered += message.get("body", b"")
        self.done = time.monotonic()

    def told(self) -> Request:
        """Return the request and its answer as text."""
        body = bytes(self.answered)
        if self.status == 0:
            answer = words.Answer(id="", words="", error="")
        elif self.status >= 400:
            answer = words.Answer(id="", words="", error=words.refused(self.status, body))
        else:
            answer = words.answer_of_stream(body) if self.streamed else words.answer(body)
        return Request(
            episode=self.episode,
            asked=words.asked(self.asked),
            answered=answer.words or answer.error,
            came=self.came,
            done=self.done,
            id=answer.id,
            refused=answer.error,
        )


@dataclass(kw_only=True)
class Asking:
    """An episode and its exchanges in progress."""

    episode: str
    exchanges: list[Exchange] = field(default_factory=list)


class NotedProvider:
    """ASGI app that passes requests on to a provider and notes them. Use it from one event loop."""

    def __init__(self, passed_on: PassedOn, requests: Requests) -> None:
        self._passed_on = passed_on
        self._requests = requests
        self.keys: EpisodeKeys[Asking] = EpisodeKeys()

    def open(self, episode_id: str) -> str:
        """Return the API key for an episode that begins."""
        return self.keys.open(episode_id, Asking(episode=episode_id))

    async def close(self, key: str) -> None:
        """End an episode, and note its unfinished exchanges as they stand."""
        asking = self.keys.close(key)
        while asking.exchanges:
            self._requests.note(asking.exchanges.pop().told())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http, now = HTTPRequest(scope), time.monotonic()
        path = http.url.path
        try:
            asking = self.keys.find(key_of(http))
        except Refusal as refusal:
            await json_response(dialect_of(path).refuse(refusal), refusal.status)(scope, receive, send)
            return
        if path not in MODEL_PATHS:
            await self._passed_on(scope, receive, send)
            return
        exchange = Exchange(episode=asking.episode, came=now, done=now)

        async def heard() -> Message:
            message = await receive()
            exchange.hear(message)
            return message

        async def told(message: Message) -> None:
            exchange.hear(message)
            await send(message)

        asking.exchanges.append(exchange)
        try:
            with self._requests.asking(asking.episode):
                await self._passed_on(scope, heard, told)
        finally:
            if exchange in asking.exchanges:
                asking.exchanges.remove(exchange)
                self._requests.note(exchange.told())
