"""Starts and stops the process of a vLLM or SGLang server, and finds in its log why it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from clew.errors import EngineError
from clew.inference import run_server
from clew.inference.backend import Launch
from clew.inference.server_log import cause_of_end
from clew.processes import how_it_ended, written_since

GRACE_S = 5.0
"""Maximum seconds between asking a server to end (SIGTERM) and killing it with its child processes (SIGKILL)."""


class ServerProcess:
    """One server process; its output goes to a file."""

    def __init__(self, launch: Launch, log: Path) -> None:
        """Start the server.

        Args:
            launch: Command and environment variables of the server.
            log: File to which the server's output is appended.

        Raises:
            EngineError: The program that `launch.command` begins with does not exist.
        """
        self.log = log
        self._skip = log.stat().st_size if log.exists() else 0
        if not Path(launch.command[0]).is_file():
            raise EngineError(
                f"Cannot start the inference server: {launch.command[0]} does not exist. inference.python names the "
                f"Python in which it is installed."
            )
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-S", run_server.__file__, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **launch.environment, run_server.COMMAND_VARIABLE: json.dumps(launch.command)},
            )

    @property
    def pid(self) -> int:
        """Return the pid of `run_server`, the parent of the server and the leader of their process group."""
        return self._process.pid

    def ended(self) -> str | None:
        """Return how the process ended, and why according to its log; None while it is running."""
        code = self._process.poll()
        if code is None:
            return None
        cause = cause_of_end(written_since(self.log, self._skip))
        return f"{how_it_ended(code)}: {cause} (its log: {self.log})"

    def stopped(self) -> str:
        """Return the name and pid of a process of the server that is suspended, for example by SIGSTOP.

        Returns "" if there is no such process, and always on systems without /proc.
        """
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                name, _, fields = (folder / "stat").read_text().rpartition(")")
                state, _, _, session = fields.split()[:4]
                if state == "T" and int(session) == self.pid:
                    return f"process {name.partition('(')[2]} (pid {folder.name})"
        return ""

    def end(self) -> None:
        """End all processes in the server's group: SIGTERM first, then SIGKILL after at most `GRACE_S`."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class AttachedServer:
    """Stand-in for `ServerProcess` if somebody else started the server: Clew neither watches nor ends its process."""

    log = "where it was started"  # messages say "its log: ..."

    def ended(self) -> None:
        return None

    def stopped(self) -> str:
        return ""

    def end(self) -> None:
        """Leave it running."""
