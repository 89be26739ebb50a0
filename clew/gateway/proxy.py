"""The gateway in front of a server that already runs (`clew serve --engine URL`).

In front of vLLM, SGLang or another `clew serve`, it captures tokens. A provider takes no token IDs: requests to it are
passed on unchanged, and cannot be trained on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from clew.config import TOKEN_VARIABLE, Config, provider, server_token
from clew.errors import EngineError
from clew.gateway.app import stays
from clew.gateway.episode_engine import sampling_params
from clew.gateway.standalone import make_gateway
from clew.http_server import Access, GuardedServer, bind, is_loopback, new_event_loop
from clew.inference.detect_server import FoundEngine, find_engine
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.printing import print

log = logging.getLogger("clew.gateway")

DROPPED = frozenset(("host", "connection", "content-length", "transfer-encoding", "content-encoding", "keep-alive"))
"""Headers that belong to one connection, and are not passed on."""


class PassThrough:
    """ASGI application that passes every request to the provider, with the provider's key, and returns its answer."""

    def __init__(self, url: str, api_key: str) -> None:
        """Prepare to pass requests on.

        Args:
            url: Base URL for OpenAI's client, such as https://host/v1beta/openai, or for Anthropic's, without /v1.
            api_key: The provider's key; if empty, the client's own key is passed on.
        """
        self._url = url.rstrip("/")
        self._api_key = api_key
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=1024)
        self._client = httpx2.AsyncClient(timeout=None, limits=limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        incoming = Request(scope, receive)
        # The HTTP client sets an accept-encoding of its own, and decompresses answers.
        headers = {name: value for name, value in incoming.headers.items() if name not in {*DROPPED, "accept-encoding"}}
        if self._api_key:
            headers |= {"authorization": f"Bearer {self._api_key}", "x-api-key": self._api_key}
        request = self._client.build_request(
            incoming.method,
            self._provider_url(incoming.url.path),
            params=str(incoming.query_params),
            headers=headers,
            content=await incoming.body(),
        )
        sending = asyncio.ensure_future(self._client.send(request, stream=True))
        try:
            if not await stays(incoming, sending):
                return
            answer = sending.result()
        except httpx2.HTTPError as error:
            message = f"the provider at {self._url} does not answer: {str(error) or type(error).__name__}"
            await JSONResponse({"error": {"message": message, "type": "server_error"}}, 502)(scope, receive, send)
            return
        try:
            kept = {name: value for name, value in answer.headers.items() if name not in DROPPED}
            await StreamingResponse(answer.aiter_bytes(), answer.status_code, kept)(scope, receive, send)
        except httpx2.HTTPError as error:  # our server then closes the connection, so the client notices, too
            log.warning("the provider at %s broke off its answer: %s", self._url, error)
        finally:
            await answer.aclose()

    def _provider_url(self, path: str) -> str:
        """Return the provider's URL for a path of this gateway."""
        if path.startswith("/v1/messages"):  # Anthropic's base URL has no /v1, because its clients add it
            return self._url.removesuffix("/v1") + path
        # OpenAI's base URL ends in /v1, or in another path in its place, such as /v1beta/openai.
        return (self._url if urlsplit(self._url).path else self._url + "/v1") + path.removeprefix("/v1")

    async def close(self) -> None:
        await self._client.aclose()


def serve_in_front(config: Config, url: str, record: Path | None, *, api_key: str = "") -> None:
    """Serve the gateway in front of a server until SIGTERM or SIGINT.

    Args:
        url: Address of the server.
        record: Run directory that ended sessions are written to; None: nothing is recorded.
        api_key: Key that clients have to send; "": any key on loopback, and a generated one on other addresses.

    Raises:
        EngineError: Nothing answers at `url`, its tokens cannot be recorded, or the listening address cannot be used.
        ModelError: The tokenizer cannot be loaded.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, url, record, api_key))


async def _serve(config: Config, url: str, record: Path | None, key: str) -> None:
    _, api_key = provider()
    server = await find_engine(url, api_key)
    if server is not None:
        try:
            await _serve_engine(config, url, server, record, key)
        finally:
            await server.engine.close()
    elif record is not None:
        raise EngineError(
            f"Cannot record: {url} takes no token IDs, so there is nothing to record. Leave --record out."
        )
    else:
        await _serve_provider(config.inference.listen, url, api_key, key)


async def _serve_engine(config: Config, url: str, server: FoundEngine, record: Path | None, key: str) -> None:
    wrong = server.engine.wrong_logprobs(sampling_params(config.sampling))
    if wrong and record is not None:
        raise EngineError(f"Cannot record what {url} generates with the configured sampling: {wrong}.")
    loopback = is_loopback(config.inference.listen)
    token = server_token() or secrets.token_urlsafe(32)
    key = key or ("" if loopback else secrets.token_urlsafe(16))
    vision = load_vision(server.model) if server.engine.takes_images else None
    tokenizer = load_tokenizer(server.model)
    gateway = make_gateway(config, server.engine, tokenizer, server.model, record, key, vision=vision)
    listener, address = _listen(config.inference.listen)
    kind = server.engine.kind or "clew serve"
    print(f"Gateway in front of {kind} at {url}, using the tokenizer of {server.model}", flush=True)
    if advice := wrong or server.engine.advice:
        print(f"warning: {advice}.", flush=True)
    gateway.launched(address)
    if not server_token():
        print(f"export {TOKEN_VARIABLE}={token}", flush=True)
    beside = [asyncio.ensure_future(each) for each in (gateway.run(), server.fail_when_frozen())]
    try:
        access = Access(loopback=loopback, key=key, token=token, has_session=gateway.has_session)
        await _run(GuardedServer(gateway.app, access), listener)
    finally:
        for each in beside:
            each.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def _serve_provider(listen: str, url: str, api_key: str, key: str) -> None:
    if not is_loopback(listen):
        raise EngineError(
            f"Cannot listen on {listen}: anyone who can reach it would use your API key for {url}. Set "
            f"inference.listen to 127.0.0.1 and a port."
        )
    passed_on = PassThrough(url, api_key)
    listener, address = _listen(listen)
    print(
        f"Passing requests on to the provider at {url}, unchanged. API providers do not take token IDs, so no tokens "
        f"are captured and none of this can be trained on.\nexport OPENAI_BASE_URL=http://{address}/v1",
        flush=True,
    )
    try:
        await _run(GuardedServer(passed_on, Access(key=key)), listener)
    finally:
        await passed_on.close()


async def _run(server: GuardedServer, listener: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    await server.serve(sockets=[listener])


def _listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and the address that it got."""
    listener = bind(address)
    listener.listen(4096)
    return listener, "{}:{}".format(*listener.getsockname())
