"""`clew train` on one machine: starts the servers, rollout and trainer processes, and supervises them.

The run ends when the trainer dies. A server or rollout process that is killed is restarted, up to `launch.restarts`
times. One that exits with an error of its own would only fail again: it ends the run, and its error is reported, unless
it is one of several servers. All of these processes die with this one, however it dies. When there is no progress,
`clew hang` says why (`hang.after_s`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from clew.config import SERVERS_ALIAS, SERVERS_VARIABLE, TOKEN_VARIABLE, Config, server_addresses, server_token
from clew.devices import assigned_gpus, gpus, server_names
from clew.errors import ConfigError, Interrupted, LaunchError, RecordError
from clew.launch.no_progress import SUPERVISED_VARIABLE, Hang, Watch
from clew.launch.ranks import LAST_LINES
from clew.printing import print
from clew.processes import PARENT_VARIABLE, how_it_ended, is_lock_free, written_since
from clew.reading import read_json
from clew.record.run import RunDirectory

log = logging.getLogger("clew.launch")

KILLED = (
    "\nIf you did not kill it, the kernel may have, for lack of memory: dmesg -T | grep -i killed. What is recorded is "
    "not lost: start the same command again to go on."
)
"""Sentence about a process that ended by SIGKILL."""

GRACE_S = 8.0
"""Seconds between asking a process to end and killing it."""


CHECKPOINT_STILL_S = 120.0
"""Seconds for which a checkpoint's files may stand still: all is digested before the first and after the last."""


@dataclass
class Child:
    """One supervised process."""

    role: str
    command: list[str]
    run: RunDirectory
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of the process, in place of this process's."""
    restarts: int = 0
    given_up: bool = False
    """True for a server that ended by an error of its own, while others serve."""
    process: subprocess.Popen[bytes] = field(init=False)
    log_begin: int = field(init=False)
    """Size of the log, in bytes, when the process was started."""

    def start(self) -> None:
        """Start the process. Its output goes to logs/<role>.log.

        It gets a session of its own, so that Ctrl-C reaches only the supervisor.
        """
        (self.run.status / f"{self.role}.json").unlink(missing_ok=True)  # it is about the process before this one
        with (self.run.logs / f"{self.role}.log").open("ab") as log:
            self.given_up, self.log_begin = False, log.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**self.environment, PARENT_VARIABLE: str(os.getpid())},
            )

    def last_words(self) -> str:
        """Return why the process ended: the error that it reported, or the end of its log."""
        status = self.run.status / f"{self.role}.json"
        with suppress(RecordError):  # it may have been killed before it wrote any
            words = read_json(status, dict[str, Any])
            if words.get("pid") == self.process.pid and "error" in words:
                return str(words["error"])
        if shutil.disk_usage(self.run.path).free < 2**16:
            return f"There is no space left in {self.run.path}. Free some, then start the same command again to go on."
        log = written_since(self.run.logs / f"{self.role}.log", self.log_begin).strip()
        *_, error = log.rsplit("\nclew: ", 1)
        # A failed rank's error has one line more than the last lines of its log, which it quotes.
        lines = error.removeprefix("clew: ").splitlines()[-LAST_LINES - 1 :]
        return "\n".join(lines) or "It wrote nothing."


def supervise(config: Config, arguments: list[str], refresh: Callable[[], None]) -> None:
    """Run until the trainer has made its last step.

    Args:
        arguments: The configuration file and overrides, as each process gets them.
        refresh: Called ten times a second.

    Raises:
        LaunchError: The run failed; the message gives the step and the cause.
        Interrupted: Somebody asked this process to end.
    """
    run = RunDirectory(config.run_path)
    children = _children(config, arguments, run)
    for role in reversed(children):
        run.hold(role).close()  # another run in this directory is an error here, not in a log file
    for path in run.status.glob("[!.]*.json"):  # of ranks and servers that an earlier start had, and that have ended
        with suppress(RecordError, LookupError, TypeError, AttributeError):  # such as one that was cut off
            status = read_json(path, dict[str, Any])
            gone = status["host"] == socket.gethostname() and is_lock_free(path.with_suffix(".lock"))
            if path.stem not in children and (gone or status["doing"].startswith(("ended", "failed"))):
                path.unlink(missing_ok=True)
    if "server" in children:
        for server in run.servers():  # left by a run that was killed: nobody listens there any more
            run.remove_server(server.name)
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop.append(number))
    watch, hung_at = Watch(run, config.hang.after_s), list[int]()

    def end() -> None:
        signals = len(stop)
        _end(list(children.values()), run, lambda: len(stop) > signals)

    try:
        for child in children.values():
            child.start()
        told = "trainer" in children  # only servers without a trainer have their addresses printed
        while not stop:
            refresh()
            told = told or _tell_addresses(run, children)
            if _check(config, run, children):
                break
            if (hang := watch.look()) is not None and hang.started and config.hang.action != "warn":
                _end_if_hopeless(config, run, hang, hung_at)
                end()
                for child in children.values():
                    child.start()
                watch.begin()
            time.sleep(0.1)
    finally:
        watch.stop()
        end()
        refresh()
    done, trainer = run.steps.count(), children.get("trainer")
    # After the last step, too, the trainer has work to do: a checkpoint, and the wait for the last evaluation.
    if trainer is not None and (done < config.training.steps or trainer.process.returncode != 0):
        raise Interrupted(
            f"interrupted at step {done} of {config.training.steps}; nothing recorded is lost. "
            f"Start the same command again to go on."
        )


def _children(config: Config, arguments: list[str], run: RunDirectory) -> dict[str, Child]:
    """Return the processes by their names in status/ and logs/, in the order in which they start.

    Raises:
        ConfigError: launch.devices needs more devices than there are.
    """
    devices = config.devices
    available = [] if config.launch.devices is None or config.model.device == "cpu" else gpus()
    try:
        given = assigned_gpus(devices, available)
    except ValueError as error:
        raise ConfigError(f"{error}. Use fewer, or set model.device=cpu: each device is a process then.") from None
    commands = {
        name: ["serve", *arguments, *_of_server(name, number, config)]
        for number, name in enumerate(server_names(devices))
    }
    fronts = [] if devices.inference is not None or config.inference.backend == "embedded" else server_addresses()
    for number, address in enumerate(fronts):  # vLLM and SGLang know neither leases nor versions nor checks
        name = f"server-{number}" if number else "server"
        commands[name] = ["serve", *arguments, *_of_server(name, number, config), "--attach", address]
    if devices.training is not None:
        commands |= {"rollout": ["rollout", *arguments], "trainer": ["learn", *arguments]}
    inherited = {**os.environ, SUPERVISED_VARIABLE: "1"}
    if devices.inference is not None or fronts:
        if server_addresses() and not fronts:
            log.warning(
                "%s is set, and not used: this run starts its own servers. To train with those that run already, say "
                "which devices train, such as launch.devices=d1.",
                SERVERS_VARIABLE,
            )
        for name in (SERVERS_VARIABLE, SERVERS_ALIAS, TOKEN_VARIABLE):
            inherited.pop(name, None)
    key = {TOKEN_VARIABLE: server_token()} if fronts else {}  # only what stands before a server needs its key
    return {
        role: Child(
            role,
            [sys.executable, "-P", "-m", "clew", *command],
            run,
            inherited
            | ({"CUDA_VISIBLE_DEVICES": given[role]} if role in given else {})
            | (key if role.startswith("server") else {}),
        )
        for role, command in commands.items()
    }


def _of_server(name: str, number: int, config: Config) -> list[str]:
    """Return the arguments of one server alone: its name and, if the run names a port, a port of its own."""
    host, _, port = config.inference.listen.rpartition(":")
    apart = [f"inference.listen={host}:{int(port) + number}"] if number and port.isdigit() and int(port) else []
    return [*apart, "--name", name]


def _tell_addresses(run: RunDirectory, children: dict[str, Child]) -> bool:
    """Print the addresses of the servers once all that are not given up are ready; return whether they are."""
    ready = {server.name: server.address for server in run.servers() if server.ready}
    expected = [name for name, child in children.items() if not child.given_up]
    if ready.keys() != set(expected):
        return False
    addresses = ",".join(ready[name] for name in expected)
    print(f"LLM inference servers launched at: {SERVERS_VARIABLE}={addresses}", flush=True)
    return True


def _check(config: Config, run: RunDirectory, children: dict[str, Child]) -> bool:
    """Return whether the run is complete. Restart processes that were ended from outside.

    Raises:
        LaunchError: A process ended in a way that must end the run.
    """
    for role, child in children.items():
        code = child.process.poll()
        if code is None or (code == 0 and role == "rollout" and (run.inbox.published() or 0) >= config.training.steps):
            continue
        if code == 0 and role == "trainer":
            return True
        if child.given_up:
            continue
        ended_from_outside = code <= 0 or code > 128  # a signal, or the answer to one
        if ended_from_outside and role != "trainer" and child.restarts < config.launch.restarts:
            child.restarts += 1
            child.start()
            continue
        serving = [name for name, other in children.items() if name.startswith("server") and not other.given_up]
        if role in serving and len(serving) > 1:
            child.given_up = True
            run.remove_server(role)
            log.error("%s ended with code %d, and the run goes on without it: %s", role, code, child.last_words())
            continue
        often = f", after {child.restarts} restarts (launch.restarts)" if child.restarts else ""
        raise LaunchError(
            f"the {role} {how_it_ended(code)}{often}, at step {run.steps.count()} of {config.training.steps}:\n"
            f"{child.last_words()}\n(full log: {run.logs / f'{role}.log'}){KILLED if code == -signal.SIGKILL else ''}"
        )
    return False


def _end_if_hopeless(config: Config, run: RunDirectory, hang: Hang, hung_at: list[int]) -> None:
    """End the run because of a hang, or add the hang's step to `hung_at` if the processes are to be started again.

    Raises:
        LaunchError: hang.action is abort, this step hung before, or launch.restarts are used up.
    """
    done = run.steps.count()
    if config.hang.action == "abort" or done in hung_at or len(hung_at) == config.launch.restarts:
        tried = f" Starting the processes again {len(hung_at)} times (hang.action=restart) has not helped."
        raise LaunchError(
            f"no progress for {hang.quiet_s:.0f} s at step {done} of {config.training.steps}: {hang.pattern}. "
            f"{hang.explanation}{tried if hung_at else ''}\n(report: {hang.report.with_suffix('.html')})"
        )
    hung_at.append(done)


def _end(children: list[Child], run: RunDirectory, is_urgent: Callable[[], bool]) -> None:
    """Ask the processes to end, and kill those that are still there after `GRACE_S`.

    The trainer may take longer for a checkpoint, as long as its files grow and nobody asks once more. They may stand
    still for `CHECKPOINT_STILL_S` while its status says that it writes one.
    """
    started = [child.process for child in children if hasattr(child, "process")]
    trainers = [child.process for child in children if child.role == "trainer" and child.process in started]
    for process in started:
        process.terminate()
    begun = grown = time.monotonic()
    written, told = 0, False
    while any(process.poll() is None for process in started):
        if (size := run.unfinished_checkpoint()) > written:
            written, grown = size, time.monotonic()
        late = time.monotonic() > begun + GRACE_S
        saves = late and any(each.poll() is None for each in trainers) and run.writes_checkpoint()
        if late and (is_urgent() or time.monotonic() > grown + (CHECKPOINT_STILL_S if saves else GRACE_S)):
            break
        if late and not told:
            print("the trainer writes its checkpoint; Ctrl-C ends it without", flush=True)
            told = True
        time.sleep(0.05)
    for process in started:
        process.kill()
        process.wait()
