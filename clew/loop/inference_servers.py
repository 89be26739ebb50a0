"""The trainer's HTTP client for a run's inference servers: it has them load weights and release their memory."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from clew.errors import EngineError
from clew.inference.client import FROZEN_S, EngineUnreachable, HTTPEngine
from clew.inference.protocol import Timings
from clew.printing import few, sentence
from clew.record.run import RunDirectory, Server
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef
from clew.waits import waiting

log = logging.getLogger("clew.trainer")

Ask = Callable[[HTTPEngine], Awaitable[object]]

ANSWER_TIMEOUT_S = 120.0
"""Seconds in which a server must do what it was asked, such as load new weights. After that it is taken out, and loads
the newest weights before it comes back."""

POLL_S = 0.01
"""Seconds between checks for a batch or an evaluation."""

CONNECTS_S = 1.0
"""Seconds for which a broadcast is not called off after a server fails. By then the others have connected to the
trainer. A server that is just connecting when the broadcast is called off would keep trying in vain."""

WANTED_S = 1.0
"""Seconds between checks for servers that wait for a broadcast."""

LEASE_S = 60.0
"""Seconds without a word from the trainer after which a server that released its memory takes it back and serves."""

TAKEN_OUT = "%s did not %s, and is taken out until it has loaded the newest weights: %s"

NO_OTHER = (
    "No other server can take over. Read that server's log, restart the server if you started it yourself, and start "
    "the run again."
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The servers that were asked to take part in a broadcast; those that died or froze are in neither field."""

    received: list[Server]
    failed: dict[Server, str]
    """Servers that did not receive all of it, with the reason."""


class InferenceServers:
    """Client of inference servers in other processes (an `Inference`). It asks all of them at the same time."""

    def __init__(
        self, run: RunDirectory, lease_s: float = LEASE_S, frozen_s: float = FROZEN_S, *, patient: bool = False
    ) -> None:
        """Prepare to ask the servers of `run`.

        Args:
            lease_s: Seconds for which the servers release their memory; renewed after each third of it.
            frozen_s: Seconds without an answer after which a server counts as frozen.
            patient: True if servers finish what they generate before they load weights (inference.on_update: wait).
                There is no time limit then.
        """
        self._limit_s = None if patient else ANSWER_TIMEOUT_S
        self._frozen_s = frozen_s
        self._run = run
        self._lease_s = lease_s
        self._loop = asyncio.new_event_loop()
        self._engines: dict[tuple[str, str], HTTPEngine] = {}
        self._looks_again = 0.0
        for server in run.inference_servers():
            fresh = replace(server, ready=True, wants_weights=False, given_up="")
            if server.attached and server != fresh:  # an earlier trainer took it out
                run.register_server(fresh)

    def load(self, ref: WeightRef, servers: list[Server] | None = None) -> Timings:
        """Have the servers load and serve these weights. Return the timings of the one that paused longest.

        Args:
            servers: Those that have received the weights in a broadcast; None: all that are ready.
        """
        taken: list[Timings] = [{}]

        async def load(engine: HTTPEngine) -> None:
            taken.append(await engine.load_weights(ref))

        servers = self.ready() if servers is None else servers
        try:
            self._ask(f"load version {ref.version}", load, servers)
        except EngineError as error:
            raise EngineError(f"{sentence(str(error))} {NO_OTHER}") from error
        served = {server.name for server in servers}
        for server in self.ready():  # those that died meanwhile are not listed any more
            if server.name in served and (server.wants_weights or server.attached):
                loads = {"loaded": ref.version, "loads": server.loads + 1} if server.attached else {}
                self._run.register_server(replace(server, wants_weights=False, **loads))
        return max(taken, key=lambda seconds: sum(seconds.values()))

    def ready(self) -> list[Server]:
        """Return the servers that are ready, or that will be as soon as they have the newest weights."""
        return [server for server in self._run.inference_servers() if server.ready]

    def serves_without(self, servers: list[Server]) -> bool:
        """Return whether the run has a server that serves, besides these."""
        names = {server.name for server in servers}
        return any(not server.wants_weights and server.name not in names for server in self.ready())

    def wanted(self) -> bool:
        """Return whether a server waits for a broadcast of the newest weights. It looks at most once a second.

        This also brings back attached servers that were taken out and answer again. Weights that were not broadcast are
        loaded into them at once.
        """
        if time.monotonic() < self._looks_again:
            return False
        self._bring_back([server for server in self._run.inference_servers() if server.attached and not server.ready])
        self._looks_again = time.monotonic() + WANTED_S
        return any(server.wants_weights for server in self.ready())

    def _bring_back(self, taken_out: list[Server]) -> None:
        """Have attached servers load the newest weights: they do not know this run, and cannot look for them."""
        newest = self._run.newest_weights()
        if newest is None:
            return
        for server in self._loop.run_until_complete(self._answering([s for s in taken_out if not s.given_up])):
            asking = replace(server, ready=True, wants_weights=True)
            self._run.register_server(asking)
            if not newest.was_broadcast():
                self.load(newest, [asking])

    async def _answering(self, servers: list[Server]) -> list[Server]:
        answers = await asyncio.gather(*(self._engine(server).answers(WANTED_S / 2) for server in servers))
        return [server for server, answer in zip(servers, answers, strict=True) if answer]

    @contextmanager
    def receiving(self, sent: dict[Server, Broadcast], on_failure: Callable[[], object]) -> Iterator[Outcome]:
        """Have servers receive the broadcast that the block sends. The yielded outcome is complete after the block.

        Args:
            on_failure: Called soon after a server fails, dies or freezes, in another thread.
        """
        outcome, unanswered = Outcome(received=[], failed={}), set(sent)
        over = asyncio.Event()

        async def ask(server: Server) -> None:
            def receive(engine: HTTPEngine) -> Awaitable[object]:
                return engine.receive_weights(sent[server])

            try:  # the broadcast itself takes as long as the slowest link does
                if await self._ask_one(server, "receive the weights", receive, limit_s=ANSWER_TIMEOUT_S, after=over):
                    outcome.received.append(server)
                    return
            except EngineError as error:
                outcome.failed[server] = str(error)
            finally:
                unanswered.discard(server)
            if unanswered:
                await asyncio.sleep(CONNECTS_S)
            on_failure()

        async def ask_all() -> None:
            await asyncio.gather(*map(ask, sent))

        asking = threading.Thread(target=self._loop.run_until_complete, args=(ask_all(),), daemon=True)
        asking.start()
        try:
            yield outcome
        finally:
            self._loop.call_soon_threadsafe(over.set)
            with waiting(
                "the servers to have received the weights",
                unblocks="clew serve",
                numbers=lambda: f"no answer yet of {few(sorted(map(str, unanswered)))}",
            ):
                asking.join()

    def take_out(self, server: Server, what: str, reason: object) -> None:
        """Take out a server until it has loaded the newest weights; give up one that was already waiting for them."""
        if server.wants_weights:
            log.error("%s did not %s, and is given up: %s", server, what, reason)
            self._run.register_server(replace(server, ready=False, wants_weights=False, given_up=str(reason)))
        else:
            log.error(TAKEN_OUT, server, what, reason)
            self._remove(server)

    def _remove(self, server: Server) -> None:
        """Take a server out of the run's list, where it puts itself again; an attached one is marked as not ready."""
        if server.attached:
            self._run.register_server(replace(server, ready=False, wants_weights=False))
        else:
            self._run.remove_server(server.name)

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

    def let_rollout_run(self) -> None:
        """Sleep for the time between two looks for a batch: rollout runs in processes of its own."""
        time.sleep(POLL_S)

    def close(self) -> None:
        for engine in self._engines.values():
            self._loop.run_until_complete(engine.close())
        self._loop.close()

    def _ask(self, what: str, ask: Ask, servers: list[Server] | None = None) -> None:
        with waiting(f"the servers to {what}", unblocks="clew serve"):
            self._loop.run_until_complete(self._ask_everywhere(what, ask, servers))

    async def _prolong(self, over: asyncio.Event) -> None:
        """Keep the servers paused until `over` is set."""
        while True:
            try:
                await asyncio.wait_for(over.wait(), self._lease_s / 3)
                return
            except TimeoutError:
                try:
                    await self._ask_everywhere("pause", lambda engine: engine.pause(self._lease_s))
                except EngineError as error:
                    log.warning("Cannot keep the servers paused: %s Trying again in %g s.", error, self._lease_s / 3)

    async def _ask_everywhere(self, what: str, ask: Ask, servers: list[Server] | None = None) -> None:
        """Ask these servers, or every one that is ready.

        A server that is not ready is starting, or was taken out. It may not even listen yet, and needs no call: before
        it serves it registers as ready and then looks for the newest weights, which are announced by now.
        """
        servers = self.ready() if servers is None else servers
        asked = (self._ask_one(server, what, ask, limit_s=self._limit_s) for server in servers)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        goes_on = len(refused) < len(servers) or self.serves_without(servers)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, EngineError) and goes_on:
                self.take_out(server, what, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _ask_one(
        self, server: Server, what: str, ask: Ask, *, limit_s: float | None, after: asyncio.Event | None = None
    ) -> bool:
        """Ask a server, and return whether it did what was asked. One that died or froze is taken out.

        Args:
            limit_s: Maximum seconds; None: as long as the server says that it lives.
            after: Event from which the seconds count; None: they count at once.

        Raises:
            EngineError: It refused.
        """
        engine = self._engine(server)
        asking = asyncio.ensure_future(ask(engine))
        freezing = asyncio.ensure_future(engine.frozen(self._frozen_s))
        tasks: set[asyncio.Future[Any]] = {asking, freezing}
        try:
            if after is not None:
                tasks.add(beginning := asyncio.ensure_future(after.wait()))
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks.remove(beginning)
                beginning.cancel()
            if not asking.done() and not freezing.done():
                await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
                return True
            since = "" if after is None else " after the broadcast"
            reason = f"it did not finish within {ANSWER_TIMEOUT_S:.0f} s{since}"
            if freezing.done():
                reason = f"it has not answered for {self._frozen_s:.0f} s"
            self._run.register_server(replace(server, ready=False, wants_weights=False))
        except EngineUnreachable as error:
            self._remove(server)
            reason = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not (server.attached and server.wants_weights):  # such a one is asked again each second
            log.warning(TAKEN_OUT, server, what, reason)
        return False

    def _engine(self, server: Server) -> HTTPEngine:
        engine = self._engines.get((server.address, server.token))
        if engine is None:
            engine = self._engines[server.address, server.token] = HTTPEngine(server.address, server.token)
        return engine
