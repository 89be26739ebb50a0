"""A vLLM or SGLang server as `clew serve` serves it: started, watched, and checked after each update of its weights.

::

    rollout, trainer ──► clew serve ──► RemoteEngine ──► vLLM or SGLang, a child process on a port of its own

`clew serve` looks the same from outside, whichever engine generates: the same `/generate`, leases, tokens and refusals.
`vllm.py` and `sglang.py` have what is special about each engine.

An update closes a gate for new requests, aborts those in flight (or lets them end, inference.on_update=wait), and opens
the gate when the new weights are loaded and checked. So no request spans two versions, and every token's version is
known without asking the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from clew.config import Config, server_token
from clew.errors import EngineError, ModelError, described
from clew.inference.backend import Backend, Launch, leaves
from clew.inference.client import FROZEN_S, HEALTH_S
from clew.inference.detect_server import BACKENDS
from clew.inference.protocol import (
    Completion,
    EngineUnreachable,
    FaultyAnswer,
    GenerateRequest,
    Timings,
    UpdateTimer,
)
from clew.inference.remote_tokens import cut_at_end, drawn, tells_until_stop
from clew.inference.request_checks import PROBE_TOLERANCE, ServedModel
from clew.inference.server_process import AttachedServer, ServerProcess
from clew.models.loading import load_tokenizer
from clew.models.model_folder import config_of
from clew.models.vision import load_vision
from clew.printing import counted
from clew.processes import free_port
from clew.record.files import write_json
from clew.record.run import RunDirectory
from clew.record.weight_broadcast import Broadcast
from clew.record.weights import WeightRef
from clew.waits import Reporter, waiting

log = logging.getLogger("clew.inference")

POLL_S = 0.2
"""Seconds between two checks of a server that is starting."""

NO_ANSWER = "no answer in 2 s"

UPDATE_S = 600.0
"""Seconds within which a server must show what it can do, and do each part of its first update, such as loading the
weights or answering the probe. After that it is given up, even if it still answers: its workers may be frozen."""

SLOWER = 20.0
"""Multiple of its longest time so far that a part of an update may take. It may always take `frozen_s`."""

UNCHECKED_S = 60.0
"""Seconds after a broadcast within which the trainer must ask for its weights to be checked."""

ABORT_S = 60.0
"""Seconds within which all aborted requests must come back. After that the server is given up."""

DYING_S = 5.0
"""Seconds to wait, after the first request failed, for a server that Clew started to end. How it ended says why."""

RESTARTED = "the server is started again, and has not loaded the newest weights"

NO_TORCHVISION = (
    "torchvision is not installed here, and %s uses it: images that must be resized may get other logprobs there than "
    "in training. Install torchvision beside Clew."
)


class RemoteCore(ServedModel):
    """Model and requests of a `RemoteEngine`. Other engines have `clew.inference.engine_core.Core` for this."""

    def __init__(self, config: Config) -> None:
        """Read the model's configuration, its tokenizer and its image input.

        Raises:
            ModelError: They cannot be read.
        """
        from transformers import GenerationConfig

        path = config.model.path
        tokenizer, vision, model = load_tokenizer(path), load_vision(path), config_of(path)
        if model is None:
            raise ModelError(f"Cannot read the configuration of the model in {path} (config.json).")
        try:
            generation = GenerationConfig.from_pretrained(path, trust_remote_code=False)
        except OSError:
            generation = GenerationConfig.from_model_config(model)
        super().__init__(model, generation, tokenizer, vision, model.get_text_config().vocab_size)
        if vision is not None and find_spec("torchvision") is None:
            log.warning(NO_TORCHVISION, config.inference.backend)
        self.waiting: set[GenerateRequest] = set()
        """Requests that wait for an update or a pause to end."""
        self.active: set[GenerateRequest] = set()
        """Requests that the server has."""

    def running(self) -> int:
        return len(self.active)

    def cache_bytes(self) -> int:
        return 0  # the cache is the server's own


class RemoteEngine:
    """Engine in a server process; it has the interface of `clew.inference.local.LocalEngine`."""

    def __init__(
        self,
        config: Config,
        core: RemoteCore,
        backend: Backend,
        launch: Launch | None = None,
        log_file: Path = Path(),
        frozen_s: float = FROZEN_S,
        options_file: Path | None = None,
    ) -> None:
        """Start the server process; `start` waits until it is up.

        Args:
            launch: Command that starts the server; None: `backend` is the client of one that runs already.
            log_file: File that the server's output goes to.
            frozen_s: Seconds without an answer after which the server counts as frozen.
            options_file: File to write the options to that the server runs with; None: do not write them.
        """
        self.core = core
        self._frozen_s = frozen_s
        self._options_file = options_file
        self._chosen = config.inference.args
        self.failure: str | None = None
        """Reason why nothing is served until `restart`: the server is gone. Requests raise EngineUnreachable then."""
        self.released = False
        self.process = AttachedServer() if launch is None else ServerProcess(launch, log_file)
        self._launch = launch
        self._backend = backend
        self._named = f"{backend.kind} at {backend.address}"
        """Name of the server in messages."""
        backend.vocab = core.vocab
        self._waits = config.inference.on_update == "wait"
        self._tolerance = PROBE_TOLERANCE[config.model.dtype]
        self._gate = asyncio.Event()
        self._gate.set()
        self._lease: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()
        self.unchecked_version: int | None = None
        """Version that the trainer has broadcast and that is not checked yet; None if there is none."""
        self._watch: asyncio.Task[None] | None = None
        self._question: tuple[asyncio.Task[bool], bool] | None = None
        """Task that asks whether the server lives, until it is answered, and True if it was asked during an update."""
        self._loaded: WeightRef | None = None
        """Weights that the server was given last; None: it has those that it started with."""
        self._identity, self._was_away = "", False
        self._asking: asyncio.Task[bool] | None = None
        """Task that asks which process answers. All requests share it, see `_refuse_another`."""
        self._has_paused = False
        """True from when an update pauses the server until it has resumed it."""
        self._longest_s: dict[str, float] = {}
        """Longest time of each part of an update, in seconds, by the words for it (`doing` of `_limited`)."""

    # protocol.Engine -------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        self._refuse_when_broken()
        self.core.check(request)
        self.core.waiting.add(request)
        try:
            while not self._gate.is_set():  # a loop: the gate may be closed again before this task runs
                await self._gate.wait()
        finally:
            self.core.waiting.discard(request)
        self._refuse_when_broken()
        self.core.active.add(request)
        version = self.core.version  # no update begins before this request has ended
        label = None if self._loaded is None else str(self._loaded.version)
        # The server is told where completions end: for a model without an end token, Clew takes the pad token, and the
        # server would not stop there.
        ends = request.params.stop_ids(self.core.default_stop_ids)
        asked = replace(
            request, params=replace(request.params, stop_token_ids=ends), on_token=tells_until_stop(request, self.core)
        )
        try:
            await self._refuse_another()
            completion = await drawn(self._backend, asked, self.core.vision)
        except EngineUnreachable as error:  # perhaps only because the server was given up: then show why
            self._was_away = True
            if self.failure is None:
                raise
            raise EngineUnreachable("", self.failure) from error
        finally:
            self.core.active.discard(request)
        self._refuse_other_label(completion, label)
        self.core.generated_tokens += len(completion.output_ids)
        completion = replace(completion, versions=[version] * len(completion.output_ids))
        return cut_at_end(request, completion, self.core)

    def _refuse_other_label(self, completion: Completion, label: str | None) -> None:
        """Set `failure` if the server says that it made the tokens with other weights than it was given.

        Raises:
            EngineUnreachable: It says so.
        """
        said = {span["version"] for span in completion.sampled_by or [] if span["version"] is not None} - {label}
        if label is not None and said and self._backend.labels:
            self.failure = (
                f"{self._named} serves weights that it calls {min(said)!r}, and was given version {label}. Somebody "
                f"has restarted it, or loads weights into it, too, or a proxy has lost a call of the update"
            )
            raise EngineUnreachable("", self.failure)

    async def _refuse_another(self) -> None:
        """Set `failure` if the server was away and, since then, another process answers at its address.

        An answer through vLLM's /v1/completions does not name the weights, so nothing else would show a quick restart.

        Raises:
            EngineUnreachable: Another process answers, nothing does, or the answer does not say which process it is.
        """
        if not self._was_away:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._is_same())
        if not await asyncio.shield(self._asking):
            self.failure = (
                f"{self._named} is another process than before, and has lost version {self.core.version}. Somebody has "
                f"restarted it"
            )
            raise EngineUnreachable("", self.failure)
        self._was_away = False

    async def _is_same(self) -> bool:
        """Return whether the process that Clew attached to still answers; True if it had no identity to begin with.

        Raises:
            EngineUnreachable: Nothing answers, or the answer does not say which process it is.
        """
        try:
            return not self._identity or await asyncio.wait_for(self._backend.identity(), HEALTH_S) == self._identity
        except EngineUnreachable:
            raise
        except (EngineError, TimeoutError) as error:
            reason = f"it does not say which process it is ({described(error)})"
            raise EngineUnreachable(self._backend.address, reason) from None

    def holds(self, ref: WeightRef) -> bool:
        """Return whether the server has these weights; False if nobody knows: before a load, or after a failed one."""
        if self._loaded is None or self.core.broken is not None or self.unchecked_version is not None:
            return False
        return (self._loaded.version, self._loaded.digest) == (ref.version, ref.digest)

    @property
    def attached(self) -> bool:
        """True if somebody else started the server. Clew then leaves it running."""
        return isinstance(self.process, AttachedServer)

    async def version(self) -> int:
        self._refuse_when_broken()
        return self.core.version

    async def abort(self, request_id: str | None = None) -> None:
        # Without active requests, there is nothing to abort, and an older vLLM, which aborts by pausing and resuming,
        # would end the pause of an update.
        if self.core.active:
            await self._backend.abort(request_id)

    def _refuse_when_broken(self) -> None:
        if reason := self.failure or self.core.broken:  # a server that is given up may be started again
            raise EngineUnreachable("", reason)

    # Weights ---------------------------------------------------------------------------------------------------------

    async def load_weights(self, ref: WeightRef) -> Timings:
        """End all requests (see `_updating`), load the weights, check that the server holds them, and serve again.

        Raises:
            EngineError: The weights were refused before they were sent, and the server serves the old ones; or it now
                holds or computes something else, and serves nothing until a load succeeds.
            EngineUnreachable: The server died or froze meanwhile.
        """
        try:
            return await self._load_weights(ref)
        except FaultyAnswer as error:  # such as an answer that is not JSON; one more try
            log.warning("%s; loading version %d again", str(error).rstrip("."), ref.version)
            return await self._load_weights(ref)

    async def _load_weights(self, ref: WeightRef) -> Timings:
        if ref.was_broadcast() and self.unchecked_version != ref.version:
            if self.holds(ref):
                return {}  # it was asked before, and serves them
            raise EngineError(f"version {ref.version} was broadcast (weights.via), and this server did not get it.")
        if not ref.was_broadcast():
            await self._backend.check(ref)  # what is refused here leaves the old weights serving
        async with self._updating(ref.version) as clock:
            with clock("load"):
                async with self._limited("load version %d", ref.version):
                    await self._backend.load(ref)
            with clock("verify"):
                async with self._limited("show that it holds version %d", ref.version):
                    await self._backend.verify(ref)
                async with self._limited("resume with version %d", ref.version):
                    await self._backend.resume()
                    self._has_paused = False
                async with self._limited("answer the probe of version %d, a generation,", ref.version):
                    await self._check_probe(ref)
            self.core.version, self.core.broken, self.unchecked_version = ref.version, None, None
            self._loaded = ref
            self._open()
        return clock.seconds

    async def receive_weights(self, sent: Broadcast) -> Timings:
        """End all requests, and load weights that the trainer broadcasts. Nothing is served until `load_weights`."""
        async with self._updating(sent.version) as clock:
            self.unchecked_version = None
            with clock("receive"):
                async with self._limited("receive version %d", sent.version, alone=False):
                    await self._backend.receive(sent)
            self.unchecked_version = sent.version
            if self._lease is not None:
                self._lease.cancel()
            self._lease = asyncio.get_running_loop().call_later(UNCHECKED_S, self._end_pause)
        return clock.seconds

    @asynccontextmanager
    async def _updating(self, version: int) -> AsyncIterator[UpdateTimer]:
        """End all requests (inference.on_update), and hold new ones back during the block, and after it until `_open`.

        If the block fails, nothing is served until a load succeeds.
        """
        async with self._changing:
            clock = UpdateTimer()
            try:
                with waiting(f"weights of version {version}", unblocks=self._named):
                    if self._waits and not self.paused:
                        await self._wait_for_requests()
                    with clock("abort"):
                        await self._abort_all()
                        async with self._limited("pause for version %d", version):
                            self._has_paused = True
                            await self._backend.pause()
                    yield clock
            except BaseException as error:
                self.core.broken = f"loading version {version} failed: {described(error)}"
                # A server that was given up, or that does not answer, has not refused the weights: it is unreachable.
                dying = self.failure is not None or (isinstance(error, EngineError) and not await self._answers())
                self._open()
                if dying and isinstance(error, Exception):
                    raise EngineUnreachable("", self.failure or str(error)) from error
                raise

    @asynccontextmanager
    async def _limited(self, doing: str, version: int, *, alone: bool = True) -> AsyncIterator[None]:
        """Give the server up if the block, a part of an update, takes much longer than it ever did before.

        Args:
            doing: Words for the block, with %d in place of the version.
            alone: False if the server also waits for others there; the limit is then always `UPDATE_S`.

        Raises:
            EngineUnreachable: It was given up.
        """
        loop, longest = asyncio.get_running_loop(), self._longest_s.get(doing) if alone else None
        limit_s = UPDATE_S if longest is None else min(UPDATE_S, max(self._frozen_s, SLOWER * longest))
        began = loop.time()
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():  # a limit within the block has expired
                raise
            before = "" if longest is None else f"; earlier updates took at most {longest:.3g} s for that"
            raise await self._give_up(f"it did not {doing % version} within {limit_s:.3g} s{before}") from None
        self._longest_s[doing] = max(longest or 0.0, loop.time() - began)

    async def _check_probe(self, ref: WeightRef) -> None:
        if len(ref.probe_ids) < 2:
            return
        logprob = await self._backend.score(ref.probe_ids)
        if not abs(logprob - ref.probe_logprob) <= self._tolerance:  # NaN too
            raise EngineError(
                f"{self._named} answered that it loaded version {ref.version}, and the tensors that it holds are the "
                f"trainer's, but it gives the probe the logprob {logprob:.6f}, and the trainer gave it "
                f"{ref.probe_logprob:.6f} (tolerance {self._tolerance:g}). It computes from other weights (for example "
                f"a packed copy of lm_head, or what was left after sleep level 2 discarded the model), or a different "
                f"model (for example without biases). It serves nothing now."
            )

    async def _wait_for_requests(self) -> None:
        """Hold back new requests, and wait until those in flight have ended."""
        self._gate.clear()
        with waiting(
            "generations in flight to end",
            unblocks=self._backend.kind,
            numbers=lambda: f"{self.core.running()} running",
        ):
            while self.core.active:
                self._refuse_when_broken()
                await asyncio.sleep(0.02)

    async def _abort_all(self) -> None:
        """Hold back new requests, and abort those in flight until all have ended, or give the server up."""
        # If the server were paused first, it would keep a late request, and complete it with the new weights under the
        # label of the old ones.
        self._gate.clear()
        try:
            async with asyncio.timeout(ABORT_S):  # also if the call that aborts them hangs
                while self.core.active:  # again and again: a request may still have been on its way to the server
                    await self._backend.abort()
                    for _ in range(10):
                        if self.core.active:
                            await asyncio.sleep(0.005)
        except TimeoutError:
            if self.core.active:
                number = counted(len(self.core.active), "request")
                reason = f"it still has {number} {ABORT_S:g} s after it was told to abort them"
            else:
                reason = f"it aborted its requests, but did not answer that call within {ABORT_S:g} s"
            raise await self._give_up(reason) from None

    # Pause -----------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True while requests wait until `resume`, a load, or the end of the lease."""
        return self._lease is not None

    async def pause(self, lease_s: float) -> None:
        """Abort all requests and start none for lease_s seconds, or until `resume` or a load."""
        lease, self._lease = self._lease, asyncio.get_running_loop().call_later(lease_s, self._end_pause)
        if lease is None:
            await self._abort_all()
        else:
            lease.cancel()

    async def resume(self) -> None:
        self._end_pause()

    def _end_pause(self) -> None:
        # During an update, requests that were let through would be completed by the new weights, and labelled with the
        # old ones. The update itself ends the pause.
        if not self._changing.locked():
            self._open()

    def _open(self) -> None:
        """End a pause or an update: let requests through. They are refused while `broken` is set."""
        if self.unchecked_version is not None and not self.core.broken:
            self.core.broken = f"version {self.unchecked_version} was received from the trainer, and is not checked yet"
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        self._gate.set()

    async def release_memory(self, lease_s: float | None = None) -> None:
        raise EngineError(
            f"{self._backend.kind} cannot free its memory for training. Unset launch.colocate, and give it devices of "
            f"its own."
        )

    async def resume_memory(self) -> None:
        """Do nothing: no memory was released."""

    # The process -----------------------------------------------------------------------------------------------------

    async def start(self, reporter: Reporter) -> None:
        """Wait until the server is up, and find out what it can do.

        Raises:
            EngineError: It ended, did not answer in time, or cannot be trained with.
        """
        backend, kind = self._backend, self._backend.kind
        reporter.set(engine=kind, engine_command=[] if self._launch is None else self._launch.command)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._until_ready(reporter)
        with waiting(f"{self._named} to generate its first tokens", unblocks=kind):
            if self.attached:
                await self._resume_server()
            try:
                async with self._answered_within(UPDATE_S, "show what it can do, which includes a generation"):
                    lacks = await backend.prepare()
            except EngineError as error:  # the first request may have killed the engine; its HTTP server ends later
                for _ in range(0 if self.attached else round(DYING_S / POLL_S)):
                    if ended := self.process.ended():
                        raise EngineError(f"{kind} did not start: it {ended}") from error
                    await asyncio.sleep(POLL_S)
                raise
        for lack in lacks:
            log.warning("%s: %s", self._named, lack)
        if self.attached:
            self._was_away, self._identity = False, ""
            with suppress(EngineError, TimeoutError):  # a vLLM without metrics
                async with asyncio.timeout(self._frozen_s):
                    self._identity = await backend.identity()
        await self._record_options(reporter)
        if backend.context is not None:
            self.core.context = min(self.core.context, backend.context)
        log.info("%s started in %.1f s at %s", kind, loop.time() - began, backend.address)
        self._watch = loop.create_task(self._keep_watch())

    async def _until_ready(self, reporter: Reporter) -> None:
        """Wait until the server says that it is ready. One that ran already is resumed if it generates nothing.

        Raises:
            EngineError: It ended, was stopped by SIGSTOP for `frozen_s`, is no such server, takes connections for
                `UPDATE_S` without an answer, or is up and cannot be resumed.
        """
        kind, address, silence = self._backend.kind, self._backend.address, ""
        loop, resumed, warned = asyncio.get_running_loop(), False, False
        began = spoke = ran = looked = loop.time()
        with waiting(
            f"{self._named} to start", unblocks=kind, numbers=lambda: f"{silence}; its log: {self.process.log}"
        ):
            # After a restart, a proxy may answer in the server's place for a while, so a strange answer is not final.
            while silence := await self._silence(
                refuse=self.attached and (self._watch is None or loop.time() - began > UPDATE_S)
            ):
                if ended := self.process.ended():
                    raise EngineError(f"{kind} did not start: it {ended}")
                if loop.time() - looked > self._frozen_s / 4:  # seldom: `stopped` reads all of /proc
                    looked, stopped = loop.time(), self.process.stopped()
                    ran = ran if stopped else looked
                    if looked - ran > self._frozen_s:
                        raise EngineError(
                            f"{kind} did not start: its {stopped} is stopped (SIGSTOP). Start the run again."
                        )
                if silence != NO_ANSWER:  # a closed port is no silence: the server may still open it
                    spoke = loop.time()
                elif loop.time() - spoke > UPDATE_S and await self._takes_connections():
                    raise self._no_answer_error("say that it is ready", UPDATE_S)
                if self.attached and not resumed and await self._answers():
                    resumed = True
                    log.warning("%s answers but generates nothing: resuming it", self._named)
                    await self._resume_server()
                elif self.attached and not warned:
                    warned = True
                    log.warning(
                        "nothing serves at %s yet (%s): waiting. Is this the host:port of %s, and is it running?",
                        address,
                        silence,
                        kind,
                    )
                reporter.set(doing=f"waiting for {self._named} to start ({loop.time() - began:.0f} s)")
                await asyncio.sleep(POLL_S)

    async def _record_options(self, reporter: Reporter) -> None:
        """Write the options that the server runs with, and log those that the command line or inference.args set."""
        kind, file = self._backend.kind, self._options_file
        command = [] if self._launch is None else self._launch.command
        try:
            async with asyncio.timeout(self._frozen_s):  # vLLM collects facts about the machine first
                resolved = await self._backend.resolved()
        except (EngineError, LookupError, TypeError, TimeoutError) as error:  # older vLLMs send them as one text
            why = str(error) or f"no answer within {self._frozen_s:g} s"
            log.warning("%s does not say which options it runs with: %s", kind, why)
            return
        options_by_name = leaves(resolved)
        set_here = [word[2:] for word in command if word.startswith("--")]
        names = set_here or ["model", "model-path", "dtype", *self._chosen]
        shown = ", ".join(f"{name}={options_by_name[name]}" for name in names if name in options_by_name)
        where = ""
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(
                file, {"engine": kind, "address": self._backend.address, "command": command, "options": resolved}
            )
            reporter.set(engine_options=str(file))
            where = f" (all {len(options_by_name)} options: {file})"
        log.info("%s, version %s, runs with %s%s", self._named, options_by_name.get("version"), shown, where)

    async def _silence(self, *, refuse: bool = False) -> str:
        """Return why the server is not up; "" if it is.

        Args:
            refuse: If another kind of server answers, raise EngineError instead of returning that as the reason.
        """
        try:
            async with asyncio.timeout(2.0):  # before Python 3.12, wait_for may swallow a cancellation
                await self._backend.ready()
        except TimeoutError:
            return NO_ANSWER
        except EngineUnreachable as error:
            return error.reason
        except EngineError as error:
            if not refuse:
                return str(error)
            raise EngineError(
                f"Cannot attach to {self._backend.address}: it is no {self._backend.kind} server. {error} Give the "
                f"host:port of the inference server."
            ) from None
        return ""

    async def _resume_server(self) -> None:
        """Resume a server that ran already, in case an unfinished update has left it paused."""
        async with self._answered_within(self._frozen_s, "resume"):
            with suppress(EngineError):  # if it cannot resume, `prepare` says what it lacks
                await self._backend.resume()
                self._has_paused = False

    @asynccontextmanager
    async def _answered_within(self, limit_s: float, doing: str) -> AsyncIterator[None]:
        """Raise EngineError if the block, in which the server is asked to do something, takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._no_answer_error(doing, limit_s) from None

    async def _takes_connections(self) -> bool:
        """Return whether the server's port is open, even if nothing answers there."""
        host, _, port = self._backend.address.rpartition(":")
        try:
            async with asyncio.timeout(HEALTH_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    def _no_answer_error(self, doing: str, limit_s: float) -> EngineError:
        return EngineError(
            f"Cannot use {self._named}: it takes connections, but within {limit_s:g} s it did not {doing}. Look into "
            f"its log ({self.process.log}), and restart it if you started it yourself."
        )

    async def _answers(self, within_s: float = HEALTH_S) -> bool:
        """Return whether the engine answers, even if it is paused: SGLang's /health does not answer then."""
        try:
            async with asyncio.timeout(within_s):
                await self._backend.alive()
        except (EngineError, TimeoutError):
            return False
        return True

    async def _lives(self) -> bool | None:
        """Return whether the engine answers (during an update, its HTTP server); None while the question is open.

        An engine answers between two steps, so an open question is kept for the next call. If each call asked anew, an
        engine with long steps would seldom answer in time, and SGLang would answer the old questions first.
        """
        updating = self._changing.locked()
        if self._question is None or self._question[1] != updating:
            self._forget_question()
            ask = self._backend.answers if updating else self._answers
            self._question = asyncio.get_running_loop().create_task(ask(self._frozen_s / 3)), updating
        asked, _ = self._question
        await asyncio.wait({asked}, timeout=min(HEALTH_S, self._frozen_s / 4))
        if not asked.done():
            return None
        self._question = None
        return asked.result()

    def _forget_question(self) -> None:
        if self._question is not None:
            self._question[0].cancel()
            self._question = None

    async def _keep_watch(self) -> None:
        """Set `failure` when the server has ended, or was stopped (SIGSTOP) or silent for `frozen_s`. Then return."""
        loop, period = asyncio.get_running_loop(), min(HEALTH_S, self._frozen_s / 4)
        heard = ran = looked = loop.time()  # its last answer, the last look without a stopped process, the last look
        while self.failure is None:
            await asyncio.sleep(min(POLL_S, period))
            if ended := self.process.ended():
                self.failure = f"{self._named} {ended}"
            elif loop.time() - looked > period:
                stopped = self.process.stopped()
                if not stopped:
                    ran = loop.time()
                if await self._ask():
                    heard = loop.time()
                looked = loop.time()
                if looked - ran > self._frozen_s:
                    await self._give_up(f"its {stopped} is stopped (SIGSTOP) and has been for {self._frozen_s:.0f} s")
                elif looked - heard > self._frozen_s:
                    more = f"; its {stopped} is stopped" if stopped else ""
                    await self._give_up(f"it has not answered for {self._frozen_s:.0f} s{more}")
        self._forget_question()
        await self._backend.close()  # fails open requests: an attached server is still running, and may never answer

    async def _ask(self) -> bool:
        """Ask whether the server lives, and return whether it has answered.

        If it was away and another process answers now, set `failure`. If it is paused for no update, resume it.
        """
        lives = await self._lives()
        if lives:
            with suppress(EngineUnreachable):  # `failure` is set, or it went away again
                await self._refuse_another()
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await self._end_stray_pause()
        elif lives is False:
            self._was_away = True
        return bool(lives)

    async def _end_stray_pause(self) -> None:
        """Resume a server that is paused although no update needs that: its requests would wait without end."""
        if self._has_paused or not await self._backend.paused() or self._has_paused:  # an update may begin meanwhile
            return
        log.warning(
            "%s is paused, and no update needs that: resuming it. Either a proxy lost or delayed a call of an update, "
            "or somebody else has paused it",
            self._named,
        )
        await self._backend.resume()

    async def _give_up(self, reason: str) -> EngineUnreachable:
        """Set `failure`, end the server if Clew started it, and return the error to raise."""
        self.failure = f"{self._named} is given up: {reason} (its log: {self.process.log})"
        await asyncio.to_thread(self.process.end)
        return EngineUnreachable("", self.failure)

    async def restart(self, reporter: Reporter) -> None:
        """Start the server anew with the weights in model.path, or wait until somebody has, if Clew attached to it.

        It serves nothing until weights are loaded, or until the caller clears `broken`.

        Raises:
            EngineError: It did not start.
        """
        if self._watch is not None:
            await self._watch  # closes the connections to the old process
        await asyncio.to_thread(self.process.end)
        if isinstance(self.process, ServerProcess):
            assert self._launch is not None
            self.process = ServerProcess(self._launch, self.process.log)
        self.failure, self.core.broken, self._loaded = None, RESTARTED, None
        self.core.version, self.unchecked_version = 0, None
        self._longest_s.clear()
        await self.start(reporter)
        self._open()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._forget_question()
        if self.attached and self._has_paused:  # an update failed, and left the server paused
            with suppress(TimeoutError, EngineUnreachable):
                if await self._is_same():  # a new process is not ours to resume
                    await asyncio.wait_for(self._resume_server(), HEALTH_S)
        await self._backend.close()
        await asyncio.to_thread(self.process.end)


def start_remote(config: Config, run: RunDirectory, name: str = "server", attach: str = "") -> RemoteEngine:
    """Start the server that inference.backend names, or attach to one; `RemoteEngine.start` waits for it.

    Args:
        name: Name of this `clew serve`. The log of "server-1" is logs/vllm-1.log (or logs/sglang-1.log).
        attach: host:port of a server that runs already; "": start one.
    """
    core = RemoteCore(config)
    kind = BACKENDS[config.inference.backend]
    options_file = run.path / "engine" / f"{name}.json"
    if attach:
        client = kind.client(config, attach, core.vision, server_token())
        return RemoteEngine(config, core, client, options_file=options_file)
    port = free_port()
    launch = kind.launch(config, port, run.path / "engine" / name)
    log.info("starting %s: %s", kind.kind, " ".join(launch.command))
    client = kind.client(config, f"127.0.0.1:{port}", core.vision)
    log_file = run.logs / f"{config.inference.backend}{name.removeprefix('server')}.log"
    return RemoteEngine(config, core, client, launch, log_file, options_file=options_file)
