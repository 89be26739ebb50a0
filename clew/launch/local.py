"""`clew train` on one machine: starts server, rollout and trainer, and supervises them.

The death of the trainer ends the run. A server or a rollout process that is killed is started again,
`launch.restarts` times; one that ends with an error of its own would only repeat it, and ends the run with its words.
All of them die with this process, however it dies.
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
from clew.processes import PARENT_VARIABLE
from clew.reading import read_json
from clew.record.run import RunDirectory

ROLES = {"server": "serve", "rollout": "rollout", "trainer": "learn"}
"""Each process's name in status/ and logs/, and the command that it is."""

GRACE_S = 8.0
"""Seconds from asking a process to end to killing it."""


@dataclass
class Child:
    """One supervised process."""

    role: str
    command: list[str]
    run: RunDirectory
    restarts: int = 0
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """In a session of its own, so that Ctrl-C reaches the supervisor alone; it writes to logs/<role>.log."""
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
        """What the process said of its end: its error, or the end of its log."""
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

    Raises LaunchError with step and cause when it does not, and Interrupted when somebody asked this process to end.

    arguments: the configuration file and overrides, as each process gets them. refresh: called ten times a second.
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
    try:
        for child in children.values():
            child.start()
        while not stop:
            refresh()
            if _check(config, run, children):
                break
            time.sleep(0.1)
    finally:
        _end(list(children.values()))
        refresh()
    done = run.steps.count()
    if done < config.training.steps:
        raise Interrupted(
            f"interrupted at step {done} of {config.training.steps}; nothing recorded is lost. "
            f"Start the same command again to go on."
        )


def _check(config: Config, run: RunDirectory, children: dict[str, Child]) -> bool:
    """Whether the run is complete. Restarts what somebody ended; raises LaunchError for what must end the run."""
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
