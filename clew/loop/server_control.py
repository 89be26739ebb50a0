"""The trainer's HTTP client for a run's inference servers: it has them load weights and release their memory."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from clew.errors import EngineError
from clew.inference.client import FROZEN_S, EngineUnreachable, HTTPEngine
from clew.inference.protocol import Timings
from clew.record.run import RunDirectory, Server, attached_servers
from clew.record.weights import WeightRef
from clew.waits import waiting

log = logging.getLogger("clew.trainer")

Ask = Callable[[HTTPEngine], Awaitable[None]]

ANSWER_TIMEOUT_S = 120.0
"""Seconds in which a server must do what it was asked, such as load new weights. After that it is taken out, and loads
the newest weights before it comes back."""

POLL_S = 0.01
"""Seconds between two looks for a batch or an evaluation."""

LEASE_S = 60.0
"""Seconds without a word from the trainer after which a server that released its memory takes it back and serves."""


class ServerControl:
    """The servers of a run, which are all asked at once."""

    def __init__(
        self, run: RunDirectory, lease_s: float = LEASE_S, frozen_s: float = FROZEN_S, *, patient: bool = False
    ) -> None:
        """Prepare to ask the servers of `run`.

        Args:
            run: The run directory.
            lease_s: Seconds for which the servers release their memory; renewed after each third of it.
            frozen_s: Seconds without an answer after which a server counts as frozen.
            patient: Whether servers finish what they generate before they load weights (inference.on_update: wait), so
                that there is no limit for it.
        """
        self._limit_s = None if patient else ANSWER_TIMEOUT_S
        self._frozen_s = frozen_s
        self._run = run
        self._lease_s = lease_s
        self._loop = asyncio.new_event_loop()
        self._engines: dict[tuple[str, str], HTTPEngine] = {}

    def load(self, ref: WeightRef) -> Timings:
        """Return when the servers serve these weights, with the timings of the one that paused longest."""
        taken: list[Timings] = [{}]

        async def load(engine: HTTPEngine) -> None:
            taken.append(await engine.load_weights(ref))

        self._ask(f"load version {ref.version}", load)
        return max(taken, key=lambda seconds: sum(seconds.values()))

    @contextmanager
    def released(self) -> Iterator[None]:
        """Keep the servers paused and without a cache while the block runs, however long that takes."""
        self._ask("release its memory", lambda engine: engine.release_memory(self._lease_s))
        over = asyncio.Event()
        keeper = threading.Thread(target=self._loop.run_until_complete, args=(self._prolong(over),), daemon=True)
        keeper.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(over.set)
            keeper.join()
            self._ask("resume", HTTPEngine.resume_memory)

    def pause(self) -> None:
        """Sleep for a moment; rollout runs in processes of its own."""
        time.sleep(POLL_S)

    def close(self) -> None:
        for engine in self._engines.values():
            self._loop.run_until_complete(engine.close())
        self._loop.close()

    def _ask(self, what: str, ask: Ask) -> None:
        with waiting(f"the servers to {what}", unblocks="clew serve"):
            self._loop.run_until_complete(self._ask_everywhere(what, ask))

    async def _prolong(self, over: asyncio.Event) -> None:
        """Keep the servers paused until `over` is set."""
        while True:
            try:
                await asyncio.wait_for(over.wait(), self._lease_s / 3)
                return
            except TimeoutError:
                await self._ask_everywhere("pause", lambda engine: engine.pause(self._lease_s))

    async def _ask_everywhere(self, what: str, ask: Ask) -> None:
        """Ask every server that is ready.

        A server that is not ready is starting, or was taken out. It may not even listen yet, and needs no call: before
        it serves it registers as ready and then looks for the newest weights, which are announced by now.
        """
        servers = attached_servers() or [server for server in self._run.servers() if server.ready]
        outcomes = await asyncio.gather(*(self._ask_one(server, ask) for server in servers), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for server, outcome in zip(servers, outcomes, strict=True):
            named = f"server {server.name} ({server.address})"
            if isinstance(outcome, EngineError) and len(refused) < len(servers):
                log.error("%s did not %s, and is taken out: %s", named, what, outcome)
                self._run.remove_server(server.name)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome:
                log.warning(
                    "%s did not %s, and is taken out until it has loaded the newest weights: %s", named, what, outcome
                )

    async def _ask_one(self, server: Server, ask: Ask) -> str:
        """Ask a server. Return why it did not do it, and was taken out; "" if it did.

        Raises:
            EngineError: It refused.
        """
        engine = self._engines.get((server.address, server.token))
        if engine is None:
            engine = self._engines[server.address, server.token] = HTTPEngine(server.address, server.token)
        asking = asyncio.ensure_future(ask(engine))
        freezing = asyncio.ensure_future(engine.frozen(self._frozen_s))
        try:
            await asyncio.wait({asking, freezing}, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
                return ""
            late = self._frozen_s if freezing.done() else ANSWER_TIMEOUT_S
            how = "it does not answer" if freezing.done() else "it has not done so"
            self._run.register_server(replace(server, ready=False))
            return f"{how} for {late:.0f} s"
        except EngineUnreachable as error:
            self._run.remove_server(server.name)
            return str(error)
        finally:
            asking.cancel()
            freezing.cancel()
            await asyncio.gather(asking, freezing, return_exceptions=True)
