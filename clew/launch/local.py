"""`clew train` on one machine: starts the server, rollout and trainer processes, and supervises them.

The run ends when the trainer dies. A server or rollout process that is killed is restarted, up to `launch.restarts`
times. One that exits with an error of its own would only fail again: it ends the run, and its error is reported. All of
these processes die with this one, however it dies. When there is no progress, `clew hang` says why (`hang.after_s`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from clew.config import SERVERS_VARIABLE, TOKEN_VARIABLE, Config
from clew.errors import Interrupted, LaunchError, RecordError
from clew.launch.watch import Hang, Watch
from clew.processes import PARENT_VARIABLE
from clew.reading import read_json
from clew.record.run import RunDirectory

ROLES = {"server": "serve", "rollout": "rollout", "trainer": "learn"}
"""Name of each process in status/ and logs/, and the `clew` command that it runs."""

GRACE_S = 8.0
"""Seconds between asking a process to end and killing it."""


@dataclass
class Child:
    """One supervised process."""

    role: str
    command: list[str]
    run: RunDirectory
    restarts: int = 0
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start the process in its own session, so that Ctrl-C reaches only the supervisor. Output goes to
        logs/<role>.log."""
        others = (SERVERS_VARIABLE, TOKEN_VARIABLE)  # this run has servers of its own
        environment = {name: value for name, value in os.environ.items() if name not in others}
        with (self.run.logs / f"{self.role}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environment, PARENT_VARIABLE: str(os.getpid())},
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
        log = (self.run.logs / f"{self.role}.log").read_text(errors="replace").strip()
        *_, error = log.rsplit("\nclew: ", 1)
        return "\n".join(error.removeprefix("clew: ").splitlines()[-12:])


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
    for role in reversed(ROLES):
        run.hold(role).close()  # another run in this directory is an error here, not in a log file
    for server in run.servers():  # left by a run that was killed: nobody listens there any more
        run.remove_server(server.name)
    python = [sys.executable, "-P", "-m", "clew"]
    children = {role: Child(role, [*python, command, *arguments], run) for role, command in ROLES.items()}
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop.append(number))
    watch, hung_at = Watch(run, config.hang.after_s), list[int]()
    try:
        for child in children.values():
            child.start()
        while not stop:
            refresh()
            if _check(config, run, children):
                break
            if (hang := watch.look()) is not None and hang.started and config.hang.action != "warn":
                _end_if_hopeless(config, run, hang, hung_at)
                _end(list(children.values()))
                for child in children.values():
                    child.start()
                watch.begin()
            time.sleep(0.1)
    finally:
        watch.stop()
        _end(list(children.values()))
        refresh()
    done = run.steps.count()
    if done < config.training.steps:
        raise Interrupted(
            f"interrupted at step {done} of {config.training.steps}; nothing recorded is lost. "
            f"Start the same command again to go on."
        )


def _check(config: Config, run: RunDirectory, children: dict[str, Child]) -> bool:
    """Return whether the run is complete. Restart processes that were ended from outside.

    Raises:
        LaunchError: A process ended in a way that must end the run.
    """
    for role, child in children.items():
        code = child.process.poll()
        if code is None or (code == 0 and role == "rollout" and run.inbox.published() == config.training.steps):
            continue
        if code == 0 and role == "trainer":
            return True
        ended_from_outside = code <= 0 or code > 128  # a signal, or the answer to one
        if ended_from_outside and role != "trainer" and child.restarts < config.launch.restarts:
            child.restarts += 1
            child.start()
            continue
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        often = f", after {child.restarts} restarts (launch.restarts)" if child.restarts else ""
        raise LaunchError(
            f"the {role} {how}{often}, at step {run.steps.count()} of {config.training.steps}:\n{child.last_words()}\n"
            f"(all that it wrote: {run.logs / f'{role}.log'})"
        )
    return False


def _end_if_hopeless(config: Config, run: RunDirectory, hang: Hang, hung_at: list[int]) -> None:
    """Note the step of a hang, if the run is to be started again from there.

    Args:
        hung_at: Steps at which the run hung before.

    Raises:
        LaunchError: It is to end instead, or starting it again has not helped.
    """
    done = run.steps.count()
    often = ""
    if hung_at:
        often = f" Starting the processes again {len(hung_at)} times (hang.action=restart) has not helped."
    again = done in hung_at or len(hung_at) == config.launch.restarts
    if config.hang.action == "abort" or again:
        raise LaunchError(
            f"no progress for {hang.quiet_s:.0f} s at step {done} of {config.training.steps}: {hang.pattern}. "
            f"{hang.explanation}{often}\n(report: {hang.report.with_suffix('.html')})"
        )
    hung_at.append(done)


def _end(children: list[Child]) -> None:
    started = [child.process for child in children if hasattr(child, "process")]
    for process in started:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
