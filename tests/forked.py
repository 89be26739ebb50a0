"""Real processes that have nothing to import: forks of a Python that has it all, made by multiprocessing's fork server.

`python -m clew` takes two seconds to import torch and transformers, and a suite starts hundreds of processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from clew.processes import die_with_parent

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as under every command of Clew; read where torch is loaded
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "clew.cli.main",
        "clew.inference.serve",
        "clew.gateway.proxy",
        "clew.rollout.process",
        "clew.loop.trainer_process",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "omegaconf",
        "pandas",
        "torch.utils.tensorboard",
        *(f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama", "qwen2", "qwen3")),
    ]
)


class Forked:
    """A process that calls a function; what `subprocess.Popen` gives, as far as tests use it. It leads a session, and
    dies with this process. Its input and output are pipes; its errors go to a file, which nobody has to empty, and are
    shown where a `with` block fails."""

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
        self.stderr = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - `close` closes it
        environment = {**os.environ, **(variables or {})}
        files = str(output or ""), str(output or self.stderr.name)
        self._process = _FORKS.Process(
            target=_run, args=(function, arguments, cwd or Path.cwd(), environment, (given, its_out), files)
        )
        self._process.start()
        self.stdin, self.stdout = os.fdopen(os.dup(to.fileno()), "w"), os.fdopen(os.dup(out.fileno()), "r")
        for end in (given, its_out, to, out):
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output, of a pipe's size at most, and its errors, once it has ended."""
        self.wait(timeout)
        said = self.stdout.read(), self.stderr.read()
        self.close()
        return said

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
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
        else:
            sys.stderr.write(self.stderr.read())
        self.close()


def clew(*arguments: str, **options: Any) -> Forked:
    """`clew ARGUMENTS`."""
    return Forked(_clew, *arguments, **options)


def _clew(*arguments: str) -> None:
    import clew.cli.main

    sys.argv = ["clew", *arguments]
    clew.cli.main.main()


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    cwd: Path,
    environment: dict[str, str],
    pipes: tuple[Connection, Connection],
    files: tuple[str, str],
) -> None:
    """pipes: of input and output. files: of output (empty: the pipe) and errors."""
    die_with_parent(os.getppid())
    os.setsid()
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    for number, file in zip((1, 2), files, strict=True):
        if file:
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    function(*arguments)
