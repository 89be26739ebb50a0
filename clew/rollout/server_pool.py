"""One engine made of all inference servers of a run: each request goes to the least loaded server that is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from clew.inference.client import HTTPEngine
from clew.inference.protocol import EngineUnreachable, GenerateRequest, SamplingParams, SchemaUnsupported
from clew.record.run import RunDirectory, Server, attached_servers
from clew.waits import waiting

log = logging.getLogger("clew.rollout")

LOOK_S = 0.2
"""Maximum age of the list of servers, in seconds."""

AVOID_S = 0.25
"""Seconds for which a server is avoided after it could not be reached."""


class ServerPool(HTTPEngine):
    """The `Engine` of a rollout process: one client for all servers of a run.

    Each request goes to the least loaded server that is ready; while there is none, requests wait. If a server dies,
    its requests raise EngineUnreachable, and go to another one when they are sent again.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Take the servers that the environment names, or else those registered in the run directory."""
        super().__init__("of this run")
        self._run = run
        self._fixed = attached_servers()
        self._servers: list[Server] = []
        self._looked_at = 0.0
        self._clients: dict[tuple[str, str], HTTPEngine] = {}
        """Clients by address and token: a server that is restarted at its address has another token."""
        self._load: dict[str, int] = {}
        """Number of requests under way, by address."""
        self._avoided: dict[tuple[str, int], float] = {}
        """Monotonic time until which an unreachable server is avoided, by address and pid."""

    def _fitting(self, request: GenerateRequest) -> SamplingParams:
        """Return the request's parameters.

        Raises:
            SchemaUnsupported: They have a JSON schema, which is never applied in training.
        """
        if request.params.json_schema is not None:
            raise SchemaUnsupported(
                "in training no output is held to a JSON schema: its tokens' logprobs would be those among what the "
                "schema allows, and not the policy's. Ask for the form in the prompt, and reward it."
            )
        return request.params

    @asynccontextmanager
    async def _answered(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        server = await self._ready_server()
        place = server.address, server.token
        if place not in self._clients:
            self._clients[place] = HTTPEngine(*place)
        self._load[server.address] = self._load.get(server.address, 0) + 1
        try:
            async with self._clients[place]._answered(method, path, body) as response:
                yield response
        except EngineUnreachable as error:
            log.warning("a request goes to another server: %s", error)
            self._avoided[server.address, server.pid] = time.monotonic() + AVOID_S
            raise
        finally:
            self._load[server.address] -= 1

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()

    async def _ready_server(self) -> Server:
        ready = self._ready()
        if not ready:
            with waiting("an inference server", unblocks="clew serve", numbers=self._numbers):
                while not ready:
                    await asyncio.sleep(LOOK_S)
                    ready = self._ready()
        return min(ready, key=lambda server: self._load.get(server.address, 0))

    def _ready(self) -> list[Server]:
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._servers = self._fixed or self._run.servers()
            self._looked_at = now
        return [s for s in self._servers if s.ready and self._avoided.get((s.address, s.pid), 0.0) < now]

    def _numbers(self) -> str:
        known = ", ".join(f"{s.address} {'unreachable' if s.ready else 'loading'}" for s in self._servers)
        return f"known: {known or 'none'}"
