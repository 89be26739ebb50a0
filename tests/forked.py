"""Real processes that have nothing to import: forks of a Python that has it all, made by multiprocessing's fork server.

`python -m clew` takes two seconds to import torch and transformers, and a suite starts hundreds of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from clew.processes import PARENT_VARIABLE, die_with_parent

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.preloaded"])


class Forked:
    """A process that calls a function; what `subprocess.Popen` gives, as far as tests use it. It leads a session, its
    standard streams are pipes (or output goes to a file), and it dies with this process."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        cwd: Path | None = None,
        output: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """function: of a module.   output: of both streams.   variables: further ones of the environment."""
        given, to = _FORKS.Pipe(duplex=False)
        out, its_out = _FORKS.Pipe(duplex=False)
        error, its_error = _FORKS.Pipe(duplex=False)
        its = (given, its_out, its_error)
        self._process = _FORKS.Process(
            target=_run,
            args=(
                function,
                arguments,
                str(cwd or Path.cwd()),
                str(output or ""),
                {**os.environ, **(variables or {})},
                its,
            ),
        )
        self._process.start()
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((to, "w"), (out, "r"), (error, "r"))
        )
        for end in (*its, to, out, error):
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it says until it ends; of a pipe's size at most."""
        self.wait(timeout)
        said = self.stdout.read(), self.stderr.read()
        self.close()
        return said

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End it, if it has not ended."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        if raised is None:
            self.wait()
        self.close()


def clew(*arguments: str, **options: Any) -> Forked:
    """`clew ARGUMENTS`."""
    return Forked(_clew, *arguments, **options)


def _clew(*arguments: str) -> None:
    import clew.cli

    os.environ[PARENT_VARIABLE] = str(os.getppid())
    sys.argv = ["clew", *arguments]
    clew.cli.main()


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    cwd: str,
    output: str,
    variables: dict[str, str],
    pipes: tuple[Connection, Connection, Connection],
) -> None:
    die_with_parent(os.getppid())
    os.setsid()
    for number, end in enumerate(pipes):
        os.dup2(end.fileno(), number)
        end.close()
    if output:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    function(*arguments)
