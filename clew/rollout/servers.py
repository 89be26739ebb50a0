"""One engine made of all inference servers of a run: each request goes to the least loaded server that is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from clew.inference.client import HTTPEngine
from clew.inference.protocol import Completion, EngineUnreachable, OnToken, SamplingParams, SchemaUnsupported
from clew.record.run import RunDirectory, Server, attached_servers
from clew.record.weights import WeightRef
from clew.waits import waiting

log = logging.getLogger("clew.rollout")

LOOK_S = 0.2
"""Maximum age of the list of servers, in seconds."""

AVOID_S = 0.25
"""Seconds for which a server is avoided after it could not be reached."""


class ServerPool:
    """The `Engine` of a rollout process.

    If a server dies, its requests start again on any server that is ready, even if that is the same server at another
    address. While no server is ready, requests wait.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Take the servers that the environment names, or else those registered in the run directory."""
        self._run = run
        self._fixed = attached_servers()
        self._servers: list[Server] = []
        self._looked_at = 0.0
        self._engines: dict[tuple[str, str], HTTPEngine] = {}
        """Clients by address and token: a server that is restarted at its address has another token."""
        self._load: dict[str, int] = {}
        """Number of requests under way, by address."""
        self._avoided: dict[tuple[str, int], float] = {}
        """Monotonic time until which an unreachable server is avoided, by address and pid."""

    async def generate(
        self,
        input_ids: list[int],
        params: SamplingParams,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        on_token: OnToken | None = None,
    ) -> Completion:
        """Generate as `Engine.generate` does, but wait for a server instead of raising EngineUnreachable.

        Raises:
            SchemaUnsupported: The parameters ask for a JSON schema, which is never applied in training.
        """
        if params.json_schema is not None:
            raise SchemaUnsupported(
                "in training no output is held to a JSON schema: its tokens' logprobs would be those among what the "
                "schema allows, and not the policy's. Ask for the form in the prompt, and reward it."
            )
        while True:
            server = await self._ready_server()
            self._load[server.address] = self._load.get(server.address, 0) + 1
            try:
                engine = self._engine(server)
                return await engine.generate(input_ids, params, images=images, request_id=request_id, on_token=on_token)
            except EngineUnreachable as error:
                log.warning("request %s goes to another server: %s", request_id, error)
                self._avoided[server.address, server.pid] = time.monotonic() + AVOID_S
            finally:
                self._load[server.address] -= 1

    async def load_weights(self, ref: WeightRef) -> None:
        """Raise NotImplementedError: the trainer has the servers load weights, not rollout."""
        raise NotImplementedError

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all requests, on every ready server."""
        await asyncio.gather(*(self._engine(server).abort(request_id) for server in self._ready()))

    async def version(self) -> int:
        """Return the oldest version that a ready server serves."""
        await self._ready_server()
        return min(await asyncio.gather(*(self._engine(server).version() for server in self._ready())))

    async def close(self) -> None:
        """Close the connections."""
        for engine in self._engines.values():
            await engine.close()

    def _engine(self, server: Server) -> HTTPEngine:
        place = server.address, server.token
        if place not in self._engines:
            self._engines[place] = HTTPEngine(server.address, server.token)
        return self._engines[place]

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
