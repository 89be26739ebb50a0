"""Asynchronous interface of an engine in this process: `protocol.Engine` over `clew.inference.engine_core.Core`.

One class can drive the engine in two ways. Inline, a task on the running event loop steps the engine on the loop's own
thread, between everything else that the loop does: this is deterministic, and a breakpoint stops everything. In a
thread, the loop stays free to talk to clients while the engine computes.

::

    the loop's thread      methods of `protocol.Engine`       _settle_all, _fail_all: the futures of requests
                                   │ _on_engine                    ▲ _on_loop
    the engine's thread            └──────► core: submit, step ────┘

Inline, the two threads are one. A request waits in the core's queue while the engine is paused, or its memory is
released: nothing steps then. Only while an engine that `waits` is updated, it waits before it reaches the core.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from clew.config import Config
from clew.errors import EngineError
from clew.inference.embedded import build_engine
from clew.inference.engine_core import Core, Finished
from clew.inference.loading import weights_of
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest, Timings, UpdateTimer
from clew.inference.weight_group import MemberLost, joined, receive_buckets
from clew.models.loading import check_vocabulary, load_model, load_tokenizer, pick_device
from clew.models.vision import load_vision
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef
from clew.waits import waiting

log = logging.getLogger("clew.inference")


class LocalEngine:
    """Engine in this process. Use it from one event loop; `close` ends its thread, if there is one."""

    def __init__(self, core: Core, *, threaded: bool = False, gather_s: float = 0.0, waits: bool = False) -> None:
        """Create the engine around `core`, which has the model.

        Args:
            threaded: True if the engine runs in a thread of its own.
            gather_s: Seconds without a further request after which an idle engine begins. A burst of requests is then
                computed side by side from its first token on.
            waits: True to load new weights only after all running generations have ended.
        """
        self.core = core
        self.threaded = threaded
        self.gather_s = gather_s
        self._waits = waits
        self._gate = asyncio.Event()
        """Cleared while new requests wait for an update to end."""
        self._gate.set()
        self.failure: str | None = None
        """Reason why this process serves nothing any more, such as a failed step: every call raises EngineError."""
        self._futures: dict[GenerateRequest, asyncio.Future[Completion]] = {}
        self._has_missed = False
        """True from when the trainer begins to broadcast weights until weights are loaded."""
        self._digest: str | None = None
        """Digest of the weights that were loaded last; None: it has those that it started with."""
        self.released = False
        """True from `release_memory` until `resume_memory`, or until its lease or a pause ends. Requests wait."""
        self._pause_lease: asyncio.TimerHandle | None = None
        self._release_lease: asyncio.TimerHandle | None = None
        # Inline, a task steps the engine while there is work; otherwise a thread does, which the first call starts.
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False

    # protocol.Engine -------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        self._refuse_when_broken()
        self.core.check(request)  # on this thread: a refusal is raised at once
        while not self._gate.is_set():  # a loop, as it may have been closed again before this task runs
            await self._gate.wait()
        loop = asyncio.get_running_loop()
        if (listener := request.on_token) is not None:
            # The loop calls the listener, so that an error in it does not count as a failed step of the engine.
            soon = loop.call_soon_threadsafe if self.threaded else loop.call_soon
            request = replace(request, on_token=lambda token, logprob: soon(listener, token, logprob))
        future = loop.create_future()
        self._futures[request] = future
        self._on_engine(lambda: self._submit(request))
        try:
            return await future
        except asyncio.CancelledError:
            if self.failure is None:
                self._on_engine(lambda: self._run_core("an abort", lambda: self.core.abort(request)))
            raise
        finally:
            del self._futures[request]

    def holds(self, ref: WeightRef) -> bool:
        """Return whether it serves these weights, and has missed no newer ones that the trainer broadcast."""
        return self.core.version == ref.version and self._digest in (None, ref.digest) and not self._has_missed

    async def load_weights(self, ref: WeightRef) -> Timings:
        """Abort all requests, load the weights in place, score the probe, and resume. Return the parts' seconds.

        A load that is refused leaves everything as it was, including requests in flight. A load that fails later, or
        whose probe differs, has aborted the requests in flight; the old weights are still served.

        If the engine `waits`, queued requests are returned as aborted, even if the load is then refused. Requests in
        flight end before the load, and new ones wait until after it.
        """
        clock = UpdateTimer()

        def load() -> None:
            weights = weights_of(self.core.model, ref, self.core.pending_weights)  # refuses before anything is aborted
            with clock("abort"):
                self._deliver(self.core.abort())
            self.core.load_weights(ref, clock, weights)

        with waiting(f"weights of version {ref.version}", unblocks="the inference engine"):
            try:
                if self._waits:
                    self._gate.clear()
                    await self._drain()
                await self._call_engine(load)
            finally:
                self._gate.set()
        self._has_missed, self._digest = False, ref.digest
        self._resume()
        return clock.seconds

    async def receive_weights(self, sent: Broadcast) -> Timings:
        """Receive the trainer's broadcast, and keep it for `load_weights`. The engine keeps serving meanwhile."""
        clock, self._has_missed = UpdateTimer(), True

        def receive() -> dict[str, torch.Tensor]:
            tensors: dict[str, torch.Tensor] = {}
            with joined(sent, 0) as group:
                for bucket in receive_buckets(sent, group, self.core.device):
                    tensors |= bucket
            return tensors

        with clock("receive"):
            try:
                self.core.pending_weights = sent.version, await asyncio.to_thread(receive)
            except MemberLost as error:
                raise EngineError(f"version {sent.version} was not received: {error}") from error
        return clock.seconds

    async def _drain(self) -> None:
        """Abort the queued requests, and wait until those that are being generated have ended."""
        await self._call_engine(lambda: self._deliver(self.core.abort_waiting()))
        with waiting(
            "generations in flight to end",
            unblocks="the inference engine",
            numbers=lambda: f"{self.core.running()} running",
        ):
            while self.core.running() and not self.paused and self.failure is None:
                if in_flight := list(self._futures.values()):
                    await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)  # lets their callers remove them from `_futures`

    async def abort(self, request_id: str | None = None) -> None:
        await self._call_engine(lambda: self._deliver(self.core.abort(request_id)))

    async def version(self) -> int:
        self._refuse_when_broken()
        return self.core.version

    def _refuse_when_broken(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)
        if self.core.broken:
            raise EngineUnreachable("", self.core.broken)

    # Pause -----------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True while requests wait until `resume`, a load, or the end of the lease."""
        return self._pause_lease is not None

    async def pause(self, lease_s: float) -> None:
        """Abort all requests; start none for lease_s seconds, or until `resume` or a load. Call it again to renew."""
        earlier, self._pause_lease = self._pause_lease, asyncio.get_running_loop().call_later(lease_s, self._resume)
        if earlier is None:
            await self.abort()
        else:
            earlier.cancel()

    async def resume(self) -> None:
        self._resume()

    def _resume(self) -> None:
        """End a pause, and the release of memory in it."""
        if self._pause_lease is not None:
            self._pause_lease.cancel()
            self._pause_lease = None
        self._end_release()

    async def release_memory(self, lease_s: float | None = None) -> None:
        """Abort all running requests, and give the cache's memory back to the device.

        No request starts until `resume_memory`, or until a pause ends. Outside a pause, this lasts at most lease_s
        seconds (None: no limit).
        """
        self.released = True
        if self._release_lease is not None:
            self._release_lease.cancel()
        if lease_s is not None:
            self._release_lease = asyncio.get_running_loop().call_later(lease_s, self._release_expired)
        await self._call_engine(lambda: self._deliver(self.core.release_memory()))

    async def resume_memory(self) -> None:
        """Serve again, unless there is a pause. The memory is taken as requests need it."""
        self._end_release()

    def _release_expired(self) -> None:
        if not self.paused:  # the end of the pause ends the release, too
            self._end_release()

    def _end_release(self) -> None:
        if self._release_lease is not None:
            self._release_lease.cancel()
            self._release_lease = None
        self.released = False
        self._on_engine(lambda: None)  # starts the requests that waited

    # From the loop's thread to the engine's --------------------------------------------------------------------------

    def _on_engine(self, call: Callable[[], None]) -> None:
        """Run `call` between two steps, and make sure that the engine is driven."""
        if not self.threaded:
            call()
            if self._may_step() and (self._task is None or self._task.done()):
                self._task = asyncio.get_running_loop().create_task(self._drive())
            return
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._drive_thread, name="engine", daemon=True)
            self._thread.start()
        self._calls.append(call)
        self._wake.set()

    async def _call_engine(self, call: Callable[[], None]) -> None:
        """Run `call` between two steps and wait for it.

        Raises:
            EngineError: `call` raised it, or the engine has stopped.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            outcome = None
            try:
                if self.failure is not None:
                    raise EngineError(self.failure)
                call()
            except EngineError as error:
                outcome = error
            except Exception as error:
                outcome = EngineError(self._stop("an abort or a load", error))
            self._on_loop(_settle, done, outcome)

        self._on_engine(run)
        await done

    # On the engine's thread ------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        seen = 0
        while self.gather_s and len(self.core.waiting) > seen:  # a burst is still coming in
            seen = len(self.core.waiting)
            await asyncio.sleep(self.gather_s)
        while self._may_step():
            self._run_core("a step", self.core.step)
            await asyncio.sleep(0)

    def _drive_thread(self) -> None:
        while not self._closing:
            self._wake.clear()  # before the calls are taken: one that comes later wakes the thread again
            while self._calls:
                self._calls.popleft()()
            if self._may_step():
                self._run_core("a step", self.core.step)
            else:
                self._wake.wait()

    def _may_step(self) -> bool:
        return self.core.has_work and not (self.paused or self.released) and self.failure is None

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self.core.submit(request)
        except EngineError as error:
            self._deliver([(request, error)])

    def _run_core(self, what: str, call: Callable[[], list[Finished]]) -> None:
        """Deliver the outcomes that `call` returns. If it raises, stop the engine with an error that names `what`."""
        try:
            finished = call()
        except Exception as error:
            self._stop(what, error)
        else:
            self._deliver(finished)

    def _stop(self, what: str, error: Exception) -> str:
        """Set `failure`, and return it: an error in the engine may have left anything behind, such as half a batch."""
        # Out of memory, a failed kernel, a mistake in the engine: nobody may wait forever.
        log.exception("%s of the inference engine failed", what)
        self.core.broken = f"{what} failed with {type(error).__name__}: {error}"
        self.failure = f"the inference engine stopped: {self.core.broken}"
        self._on_loop(self._fail_all, self.failure)
        return self.failure

    def _deliver(self, outcomes: Sequence[tuple[GenerateRequest, Completion | EngineError]]) -> None:
        if outcomes:
            self._on_loop(self._settle_all, outcomes)

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call` on the loop's thread."""
        if self.threaded:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(call, *arguments)
        else:
            call(*arguments)

    # Back on the loop's thread ---------------------------------------------------------------------------------------

    def _settle_all(self, outcomes: Sequence[tuple[GenerateRequest, Completion | EngineError]]) -> None:
        for request, outcome in outcomes:
            if request in self._futures:
                _settle(self._futures[request], outcome)

    def _fail_all(self, failure: str) -> None:
        for future in self._futures.values():
            _settle(future, EngineError(failure))

    async def close(self) -> None:
        if self.failure is None:
            await self.abort()
        self._resume()
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()


def _settle(future: asyncio.Future[Any], outcome: Completion | EngineError | None) -> None:
    if future.done():  # its caller has been cancelled
        return
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def load_engine(config: Config, *, gather_s: float = 0.0, max_running: int | None = None) -> LocalEngine:
    """Load the embedded engine (or the slow reference, for models that need it) with the configuration's model.

    On CUDA it has a thread of its own, so that the loop can talk to clients meanwhile, except if launch.mode is inline.

    Args:
        gather_s: See `LocalEngine`.
        max_running: Used in place of inference.max_running; None: use that.
    """
    torch.set_num_threads(config.threads)
    device = pick_device(config.model.device)
    tokenizer = load_tokenizer(config.model.path)
    model = load_model(config.model.path, config.model.dtype, device)
    check_vocabulary(model, tokenizer, config.model.path)
    max_running = max_running or config.inference.max_running
    cache_gib = config.inference.cache_gib
    core = build_engine(model, tokenizer, load_vision(config.model.path), max_running=max_running, cache_gib=cache_gib)
    threaded = device.type == "cuda" and config.launch.mode != "inline"
    waits = config.inference.on_update == "wait"
    return LocalEngine(core, threaded=threaded, gather_s=gather_s, waits=waits)
