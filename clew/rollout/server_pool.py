"""One engine made of all inference servers of a run.

An episode begins at the least loaded server that is ready, and stays there, where its prefix is cached. If the server
dies, freezes or is taken out, its requests raise EngineUnreachable, and go elsewhere when they are sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import aiohttp

from clew.inference.client import FROZEN_S, HEALTH_S, HTTPEngine
from clew.inference.protocol import (
    Completion,
    EngineUnreachable,
    FaultyAnswer,
    GenerateRequest,
    SamplingParams,
    SchemaUnsupported,
)
from clew.record.run import RunDirectory, Server
from clew.waits import waiting

log = logging.getLogger("clew.rollout")

LOOK_S = 0.2
"""Maximum age of the list of servers, in seconds."""

AVOID_S = 0.25
"""Seconds for which a server is avoided after it could not be reached, or gave a faulty answer. Each further failure
doubles them, up to 2."""

MAX_PLACES = 65536
"""Maximum number of episodes whose server is remembered."""

SENT_AGAIN = "a request failed, and may be tried again, on another server if there is one: %s"
"""Warning, with the error of the request."""

_episode: ContextVar[str] = ContextVar("_episode", default="")
"""ID of the episode that the request under way belongs to; "" if it has none."""

_asked: ContextVar[Server | None] = ContextVar("_asked", default=None)
"""Server that the request under way was sent to, as it was listed then."""


class ServerPool(HTTPEngine):
    """The `Engine` of a rollout process: one client for all servers of a run. While none is ready, requests wait."""

    def __init__(self, run: RunDirectory, frozen_s: float = FROZEN_S, vocab: int | None = None) -> None:
        """Take the servers that the environment names, or else those registered in the run directory."""
        super().__init__("of this run")  # in errors: "inference server of this run: ..."
        self.vocab = vocab
        self._run = run
        self._servers: list[Server] = []
        self._looked_at = 0.0
        self._clients: dict[tuple[str, str], HTTPEngine] = {}
        """Clients by address and token: a server that is restarted at its address has another token."""
        self._places: OrderedDict[str, str] = OrderedDict()
        """Address of each episode's server; the most recently used episode is last."""
        self._busy: defaultdict[tuple[str, int], set[asyncio.Task[Any]]] = defaultdict(set)
        """Tasks whose request is under way, by the address and pid of their server."""
        self._frozen: set[tuple[str, int]] = set()
        """Servers that do not answer, by address and pid."""
        self._ended: dict[asyncio.Task[Any], str] = {}
        """Tasks whose request `_keep_watch` has ended, with the reason."""
        self._frozen_s = frozen_s
        self._watches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._avoided: dict[tuple[str, int], tuple[float, float]] = {}
        """Avoided servers, by address and pid: monotonic time until which each is avoided, and its next period."""
        self._last_warnings: dict[tuple[str, int], str] = {}
        """Last warning about each server that has not answered since, by address and pid."""

    async def generate(self, request: GenerateRequest) -> Completion:
        _episode.set(request.id.rpartition(".")[0])
        return await super().generate(request)

    def _fitting(self, request: GenerateRequest) -> SamplingParams:
        """Return the request's parameters. Raises SchemaUnsupported for a JSON schema, which training never applies."""
        if request.params.json_schema is not None:
            raise SchemaUnsupported(
                "in training no output is held to a JSON schema: its tokens' logprobs would be those among what the "
                "schema allows, and not the policy's. Ask for the form in the prompt, and reward it."
            )
        return request.params

    def _check(self, new: Completion, total: int, request: GenerateRequest, address: str) -> None:
        """Raise FaultyAnswer also if an attached server has other weights than it was given; take it out then."""
        super()._check(new, total, request, address)
        server = _asked.get()
        if server is None or server.loaded is None or set(new.versions) <= {server.loaded}:
            return
        newest = self._run.newest_weights()  # an update may have begun since the request was sent
        expected = range(server.loaded, max(server.loaded, newest.version if newest else 0) + 1)
        if not (wrong := [version for version in new.versions if version not in expected]):
            return
        if server in self._run.inference_servers():  # otherwise it has loaded weights since
            self._run.register_server(replace(server, ready=False))  # the trainer brings it back
        self._looked_at = 0.0
        raise FaultyAnswer(
            address,
            f"its tokens are of version {wrong[0]}, and it was given version {server.loaded}: it was restarted, or "
            f"somebody else loads weights into it. It is used again once it has loaded the newest weights.",
        )

    @asynccontextmanager
    async def _answered(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        server = await self._ready_server()
        _asked.set(server)
        place, key = (server.address, server.token), (server.address, server.pid)
        if place not in self._clients:
            self._clients[place] = HTTPEngine(*place)
        task = asyncio.current_task()
        assert task is not None
        self._busy[key].add(task)
        self._watch(server)
        try:
            # The wait covers the whole generation if the server answers in one piece: it sends nothing before the end.
            with waiting(f"an answer of {server.name} ({server.address})", unblocks="the inference engine"):
                async with self._clients[place]._answered(method, path, body) as response:
                    yield response
            if method == "POST":  # a server whose generations fail may still answer what it is asked about itself
                self._avoided.pop(key, None)
                self._last_warnings.pop(key, None)
        except asyncio.CancelledError:
            # `_keep_watch` cancels the tasks at a server that is lost. If `uncancel` leaves another cancellation, the
            # episode itself was cancelled.
            if task not in self._ended or task.uncancel():
                raise
            gone = EngineUnreachable(server.address, self._ended[task])
            log.warning(SENT_AGAIN, gone)
            raise gone from None
        except (EngineUnreachable, FaultyAnswer) as error:
            until, period_s = self._avoided.get(key, (0.0, AVOID_S))
            is_news = time.monotonic() >= until  # otherwise another request has failed there just before
            if is_news:
                self._avoided[key] = time.monotonic() + period_s, min(2 * period_s, 2.0)
            # One that stays away for the same reason is asked every two seconds; `clew.waits` says how long that takes.
            is_news = is_news and self._last_warnings.get(key) != str(error)
            if is_news or isinstance(error, FaultyAnswer):
                self._last_warnings[key] = str(error)
                log.warning(SENT_AGAIN, error)
            raise
        finally:
            self._busy[key].discard(task)
            self._ended.pop(task, None)

    def _watch(self, server: Server) -> None:
        """Start to watch whether a server is frozen, unless that has begun."""
        key = (server.address, server.pid)
        if key in self._watches:
            return
        for former in self._watches.keys() - self._frozen:
            if former[0] == server.address:  # that process is gone, and the new one answers at its address
                self._watches[former].cancel()
        self._watches[key] = asyncio.create_task(self._keep_watch(server))

    async def _keep_watch(self, server: Server) -> None:
        """End the requests at a server that is taken out, or frozen; leave a frozen one out until it answers again."""
        key = (server.address, server.pid)
        client = HTTPEngine(server.address)
        freezing = asyncio.ensure_future(client.frozen(self._frozen_s))
        try:
            while not freezing.done():
                await asyncio.wait({freezing}, timeout=min(HEALTH_S, self._frozen_s / 4))
                # One that hangs in an update, and still answers, holds its requests back until that ends.
                if not any((listed.address, listed.pid) == key and listed.ready for listed in self._listed()):
                    self._end_requests(key, "it was taken out until it has loaded the newest weights")
            self._frozen.add(key)
            self._end_requests(key, f"it has not answered for {self._frozen_s:.0f} s")
            while not await client.answers(self._frozen_s / 3):
                if key not in {(known.address, known.pid) for known in self._listed()}:
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            freezing.cancel()
            self._frozen.discard(key)
            del self._watches[key]
            await client.close()

    def _end_requests(self, key: tuple[str, int], reason: str) -> None:
        """Have the requests under way at a server raise EngineUnreachable."""
        for task in self._busy[key] - self._ended.keys():
            self._ended[task] = reason
            task.cancel()

    async def close(self) -> None:
        for watch in list(self._watches.values()):
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    async def _ready_server(self) -> Server:
        ready = self._ready()
        if not ready:
            with waiting("an inference server", unblocks="clew serve", numbers=self._numbers):
                while not ready:
                    await asyncio.sleep(LOOK_S)
                    ready = self._ready()
        episode = _episode.get()
        placed = next((server for server in ready if server.address == self._places.get(episode)), None)
        server = placed or min(ready, key=lambda server: len(self._busy[server.address, server.pid]))
        if episode:
            self._places[episode] = server.address
            self._places.move_to_end(episode)
            if len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        return server

    def _listed(self) -> list[Server]:
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._servers = self._run.inference_servers()
            self._looked_at = now
        return self._servers

    def _ready(self) -> list[Server]:
        now = time.monotonic()
        serving = [server for server in self._listed() if server.ready and not server.wants_weights]
        known = [(server, (server.address, server.pid)) for server in serving]
        return [server for server, key in known if key not in self._frozen and self._avoided.get(key, (0.0,))[0] < now]

    def _numbers(self) -> str:
        known = []
        for server in self._servers:
            state = "unreachable" if server.ready else "taken out" if server.attached else "loading"
            if server.wants_weights:
                state = "waiting for weights"
            if (server.address, server.pid) in self._frozen:
                state = "frozen"
            known.append(f"{server.address} {state}")
        return f"known: {', '.join(known) or 'none'}"
