"""`clew serve`: an engine behind HTTP, registered in the run directory."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from clew.config import SERVERS_VARIABLE, Config, server_token
from clew.errors import EngineError, RecordError
from clew.http_server import ASGI, Access, GuardedServer, bind, new_event_loop
from clew.inference.app import Application, ServedEngine
from clew.inference.local import load_engine
from clew.inference.protocol import EngineUnreachable
from clew.inference.remote import RESTARTED, RemoteEngine, start_remote
from clew.printing import print
from clew.record.run import RunDirectory, Server
from clew.record.weights import outside_folder
from clew.waits import Reporter, waiting

log = logging.getLogger("clew.inference")

MAX_SERVERS = 1024
"""Maximum number of servers of one run."""

GATHER_S = 0.001
"""Seconds for which an idle engine waits for the rest of a burst of requests; one arrives in a fifth of that."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end `clew serve`."""

LOOK_S = 0.5
"""Seconds between two checks of whether the run lists this server."""


class Beside(Protocol):
    """Another application on the server's port and event loop, which uses the same engine."""

    @property
    def app(self) -> ASGI: ...

    def launched(self, address: str) -> None:
        """Take note that the server now answers at this address."""

    def has_session(self, key: str) -> bool:
        """Return whether an open session has this key."""
        ...

    async def run(self) -> None:
        """Do the application's own work while the server runs; when cancelled at the end, close everything."""


def serve(
    config: Config,
    beside: Callable[[ServedEngine, str], Beside] | None = None,
    *,
    api_key: str = "",
    allow_weights: Sequence[Path] = (),
    name: str = "",
    attach: str = "",
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        beside: Function that makes another application from the engine and the API key; the key is empty if any will
            do.
        api_key: Key that clients must send. If empty, any key is accepted on loopback; elsewhere one is generated.
        allow_weights: Folders to load weights from, besides the run's own.
        name: Name in status/, logs/ and servers.json; "": the first free one of server, server-1, server-2, ...
        attach: host:port of a running vLLM or SGLang server (inference.backend says which); "": start one.

    Raises:
        EngineError: The server cannot start, for example because the port is taken.
    """
    if attach and config.inference.backend == "embedded":
        raise EngineError(f"Cannot attach to {attach}: inference.backend is embedded. Set it to vllm or sglang.")
    run = RunDirectory(config.run_path)
    with ExitStack() as stack:
        name = _hold(run, name, stack)
        reporter = stack.enter_context(run.report(name))
        listener = stack.enter_context(bind(config.inference.listen))
        stack.callback(run.remove_server, name)
        stack.enter_context(suppress(asyncio.CancelledError))  # a signal came while the server was starting
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(name, attach, config, run, listener, reporter, beside, api_key, allow_weights))


def _hold(run: RunDirectory, name: str, stack: ExitStack) -> str:
    """Take the lock of a server's name, see `serve`, until the stack is closed. Return the name."""
    if name:
        stack.enter_context(run.hold(name))
        return name
    names = ["server", *(f"server-{number}" for number in range(1, MAX_SERVERS))]
    for free in names:
        with suppress(RecordError):
            stack.enter_context(run.hold(free, patience_s=0.1))  # not 0: `clew status` may be looking at the lock
            return free
    raise EngineError(f"Cannot start a server: {run.path} has {MAX_SERVERS} already. End one of them.")


async def _serve(
    name: str,
    attach: str,
    config: Config,
    run: RunDirectory,
    listener: socket.socket,
    reporter: Reporter,
    make_beside: Callable[[ServedEngine, str], Beside] | None,
    api_key: str,
    allow_weights: Sequence[Path],
) -> None:
    host, port = listener.getsockname()[:2]
    address = f"{socket.gethostname() if host == '0.0.0.0' else host}:{port}"
    loopback, token = ipaddress.ip_address(host).is_loopback, server_token() or secrets.token_urlsafe(32)
    key = api_key or ("" if loopback else secrets.token_urlsafe(16))
    entry = Server(name=name, address=address, pid=os.getpid(), ready=False, token=token)

    reporter.set(doing=f"loading {config.model.path}", address=address)
    run.register_server(entry)
    engine = await _open_engine(name, attach, config, run, reporter)
    try:
        beside = make_beside(engine, key) if make_beside is not None else None
    except BaseException:
        await engine.close()
        raise
    published = [] if config.inference.weights is None else [outside_folder(config.inference.weights, run.path)]
    application = Application(
        engine,
        config.model.path,
        beside.app if beside is not None else None,
        weights_below=[run.path, *published, *allow_weights],
    )
    has_session = beside.has_session if beside is not None else lambda key: False
    access = Access(loopback=loopback, token=token, key=key, has_session=has_session)
    server = _Server(application, access)
    loop = asyncio.get_running_loop()
    keeper = loop.create_task(_keep_listed(config, run, entry, application, reporter, server.listening, beside))
    keeper.add_done_callback(lambda _: setattr(server, "should_exit", True))
    tasks = [loop.create_task(_end_on_signal(server, engine)), loop.create_task(_describe(application, reporter))]
    if beside is not None:
        tasks.append(loop.create_task(beside.run()))
    try:
        await server.serve(sockets=[listener])
        if keeper.done():
            keeper.result()  # raises the error that ended it
    finally:
        for task in [keeper, *tasks]:
            task.cancel()
        await asyncio.gather(keeper, *tasks, return_exceptions=True)
        await engine.close()


async def _open_engine(name: str, attach: str, config: Config, run: RunDirectory, reporter: Reporter) -> ServedEngine:
    """Load the embedded engine, or start the server that inference.backend names and wait for it."""
    if config.inference.backend == "embedded":
        return load_engine(config, gather_s=GATHER_S)
    engine = start_remote(config, run, name, attach)
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None
    for number in SIGNALS:  # `_end_on_signal` replaces these handlers when the server is up
        loop.add_signal_handler(number, starting.cancel)
    try:
        await engine.start(reporter)
    except BaseException:
        for number in SIGNALS:  # a further signal must neither interrupt the cleanup nor hide the error
            loop.add_signal_handler(number, lambda: None)
        await engine.close()
        raise
    return engine


async def _keep_listed(
    config: Config,
    run: RunDirectory,
    entry: Server,
    application: Application,
    reporter: Reporter,
    listening: asyncio.Event,
    beside: Beside | None,
) -> None:
    """Keep this server listed as ready in the run: list it, then load the newest weights, then serve.

    This happens at the start, and again if the trainer removed the server for being late. The order matters, see
    `RunDirectory.register_server`: a trainer that publishes meanwhile either finds this server, or has announced its
    weights before this server looks for them.

    Raises:
        EngineError: A step has failed, or the server behind this one has ended more than launch.restarts times.
    """
    engine, restarts = application.engine, config.launch.restarts
    last_warning = ""
    await listening.wait()
    while engine.failure is None or (isinstance(engine, RemoteEngine) and restarts > 0):
        if engine.failure is not None:
            assert isinstance(engine, RemoteEngine)
            log.warning("%s; it is %s", engine.failure, "attached to again" if engine.attached else "started again")
            restarts -= 1
            application.ready.clear()
            run.register_server(replace(entry, ready=False))
            try:
                await engine.restart(reporter)
            except EngineError as error:
                if restarts == 0:
                    raise
                engine.failure = str(error)  # it may have died of what ended the one before
                await asyncio.sleep(LOOK_S)
                continue
        if not any(server.ready and (server.name, server.pid) == (entry.name, entry.pid) for server in run.servers()):
            application.ready.clear()
            async with application.updating:  # listed during a hung update, it would delay the trainer each time
                if engine.failure is not None:
                    continue
                run.register_server(replace(entry, ready=True))
            try:
                await _load_newest(application, run, entry, reporter)
            except EngineUnreachable as error:  # the engine behind it died or froze, and its watcher reports that
                if str(error) != last_warning:
                    log.warning("the newest weights are not loaded yet: %s", error)
                    last_warning = str(error)
                run.register_server(replace(entry, ready=False))
                await asyncio.sleep(LOOK_S)
                continue
            if engine.core.broken == RESTARTED:  # no newer weights are announced than those in model.path
                engine.core.broken = None
            application.ready.set()
            reporter.set(doing="serving", version=engine.core.version)
            reporter.write()
            print(f"LLM inference server launched at: {SERVERS_VARIABLE}={entry.address}", flush=True)
            if beside is not None:
                beside.launched(entry.address)
        await asyncio.sleep(LOOK_S)
    raise EngineError(
        f"{engine.failure}. Read its log, restart it if you started it yourself, and start the run again."
    )


async def _load_newest(application: Application, run: RunDirectory, entry: Server, reporter: Reporter) -> None:
    """Load the weights that the run announces, until the newest ones are loaded.

    If they are gone (a run that ended leaves none in shared memory), this waits until the trainer announces and loads
    weights again. If they were broadcast, it asks for another broadcast, and asks again if the trainer has taken this
    server out meanwhile.

    Raises:
        EngineError: The weights were refused, or the trainer has given this server up.
        EngineUnreachable: The engine behind this server died or froze.
    """
    engine = application.engine
    while (newest := run.newest_weights()) is not None and not engine.holds(newest):
        reporter.set(doing=f"loading version {newest.version}")
        if newest.was_broadcast():
            if engine.failure is not None:
                raise EngineUnreachable("", engine.failure)
            asking = replace(entry, ready=True, wants_weights=True)
            listed = [server for server in run.servers() if (server.name, server.pid) == (entry.name, entry.pid)]
            if given_up := "".join(server.given_up for server in listed):
                raise EngineError(f"The trainer has given this server up: {given_up}")
            if asking not in listed:
                run.register_server(asking)
            with waiting(f"weights of version {newest.version}, to be broadcast again", unblocks="trainer"):
                await asyncio.sleep(LOOK_S)
            continue
        if not newest.exists():
            with waiting(f"weights of version {newest.version}, which are not in {newest.path}", unblocks="trainer"):
                await asyncio.sleep(LOOK_S)
            continue
        try:
            async with application.updating:
                if not engine.holds(newest):  # the trainer may have loaded it meanwhile
                    await engine.load_weights(newest)
        except EngineError:
            if run.newest_weights() == newest:  # otherwise the trainer has replaced and removed them meanwhile
                raise


class _Server(GuardedServer):
    """HTTP server that sets an event when it listens. `_end_on_signal` handles signals."""

    def __init__(self, application: Application, access: Access) -> None:
        super().__init__(application, access)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def _end_on_signal(server: GuardedServer, engine: ServedEngine) -> None:
    """Wait for SIGTERM or SIGINT, then return the tokens so far to all clients and end the server."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, asked.set)
    await asked.wait()
    server.should_exit = True
    await engine.abort()


async def _describe(application: Application, reporter: Reporter) -> None:
    """Keep the facts in the status file up to date."""
    core = application.engine.core
    before = core.generated_tokens
    while True:
        await asyncio.sleep(1.0)
        if application.ready.is_set():
            engine = application.engine
            resting = "its memory is lent to training" if engine.released else "paused" if engine.paused else ""
            reporter.set(doing=f"serves nothing: {core.broken}" if core.broken else resting or "serving")
        reporter.set(
            version=core.version,
            running=core.running(),
            queued=len(core.waiting),
            cache_bytes=core.cache_bytes(),
            tokens=core.generated_tokens,
            tokens_per_s=core.generated_tokens - before,
        )
        before = core.generated_tokens
