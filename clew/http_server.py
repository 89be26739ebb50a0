"""Common parts of all of Clew's HTTP servers: who may call them, how much a client may send, and how slowly.

::

    Connection   closes connections that send or read too slowly
      └─► Guard        403 foreign Host or Origin, 401 no token or key, 415 not JSON, 413 too large
            └─► the application, which gets the body of a request in one piece
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, cast

import h11
import orjson
import uvicorn

from clew.config import TOKEN_VARIABLE
from clew.errors import EngineError

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HTTPProtocol
except ModuleNotFoundError:  # for `make gpu`, on images without it; uvicorn always brings h11
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol
try:
    from uvloop import new_event_loop as new_event_loop
except ModuleNotFoundError:
    from asyncio import new_event_loop as new_event_loop

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Message, Receive, Send], Awaitable[None]]

LARGE_TEXT = 50_000
"""Number of characters from which a text is tokenized outside the event loop: this takes 20 ms or more."""

MAX_TEXT = 1_000_000
"""Maximum length, in characters, of a text to tokenize, unless the model's context has room for more (`max_text`).
Tokenizing a million characters takes seconds, during which the process cannot end."""

LARGE_BODY = 256 * 2**10
"""Size in bytes from which a request is checked outside the event loop."""

MAX_BODY = 32 * 2**20
"""Maximum number of bytes in the body of a request."""

MAX_VALUES = 2_000_000
"""Maximum number of commas in a body, which estimates the number of its values. Parsing two million values takes about
0.1 s, during which the event loop stands still."""

MAX_HEADERS = 64 * 2**10
"""Maximum number of bytes in the headers of a request."""

STALL_S = 30.0
"""Seconds that a client has to send a request: its headers, and a small body."""

MIN_RATE = 16 * 2**10
"""Minimum rate, in bytes per second, at which a longer request has to arrive."""

WRITE_STALL_S = 300.0
"""Seconds for which a client may leave an answer unread once the buffers are full. This is long, because a client may
stop at a breakpoint."""

SAFE = ("GET", "HEAD", "OPTIONS")
"""HTTP methods that change nothing on any of Clew's servers."""

WITHOUT_TOKEN = ("/generate", "/rl/set_reward", "/rl/end_session")
"""Other paths that need no token: sampling changes nothing, and the gateway checks a session's own key itself."""

WITHOUT_TOKEN_BELOW = ("/v1/", "/chat/completions", "/completions", "/responses", "/messages")
"""Prefixes of further paths that need no token; see also `clew.gateway.app.AnyBase`."""

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?", re.IGNORECASE)
ORIGIN = re.compile(rf"https?://({HOST.pattern})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Rules for who may call a server."""

    loopback: bool = True
    """True if the server listens on a loopback address."""
    token: str = ""
    """Token that allows every call. Empty: this server has no calls that need one."""
    key: str = ""
    """API key that clients send. Empty: any key will do."""
    has_session: Callable[[str], bool] = lambda key: False
    """Return whether a key belongs to an open session of the gateway. Such a key is accepted like `key`."""


class Guard:
    """ASGI middleware that refuses forbidden requests. It checks five things:

    1. Host. On loopback it must be a loopback name or address, so that a web page cannot point a host name of its own
       here (DNS rebinding). Elsewhere every call but /health and /health_generate needs a key, which no web page has.
    2. Origin, which browsers add. On loopback it must be a page that this machine serves; elsewhere the same host.
    3. Credentials. Calls that change the server's state need the token. All others need the API key if the server does
       not listen on loopback, or if a key was asked for.
    4. Content type. A body is JSON and says so: a web page cannot send that to another site without a CORS preflight.
    5. Size. A body has at most MAX_BODY bytes and MAX_VALUES values.
    """

    def __init__(self, application: ASGI, access: Access) -> None:
        self._application = application
        self._access = access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = _Headers(scope["headers"])
        refusal = self._refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            await respond(send, *refusal)
            return
        if not headers.has_body:
            await self._application(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:  # the client has gone
            return
        if len(body) > MAX_BODY or body.count(b",") > MAX_VALUES:
            await respond(send, *_too_large())
            return
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return first.pop() if first else await receive()  # after the body, only a disconnect can come

        await self._application(scope, receive_whole, send)

    def _refusal(self, method: str, path: str, headers: _Headers) -> tuple[int, Message] | None:
        if refusal := self._foreign(headers) or self._without_credentials(method, path, headers.credentials):
            return refusal
        if headers.has_body and not headers.is_json:
            return _error(
                415,
                "Cannot read the body: its Content-Type is not application/json. With curl: -H 'Content-Type: "
                "application/json'",
            )
        return _too_large() if headers.length > MAX_BODY else None

    def _foreign(self, headers: _Headers) -> tuple[int, Message] | None:
        if self._access.loopback and not (len(headers.hosts) == 1 and is_loopback(headers.hosts[0])):
            named = f"the Host {headers.hosts[0]!r}" if headers.hosts else "no Host"
            return _error(
                403,
                f"Cannot answer a request with {named}: this server listens on loopback, and answers to localhost, "
                f"127.0.0.1 and [::1], with any port.",
            )
        for origin in headers.origins:
            page = ORIGIN.fullmatch(origin)
            same = page is not None and (
                is_loopback(page[1]) if self._access.loopback else [page[1].lower()] == headers.hosts
            )
            if not same:
                return _error(
                    403,
                    f"Cannot answer a web page of {origin!r}: only pages of this server's own host may call it. "
                    f"Programs need no Origin header.",
                )
        return None

    def _without_credentials(self, method: str, path: str, given: bytes) -> tuple[int, Message] | None:
        access = self._access
        if access.token and secrets.compare_digest(given, access.token.encode()):
            return None
        needs_no_token = method in SAFE or path in WITHOUT_TOKEN or path.startswith(WITHOUT_TOKEN_BELOW)
        if access.token and not needs_no_token:
            return _error(
                401,
                f"Cannot {method} {path}: it needs the run's token, as `Authorization: Bearer TOKEN`. Clew's own "
                f"processes read it from servers.json in the run's directory; give it to others in {TOKEN_VARIABLE}.",
            )
        if (
            not access.key
            or path in ("/health", "/health_generate")
            or secrets.compare_digest(given, access.key.encode())
        ):
            return None
        if access.has_session(given.decode("latin-1")):
            return None
        return _error(
            401,
            f"Cannot {method} {path}: unknown API key. Send the one that `clew serve` printed, as `Authorization: "
            f"Bearer KEY` or `x-api-key: KEY`; POST /rl/start_session, with the run's token, gives further ones.",
        )


class _Headers:
    """The parts of a request's headers that the guard needs."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.hosts: list[str] = []
        self.origins: list[str] = []
        self.credentials = b""
        self.length = 0
        self.has_body = self.is_json = False
        for name, value in headers:
            if name == b"host":
                self.hosts.append(value.decode("latin-1").lower())
            elif name == b"origin":
                self.origins.append(value.decode("latin-1"))
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                self.credentials = self.credentials or value[7:].strip()
            elif name == b"x-api-key":
                self.credentials = self.credentials or value.strip()
            elif name == b"content-length":
                self.length = int(value)
                self.has_body |= self.length > 0
            elif name == b"transfer-encoding":
                self.has_body = True
            elif name == b"content-type":
                media_type = value.partition(b";")[0].strip().lower()
                self.is_json = media_type == b"application/json" or (
                    media_type.startswith(b"application/") and media_type.endswith(b"+json")
                )


def max_text(context: int | None) -> int:
    """Return the maximum length, in characters, of a text to tokenize: 16 per token of the context, at least MAX_TEXT.

    If the context is unknown (None), only the size of the body limits the text.
    """
    return MAX_BODY if context is None else max(MAX_TEXT, 16 * context)


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is localhost or a loopback address."""
    match = HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].lower()
    if name == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def bind(listen: str) -> socket.socket:
    """Return a socket of inference.listen. It does not listen yet: clients are refused until the server is ready.

    Raises:
        EngineError: The address is not host:port, is not of this machine, or its port is in use.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EngineError(f"inference.listen is {listen!r}, expected host:port, for example 127.0.0.1:20082.")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise EngineError(
                f"Cannot listen on {host}:{port}: the port is in use. End the other process, or choose another port "
                f"with inference.listen={host}:PORT (0: any free one)."
            ) from None
        raise EngineError(
            f"Cannot listen on {host}:{port}: {error.strerror}. inference.listen takes an address of this machine."
        ) from None
    return listener


async def _body(receive: Receive) -> bytes | None:
    """Return the body, or its beginning if it is larger than MAX_BODY; None if the client has disconnected."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY or not message.get("more_body"):
            return b"".join(parts)


def _too_large() -> tuple[int, Message]:
    return _error(
        413,
        f"Cannot read the body: it has more than {MAX_BODY >> 20} MiB, or more than {MAX_VALUES} values. Send less in "
        f"one request.",
    )


def _error(status: int, message: str) -> tuple[int, Message]:
    """Return the status and body of an error, in a form that the clients of OpenAI, Anthropic and SGLang can read."""
    kinds = {401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": message}}


async def respond(send: Send, status: int, content: Any) -> None:
    """Send an answer in one piece, as JSON."""
    body = orjson.dumps(content)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


class Connection(HTTPProtocol):  # type: ignore[misc]  # one of two classes
    """A connection of uvicorn with time limits.

    Without these, uvicorn waits forever for the rest of a request, and for the client to read its answer.
    """

    _incomplete = False
    """True while a request has begun to arrive but is not complete."""
    _in_headers = False
    _header_bytes = 0
    _timer: TimerHandle | None = None
    """Timer that runs while the rest of a request is awaited."""
    _since = 0.0
    """Time on the loop's clock since which the rest of the request is awaited."""
    _bytes = 0
    """Number of bytes that have arrived since then."""
    _write_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._incomplete = self._in_headers = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._incomplete = False
        super().on_message_complete()

    def handle_events(self) -> None:
        """Handle what has arrived; h11 calls this in place of the three methods above, and limits headers itself."""
        super().handle_events()
        self._incomplete = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        self._watch()  # also called after an answer, for a request that was already buffered

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADERS:
                self.send_400_response(f"The headers have more than {MAX_HEADERS >> 10} KiB.")
                return
        self._watch()

    def _watch(self) -> None:
        """Start the timer if the rest of a request is awaited; otherwise stop it."""
        answering = self.cycle is not None and not self.cycle.response_complete
        idle = self.timeout_keep_alive_task is not None
        if self._incomplete or not (answering or idle):
            if self._timer is None:
                self._await_rest()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_rest(self) -> None:
        self._since, self._bytes = self.loop.time(), 0
        self._timer = self.loop.call_later(STALL_S, self._look)

    def _look(self) -> None:
        """Close the connection if its request arrives too slowly."""
        if self.flow.read_paused:  # nothing can arrive while an earlier request on this connection is being answered
            self._await_rest()
            return
        left = self._since + STALL_S + self._bytes / MIN_RATE - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class GuardedServer(uvicorn.Server):
    """Server of an ASGI application behind a `Guard`, on the running event loop; `should_exit = True` ends it.

    Its owner handles signals, because uvicorn's own handler would raise them again, and all cleanup would be skipped.
    """

    def __init__(self, application: Any, access: Access) -> None:
        super().__init__(
            uvicorn.Config(
                cast(Any, Guard(application, access)),
                loop="none",
                http=Connection,
                h11_max_incomplete_event_size=MAX_HEADERS,
                lifespan="off",
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=3600,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
