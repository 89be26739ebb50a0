"""Starts and ends the process of a vLLM or SGLang server. If it ends by itself, its log is read for the cause."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from clew.errors import EngineError
from clew.inference import run_server
from clew.inference.backend import Launch
from clew.processes import how_it_ended, written_since

GRACE_S = 5.0
"""Seconds between asking a server to end and killing it with all that it has started."""

_CAUSE = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception|error|Killed)\b: .+"
    r"|\b(?<!\w )(?:\w+\.)*\w*(?:Error|Exception)$"  # one without a message; not a line of a traceback that raises it
)
_VALIDATION = re.compile(r"\d+ validation errors? for \S+$")
"""Matches an error of pydantic. The next line says what is wrong, or names a field, and then the one after it does."""
_CONSEQUENCE = re.compile(r"[Ss]ee (?:root cause|stack trace)|EngineDeadError|Engine core initialization failed")


class ServerProcess:
    """One server process; its output goes to a file."""

    def __init__(self, launch: Launch, log: Path) -> None:
        """Start it.

        Raises:
            EngineError: There is no such program.
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
        """Return the pid of the server's parent (`run_server`), which leads the group of all its processes."""
        return self._process.pid

    def ended(self) -> str | None:
        """Return how and why the process has ended, as far as its log tells; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{how_it_ended(code)}: {self.cause()} (its log: {self.log})"

    def stopped(self) -> str:
        """Return the name and pid of one of the server's processes that a signal has stopped; "" if none is."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                name, _, fields = (folder / "stat").read_text().rpartition(")")
                state, _, _, session = fields.split()[:4]
                if state == "T" and int(session) == self.pid:
                    return f"process {name.partition('(')[2]} (pid {folder.name})"
        return ""

    def cause(self) -> str:
        """Return the error in the log that caused the others, or else the log's last line."""
        lines = [line for line in written_since(self.log, self._skip).splitlines() if line.strip()]
        cause = lines[-1].strip() if lines else "it wrote nothing"
        for place, line in enumerate(lines):
            if " WARNING " not in line and (found := _CAUSE.search(line)) and not _CONSEQUENCE.search(line):
                cause = found[0].strip()
                for following in lines[place + 1 : place + 3] if _VALIDATION.search(cause) else []:
                    said, ends, _ = following.removeprefix(line[: found.start()]).partition(" [type=")
                    cause += f": {said.strip()}"
                    if ends:
                        break
        return cause

    def end(self) -> None:
        """End the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


class AttachedServer:
    """A server that somebody else started and ends: only its answers tell whether it lives. See `ServerProcess`."""

    log = "where it was started"

    def ended(self) -> None:
        return None

    def stopped(self) -> str:
        return ""

    def end(self) -> None:
        """Leave it running."""
