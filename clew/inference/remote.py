"""A vLLM or SGLang server as `clew serve` serves it: started, watched, and checked after each update of its weights.

::

    rollout, trainer ──► clew serve ──► RemoteEngine ──► vLLM or SGLang, a child process on a port of its own

`clew serve` looks the same from outside whatever generates: the same `/generate`, leases, tokens and refusals. What is
special about an engine is in `vllm.py` and `sglang.py`.

An update closes a gate for new requests, aborts those in flight, and opens the gate when the new weights are loaded and
checked. So no request spans two versions, and every token's version is known without asking the engine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from clew.config import Config
from clew.errors import EngineError, ModelError, described
from clew.inference.backend import Backend, Launch
from clew.inference.checks import check_request, default_stop_ids
from clew.inference.protocol import Completion, EngineUnreachable, GenerateRequest
from clew.inference.server_process import AttachedServer, ServerProcess
from clew.inference.sglang import SGLangEngine
from clew.inference.vllm import VLLMEngine
from clew.models.architecture import context_in
from clew.models.folder import config_of
from clew.models.loading import load_tokenizer
from clew.models.vision import load_vision
from clew.record.run import RunDirectory
from clew.record.weights import WeightRef
from clew.waits import Reporter, waiting

log = logging.getLogger("clew.inference")

BACKENDS: dict[str, type[Any]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}

PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest allowed difference, in nats, between the probe's logprobs of trainer and engine, by model.dtype."""

POLL_S = 0.2
"""Seconds between two looks at a server that starts."""

HEALTH_S = 2.0
"""Seconds between two looks whether the server lives."""

FROZEN_S = 30.0
"""Seconds without an answer after which a server counts as frozen."""

ABORT_S = 60.0
"""Seconds in which all aborted requests must have come back."""


class RemoteCore:
    """The part of an engine that answers for its model; see `clew.inference.core.Core`."""

    def __init__(self, config: Config) -> None:
        """Read the model's configuration, its tokenizer and its image input.

        Raises:
            ModelError: They cannot be read.
        """
        from transformers import GenerationConfig

        path = config.model.path
        self.tokenizer: Any = load_tokenizer(path)
        self.vision = load_vision(path)
        model = config_of(path)
        if model is None:
            raise ModelError(f"Cannot read the configuration of the model in {path} (config.json).")
        self.vocab: int = model.get_text_config().vocab_size
        length, self._context_field = context_in(model)
        self.context: int = length or 2**40
        try:
            generation = GenerationConfig.from_pretrained(path, trust_remote_code=False)
        except OSError:
            generation = GenerationConfig.from_model_config(model)
        self.default_stop_ids = default_stop_ids(generation, self.tokenizer, self.vocab)
        self.version = 0
        self.broken: str | None = None
        """Reason why nothing is served; None if all is well."""
        self.waiting: set[GenerateRequest] = set()
        """Requests that wait for an update or a pause to end."""
        self.active: set[GenerateRequest] = set()
        """Requests that the server has."""
        self.generated_tokens = 0

    def check(self, request: GenerateRequest) -> None:
        """Raise an error for a request that can never be served; see `check_request`."""
        check_request(
            request,
            context=self.context,
            context_field=self._context_field,
            vocab=self.vocab,
            tokenizer=self.tokenizer,
            vision=self.vision,
        )

    def running(self) -> int:
        """Return the number of requests that the server has."""
        return len(self.active)

    def cache_bytes(self) -> int:
        """Return 0: the cache is the server's own."""
        return 0


class RemoteEngine:
    """Engine in a server process; it has the interface of `clew.inference.local.LocalEngine`."""

    def __init__(
        self, config: Config, core: RemoteCore, backend: Backend, launch: Launch | None = None, log_file: Path = Path()
    ) -> None:
        """Start the server; `start` waits for it.

        Args:
            config: The configuration.
            core: The part that answers for the model.
            backend: Client of the server.
            launch: How to start it; None: it runs already.
            log_file: File for its output.

        Raises:
            EngineError: There is no such program.
        """
        self.core = core
        self.failure: str | None = None
        """Reason why nothing is served until `restart`: the server is gone. Every call raises EngineError then."""
        self.released = False
        self.process = AttachedServer() if launch is None else ServerProcess(launch, log_file)
        self._launch = launch
        self._backend = backend
        self._tolerance = PROBE_TOLERANCE[config.model.dtype]
        self._gate = asyncio.Event()
        self._gate.set()
        self._lease: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    # protocol.Engine -------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        """See the protocol."""
        self._refuse_when_broken()
        self.core.check(request)
        self.core.waiting.add(request)
        try:
            while not self._gate.is_set():
                await self._gate.wait()
        finally:
            self.core.waiting.discard(request)
        self._refuse_when_broken()
        self.core.active.add(request)
        version = self.core.version  # no update begins before this request has ended
        try:
            completion = await self._backend.generate(request)
        finally:
            self.core.active.discard(request)
        self.core.generated_tokens += len(completion.output_ids)
        return replace(completion, versions=[version] * len(completion.output_ids))

    async def version(self) -> int:
        """See the protocol."""
        self._refuse_when_broken()
        return self.core.version

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all (None); their tokens so far are returned."""
        await self._backend.abort(request_id)

    def _refuse_when_broken(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)
        if self.core.broken:
            raise EngineUnreachable("here", self.core.broken)

    # Weights ---------------------------------------------------------------------------------------------------------

    async def load_weights(self, ref: WeightRef) -> None:
        """Abort all requests, load the weights, check that the server holds them, and serve again.

        Raises:
            EngineError: The weights were refused, or the server now holds or computes something else. It then serves
                nothing until a load succeeds.
        """
        async with self._changing:
            try:
                with waiting(f"weights of version {ref.version}", unblocks=self._backend.kind):
                    await self._closed()
                    await self._backend.pause()
                    await self._backend.load(ref)
                    await self._backend.resume()
                    await self._check_probe(ref)
            except BaseException as error:
                self.core.broken = f"loading version {ref.version} from {ref.path} failed: {described(error)}"
                raise
            else:
                self.core.version, self.core.broken = ref.version, None
            finally:
                self._open()

    async def _check_probe(self, ref: WeightRef) -> None:
        if len(ref.probe_ids) < 2:
            return
        logprob = await self._backend.score(ref.probe_ids)
        if not abs(logprob - ref.probe_logprob) <= self._tolerance:  # NaN too
            raise EngineError(
                f"{self._backend.kind} at {self._backend.address} answered that it loaded version {ref.version}, and "
                f"its tensors are the trainer's, but it gives the probe the logprob {logprob:.6f}, and the trainer "
                f"gave it {ref.probe_logprob:.6f} (tolerance {self._tolerance:g}). It computes from a copy of other "
                f"weights (a packed or tied lm_head, for example), or computes another model. It serves nothing now."
            )

    async def _closed(self) -> None:
        """Hold back new requests, and abort until none is in flight.

        One that is on its way to the server is aborted once it is there. A server that was paused first would keep it
        and complete it later, with other weights than its tokens are labelled with.
        """
        self._gate.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ABORT_S
        while self.core.active:
            await self._backend.abort()
            for _ in range(10):
                if self.core.active:
                    await asyncio.sleep(0.005)
            if loop.time() > deadline:
                raise EngineUnreachable("here", f"{len(self.core.active)} requests did not end when they were aborted")

    # Pause -----------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True while requests wait until `resume`, a load, or the end of the lease."""
        return self._lease is not None

    async def pause(self, lease_s: float) -> None:
        """Abort all requests and start none for lease_s seconds, or until `resume` or a load."""
        lease, self._lease = self._lease, asyncio.get_running_loop().call_later(lease_s, self._open)
        if lease is None:
            await self._closed()
        else:
            lease.cancel()

    async def resume(self) -> None:
        """End a pause."""
        self._open()

    def _open(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        self._gate.set()

    async def release_memory(self, lease_s: float | None = None) -> None:
        """Raise EngineError: the memory is the server's own."""
        raise EngineError(
            f"{self._backend.kind} does not lend its memory to the trainer. Unset launch.colocate, and give each its "
            f"own devices."
        )

    async def resume_memory(self) -> None:
        """Do nothing: no memory was released."""

    # The process -----------------------------------------------------------------------------------------------------

    async def start(self, reporter: Reporter) -> None:
        """Wait until the server is up, and find out what it can do.

        Raises:
            EngineError: It ended, or cannot be trained with.
        """
        backend, kind = self._backend, self._backend.kind
        reporter.set(engine=kind, engine_command=[] if self._launch is None else self._launch.command)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with waiting(f"{kind} to start", unblocks=kind, numbers=lambda: f"its log: {self.process.log}"):
            while not await self._is_ready(refuse=isinstance(self.process, AttachedServer)):
                if ended := self.process.ended():
                    raise EngineError(f"{kind} did not start: it {ended}")
                reporter.set(doing=f"waiting for {kind} to start ({loop.time() - began:.0f} s)")
                await asyncio.sleep(POLL_S)
        for lack in await backend.prepare():
            log.warning("%s", lack)
        if backend.context is not None:
            self.core.context = min(self.core.context, backend.context)
        log.info("%s started in %.1f s at %s", kind, loop.time() - began, backend.address)
        self._watch = loop.create_task(self._keep_watch())

    async def _is_ready(self, *, refuse: bool = False) -> bool:
        """Return whether the server answers. refuse: raise EngineError if it is no inference server."""
        try:
            return await asyncio.wait_for(self._backend.ready(), 2.0)
        except (EngineUnreachable, TimeoutError):
            return False
        except EngineError as error:
            if not refuse:
                return False
            raise EngineError(
                f"Cannot attach to {self._backend.address}: it is no {self._backend.kind} server. {error} Give the "
                f"host:port of the inference server."
            ) from None

    async def _keep_watch(self) -> None:
        """Set `failure` when the server has ended, or has not answered for FROZEN_S."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while self.failure is None:
            await asyncio.sleep(POLL_S)
            if ended := self.process.ended():
                self.failure = f"{self._backend.kind} at {self._backend.address} {ended}"
            elif loop.time() - answered > HEALTH_S:
                if await self._is_ready():
                    answered = loop.time()
                elif loop.time() - answered > FROZEN_S:
                    self.failure = (
                        f"{self._backend.kind} at {self._backend.address} has not answered for {FROZEN_S:.0f} s and "
                        f"is given up (its log: {self.process.log})"
                    )
                    await asyncio.to_thread(self.process.end)

    async def restart(self, reporter: Reporter) -> None:
        """Start the server anew, with the weights in model.path.

        Raises:
            EngineError: It did not start.
        """
        await asyncio.to_thread(self.process.end)
        if isinstance(self.process, ServerProcess):
            assert self._launch is not None
            self.process = ServerProcess(self._launch, self.process.log)
        self.failure, self.core.broken, self.core.version = None, None, 0
        await self.start(reporter)
        self._open()

    async def close(self) -> None:
        """End the server."""
        if self._watch is not None:
            self._watch.cancel()
        await self._backend.close()
        await asyncio.to_thread(self.process.end)


def start_remote(config: Config, run: RunDirectory, name: str = "server", attach: str = "") -> RemoteEngine:
    """Start the server that inference.backend names, or attach to one; `RemoteEngine.start` waits for it.

    Args:
        config: The configuration.
        run: The run directory.
        name: Name of this `clew serve`, such as server-1; its server then writes logs/vllm-1.log.
        attach: host:port of a server that runs already; "": start one.

    Raises:
        ConfigError: inference.args has an option that Clew sets itself.
        EngineError: There is no such program.
        ModelError: The model's configuration or tokenizer cannot be read.
    """
    core = RemoteCore(config)
    kind = BACKENDS[config.inference.backend]
    if attach:
        return RemoteEngine(config, core, kind.client(config, attach, core.vision))
    port = free_port()
    launch = kind.launch(config, port, run.path / "engine" / name)
    log.info("starting %s: %s", kind.kind, " ".join(launch.command))
    client = kind.client(config, f"127.0.0.1:{port}", core.vision)
    return RemoteEngine(
        config, core, client, launch, run.logs / f"{config.inference.backend}{name.removeprefix('server')}.log"
    )


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
