"""The gateway's HTTP application: finds the session and the dialect of each request, and sends the answer.

::

    agent ──► /v1/chat/completions, /v1/completions, /v1/responses   (OpenAI)      ──► session of the API key ──► engine
              /v1/messages, /v1/messages/count_tokens                (Anthropic)
              /rl/start_session, /rl/set_reward, /rl/end_session     (for an agent that runs elsewhere)
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from pydantic import ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from clew.errors import ClewError
from clew.gateway import anthropic_messages, openai_chat, openai_completions, openai_responses
from clew.gateway.agent_session import AgentSession, Submission
from clew.gateway.dialect import Dialect, ModelRequest, Refusal, encoded, message_of
from clew.gateway.fields import Fields, read
from clew.gateway.tool_choice import refuse_choice
from clew.http_server import ASGI, LARGE_BODY, Message, Receive, Send

log = logging.getLogger("clew.gateway")

MAX_KEYS = 100_000
"""Maximum number of JSON keys in a body: checking a thousand of them takes about 20 ms.

Text inside a string that looks like a key counts, too.
"""

MAX_DATA = 2**20
"""Maximum size of the body of /rl/start_session, which holds a session's data, in bytes."""

ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/models")

KEEP_ALIVE_S = 5.0
"""Seconds of silence before a stream sends a keep-alive. A request that fails before that gets an HTTP error."""

GONE = Response(status_code=499)
"""Response that nobody reads: the client has closed the connection."""


class Sessions(Protocol):
    """Sessions that the application serves, by API key."""

    @property
    def models(self) -> Sequence[str] | None:
        """Return the names that clients may ask for, the model's own first; None if any name will do."""
        ...

    def find(self, key: str) -> AgentSession:
        """Return the session of a key. If any key is accepted, an unknown key opens a new session.

        Raises:
            Refusal: The key is unknown, or its session has ended.
        """
        ...

    def own(self, key: str) -> AgentSession:
        """Return the open session of a key. Unlike `find`, never open a new one.

        Raises:
            Refusal: No session has this key.
        """
        ...

    def start(self, key: str) -> tuple[AgentSession, str]:
        """Open a session for the caller with `key`, and return it with its own key.

        Raises:
            Refusal: Clients cannot open sessions here.
        """
        ...

    def end(self, key: str) -> None:
        """End a session because its client asked for it."""
        ...


class StartSession(Fields):
    """The body of /rl/start_session."""

    model_config = ConfigDict(extra="forbid")
    data: dict[str, Any] | None = None


class EndSession(Fields):
    """The body of /rl/end_session: it may be left out."""

    model_config = ConfigDict(extra="forbid")


class SetReward(Fields):
    """The body of /rl/set_reward."""

    model_config = ConfigDict(extra="forbid")
    reward: float
    interaction_id: str | None = None


def application(sessions: Sessions) -> FastAPI:
    """Return the ASGI application. All routes run on one event loop, the gateway's."""
    app = FastAPI(title="Clew gateway", docs_url=None, redoc_url=None)

    def serve(path: str, dialect: Dialect, body: type[Fields], handle: Callable[..., Awaitable[Response]]) -> None:
        async def route(http: HTTPRequest) -> Response:
            try:
                return await handle(sessions, dialect, http)
            except ClientDisconnect:
                return GONE
            except Exception as error:
                refusal = _refusal_for(error, f"at {path}")
                return json_response(dialect.refuse(refusal), refusal.status)

        # A body's definitions stay within its schema, because several bodies have models of the same name.
        place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs"
        schema = body.model_json_schema(ref_template=f"{place}/{{model}}")
        app.add_api_route(
            path,
            route,
            methods=["POST"],
            openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
            responses={code: {"description": what} for code, what in STATUSES.items()},
        )

    serve("/v1/chat/completions", openai_chat, openai_chat.ChatRequest, _complete)
    serve("/v1/completions", openai_completions, openai_completions.CompletionRequest, _complete)
    serve("/v1/responses", openai_responses, openai_responses.ResponsesRequest, _complete)
    serve("/v1/messages", anthropic_messages, anthropic_messages.MessagesRequest, _complete)
    serve("/v1/messages/count_tokens", anthropic_messages, anthropic_messages.CountRequest, _count_tokens)
    serve("/rl/start_session", openai_chat, StartSession, _start_session)
    serve("/rl/set_reward", openai_chat, SetReward, _set_reward)
    serve("/rl/end_session", openai_chat, EndSession, _end_session)

    @app.get("/v1/models")
    async def models(http: HTTPRequest) -> Response:
        names = sessions.models or ["any"]
        if "anthropic-version" in http.headers:
            return json_response(anthropic_messages.models(names))
        return json_response({"object": "list", "data": [openai_chat.model(name) for name in names]})

    @app.get("/v1/models/{name:path}", responses={404: {"description": STATUSES[404]}})
    async def model(name: str, http: HTTPRequest) -> Response:
        dialect = anthropic_messages if "anthropic-version" in http.headers else openai_chat
        try:
            _refuse_unless_served(sessions, name)
        except Refusal as refusal:
            return json_response(dialect.refuse(refusal), refusal.status)
        return json_response(dialect.model(name))

    @app.exception_handler(HTTPException)
    async def refuse(http: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = Refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
        return json_response(dialect_of(http.url.path).refuse(what), error.status_code)

    return app


def _refusal_for(error: Exception, where: str) -> Refusal:
    """Return what a client is told about an error. Log it, unless it is a Refusal itself."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ClewError):  # such as a full disk
        log.error("a request %s failed: %s", where, error)
        return Refusal(500, str(error))
    log.exception("a bug in the gateway, %s", where)
    return Refusal(500, f"{type(error).__name__}: {error}")


STATUSES: dict[int | str, Any] = {
    400: "invalid in this dialect, or asks for something that cannot be honoured",
    401: "unknown key",
    404: "unknown model, response or interaction",
    413: "too large",
    503: "the engine does not answer",
}
"""Descriptions of the error statuses, for every dialect."""


def dialect_of(path: str) -> Dialect:
    """Return the dialect in which clients of this path expect errors."""
    return anthropic_messages if path.startswith("/v1/messages") else openai_chat


async def _complete(sessions: Sessions, dialect: Dialect, http: HTTPRequest) -> Response:
    session, request, raw = await _receive(sessions, http, dialect.parse)
    fingerprint = hashlib.sha256(http.url.path.encode() + b"\n" + raw).digest()
    submission = await session.submit(request, fingerprint, retry=_is_retry(http), size=len(raw))
    if request.stream:  # wait only for its first words
        stayed = await stays(http, submission.speech.begun(), limit_s=KEEP_ALIVE_S)
    else:
        stayed = await stays(http, asyncio.wait({submission.replies}))
    if not stayed:
        submission.left = True
        return GONE
    if submission.replies.done():
        await submission.answered()
    if request.stream:
        return StreamingResponse(
            _stream(dialect, request, submission), media_type="text/event-stream", headers=STREAMED
        )
    submission.delivered = True
    return json_response(dialect.respond(request, submission.replies.result()))


async def _receive(
    sessions: Sessions, http: HTTPRequest, parse: Callable[[dict[str, Any]], ModelRequest]
) -> tuple[AgentSession, ModelRequest, bytes]:
    """Return the session of a request, the request as `parse` reads it, and its body."""
    raw = await _read(http)
    session = sessions.find(key_of(http))
    body = _object(raw)
    if parse is openai_responses.parse:
        body = openai_responses.with_items(body, session.turns.find)
    request = parse(body) if len(raw) < LARGE_BODY else await asyncio.to_thread(parse, body)
    _refuse_unless_served(sessions, request.model)
    return session, _with_earlier(session, request), raw


def _refuse_unless_served(sessions: Sessions, model: str) -> None:
    if sessions.models is not None and model not in sessions.models:
        message = f"Cannot find model {model!r}: this server has {', '.join(sessions.models)}. Use one of these names."
        raise Refusal(404, message, param="model", code="model_not_found")


STREAMED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _with_earlier(session: AgentSession, request: ModelRequest) -> ModelRequest:
    """Return the request with the earlier messages, if the client names an earlier response instead of sending them.

    These are the messages before the named response, and the response itself. A thread of Anthropic's API keeps its
    tools. Instructions apply to one response only, so those of earlier requests are left out.
    """
    if request.follows is None:
        return request
    turn = session.turns.find(request.follows)
    earlier = turn.request.messages[1 if turn.request.extras.get("instructions") else 0 :]
    instructions = request.messages[: 1 if request.extras.get("instructions") else 0]
    names = {call.id: call.name for call in turn.reply.tool_calls}
    new = [
        {**message, "name": names[id]} if (id := message.get("tool_call_id")) in names else message
        for message in request.messages[len(instructions) :]
    ]
    if request.extras.get("thread"):
        request = replace(request, tools=turn.request.tools)
        refuse_choice(request.tool_choice, [tool["function"]["name"] for tool in request.tools])
    messages = [*instructions, *earlier, message_of(turn.reply), *new]
    return replace(request, messages=messages, images={**turn.request.images, **request.images})


async def _stream(dialect: Dialect, request: ModelRequest, submission: Submission) -> AsyncIterator[bytes]:
    """Yield the dialect's events, and keep-alives between them."""
    place = 0
    events = dialect.events(request, submission.stream())
    upcoming: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(events, None))
            while not upcoming.done():
                await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_S)
                if not upcoming.done():
                    yield dialect.KEEP_ALIVE
            if (event := upcoming.result()) is None:
                break
            answered = submission.replies.done()
            yield event
            # When the reply is complete and a later event has been sent, the reply counts as delivered.
            submission.delivered, place = submission.delivered or answered, place + 1
    except Exception as error:
        yield dialect.refuse_in_stream(_refusal_for(error, "in a stream"), place)
    finally:
        submission.left = True
        if upcoming is not None:
            upcoming.cancel()


async def _count_tokens(sessions: Sessions, dialect: Dialect, http: HTTPRequest) -> Response:
    session, request, _ = await _receive(sessions, http, anthropic_messages.parse_count)
    return json_response({"input_tokens": await session.count_tokens(request)})


async def _start_session(sessions: Sessions, dialect: Dialect, http: HTTPRequest) -> Response:
    raw = await _read(http) or b"{}"
    if len(raw) > MAX_DATA:
        raise Refusal(413, f"Cannot start a session: its body has more than {MAX_DATA >> 10} KiB.", param="data")
    body, _ = read(StartSession, _object(raw))
    session, key = sessions.start(key_of(http))
    session.data = body.data or {}
    session.received_bytes = len(raw)
    return json_response({"session_id": session.id, "api_key": key})


async def _set_reward(sessions: Sessions, dialect: Dialect, http: HTTPRequest) -> Response:
    body, _ = read(SetReward, _object(await _read(http)))
    session = sessions.own(key_of(http))
    session.set_reward(body.reward, body.interaction_id)
    return json_response({"session_id": session.id, "rewards": session.rewards})


async def _end_session(sessions: Sessions, dialect: Dialect, http: HTTPRequest) -> Response:
    read(EndSession, _object(await _read(http) or b"{}"))
    session = sessions.own(key_of(http))
    sessions.end(key_of(http))
    return json_response({"session_id": session.id, "interactions": len(session.engine.interactions)})


def key_of(http: HTTPRequest) -> str:
    """Return the API key: OpenAI's clients send it as a bearer token, Anthropic's as x-api-key."""
    given = http.headers.get("authorization", "")
    scheme, _, token = given.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")


def _is_retry(http: HTTPRequest) -> bool:
    """Return whether the client says that this is a retry, as the official clients do."""
    count = http.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0


async def _read(http: HTTPRequest) -> bytes:
    """Return the body, whose size `clew.http_server.Guard` limits. Raises Refusal if its objects have too many keys."""
    raw = await http.body()
    if next(itertools.islice(re.finditer(rb'"\s*:', raw), MAX_KEYS, None), None) is not None:
        raise Refusal(413, f"Cannot read the body: its objects have more than {MAX_KEYS} keys. Send less at once.")
    return raw


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"the body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is {type(body).__name__}, expected a JSON object.")
    return body


class AnyBase:
    """ASGI middleware that lets all clients use one base URL, although only OpenAI's clients expect /v1 at its end.

    Anthropic's client adds /v1 itself. So this serves /v1/v1/messages as /v1/messages, and /chat/completions as
    /v1/chat/completions.
    """

    def __init__(self, app: ASGI) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith("/v1/v1/"):
            scope = {**scope, "path": path[3:]}
        elif path.startswith(ENDPOINTS):
            scope = {**scope, "path": f"/v1{path}"}
        await self._app(scope, receive, send)


async def disconnected(http: HTTPRequest) -> None:
    """Wait until the client has closed the connection. Call it only after the body has been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def stays(http: HTTPRequest, work: Awaitable[Any], limit_s: float | None = None) -> bool:
    """Wait for `work`, then cancel what is left of it: after `limit_s` seconds, or when the client disconnects first.

    Call it only after the body has been read.

    Returns:
        False if the client disconnected first.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({working, gone}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return working.done() or not gone.done()
    finally:
        for each in (working, gone):
            each.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def json_response(content: Any, status: int = 200) -> Response:
    return Response(encoded(content), status, media_type="application/json")
