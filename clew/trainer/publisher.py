"""Weights on their way to inference: written, announced, loaded by every server, and only then published."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from clew.config import Config, server_addresses
from clew.inference.client import EngineUnreachable, HTTPEngine
from clew.record.run import RunDirectory, Server
from clew.record.weights import WeightRef
from clew.training.engine import TrainEngine
from clew.training.weights import write_weights

log = logging.getLogger("clew.trainer")

LOAD_TIMEOUT_S = 120.0
"""A server that has not loaded new weights by then is taken out; it loads the newest before it comes back."""


class Publisher:
    """Publishes a version. The order settles each race with a server that starts meanwhile (see `RunDirectory`):

    1. the weights are written, 2. announced, 3. loaded by the servers that are registered, 4. published to rollout,
    5. their predecessors are removed.

    Of several ranks each calls it, for its slice of the weights; the rest is rank 0's.
    """

    def __init__(self, config: Config, run: RunDirectory, load: Callable[[WeightRef], None]) -> None:
        """load: returns when every engine serves the weights."""
        self._run = run
        self._load = load
        self._folder = run.path / "weights"
        self._leads = False
        self._outside = config.inference.weights is not None
        if config.inference.weights is not None:
            name = hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=6).hexdigest()
            self._folder = Path(config.inference.weights) / f"clew-{name}"

    def __call__(self, engine: TrainEngine) -> None:
        digest = engine.weights_digest()  # every rank has its part in it

        def written() -> bool:
            ref = self._run.newest_weights()
            return ref is not None and (ref.version, ref.digest) == (engine.version, digest) and ref.exists()

        ref = self._run.newest_weights()
        if not engine.ranks.agree(f"whether version {engine.version} is written already", written):
            ref = write_weights(engine, self._folder / f"version-{engine.version:06d}", engine.version)
            if engine.ranks.leads:
                self._run.announce_weights(ref)
        if not engine.ranks.leads:
            return
        self._leads = True
        assert ref is not None
        self._load(ref)
        self._run.inbox.publish(ref.version)
        for folder in self._folder.iterdir():
            if folder.name != Path(ref.path).name:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Leave no weights outside the run directory; the checkpoint has them."""
        if self._outside and self._leads:
            shutil.rmtree(self._folder, ignore_errors=True)


class ServerLoader:
    """Has the servers of a run load weights, over HTTP, all at once."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._loop = asyncio.new_event_loop()
        self._engines: dict[tuple[str, str], HTTPEngine] = {}

    def __call__(self, ref: WeightRef) -> None:
        self._loop.run_until_complete(self._load_everywhere(ref))

    def close(self) -> None:
        for engine in self._engines.values():
            self._loop.run_until_complete(engine.close())
        self._loop.close()

    async def _load_everywhere(self, ref: WeightRef) -> None:
        named = [Server(name=each, address=each, pid=0, ready=True) for each in server_addresses()]
        await asyncio.gather(*(self._load_on(server, ref) for server in named or self._run.servers()))

    async def _load_on(self, server: Server, ref: WeightRef) -> None:
        engine = self._engines.get((server.address, server.token))
        if engine is None:
            engine = self._engines[server.address, server.token] = HTTPEngine(server.address, server.token)
        try:
            await asyncio.wait_for(engine.load_weights(ref), LOAD_TIMEOUT_S)
        except EngineUnreachable:
            log.warning(
                "server %s (%s) is gone; it loads version %d when it is back", server.name, server.address, ref.version
            )
            self._run.remove_server(server.name)
        except TimeoutError:
            log.warning(
                "server %s (%s) did not load version %d within %.0f s and is taken out until it has",
                server.name,
                server.address,
                ref.version,
                LOAD_TIMEOUT_S,
            )
            self._run.register_server(replace(server, ready=False))
