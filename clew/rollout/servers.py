"""All inference servers of a run as one engine: each request goes to the least loaded that is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from clew.config import server_addresses, server_token
from clew.inference.client import HTTPEngine
from clew.inference.protocol import Completion, EngineUnreachable, OnToken, SamplingParams, SchemaUnsupported
from clew.record.run import RunDirectory, Server
from clew.record.weights import WeightRef
from clew.waits import waiting

log = logging.getLogger("clew.rollout")

LOOK_S = 0.2
"""How old the list of servers may be."""

AVOID_S = 0.25
"""How long a server is left alone after it could not be reached."""


class ServerPool:
    """The `Engine` of a rollout process. A server that dies costs its requests a new start on whichever is ready,
    also when it comes back at another address; while there is none, they wait."""

    def __init__(self, run: RunDirectory) -> None:
        """The servers are those that the environment names, or else those registered in the run directory."""
        self._run = run
        token = server_token()
        self._fixed = [Server(name=each, address=each, pid=0, ready=True, token=token) for each in server_addresses()]
        self._servers: list[Server] = []
        self._looked_at = 0.0
        self._engines: dict[tuple[str, str], HTTPEngine] = {}
        """By address and token: a server that is started again at its address has another token."""
        self._load: dict[str, int] = {}
        """Requests under way, by address."""
        self._avoided: dict[tuple[str, int], float] = {}
        """Address and pid of servers that could not be reached, and until when they are left alone."""

    async def generate(
        self,
        input_ids: list[int],
        params: SamplingParams,
        *,
        images: Sequence[bytes] = (),
        request_id: str = "",
        on_token: OnToken | None = None,
    ) -> Completion:
        """See `Engine.generate`; never unreachable: it waits."""
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
        """The trainer has the servers load weights, not rollout."""
        raise NotImplementedError

    async def abort(self, request_id: str | None = None) -> None:
        """Cut one request short, or all, on every server."""
        await asyncio.gather(*(self._engine(server).abort(request_id) for server in self._ready()))

    async def version(self) -> int:
        """The oldest version that a ready server serves."""
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
