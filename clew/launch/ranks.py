"""Start the ranks of a trainer on this machine: the same command once per rank, as torchrun would.

The first rank that fails ends all others, and its error is the one that is reported. All ranks die with this process,
however it dies. Ranks that torchrun starts do not need this module, as torchrun sets the same variables.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from clew.errors import DEFECT, ClewError, ConfigError, Interrupted, LaunchError, RecordError, described
from clew.processes import PARENT_VARIABLE, SOCKET_VARIABLE, free_port, how_it_ended, written_since

ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names the file where a rank writes why it failed, as in torch.distributed.elastic. torchrun and
`run_ranks` show its content."""

OWN_LAUNCHER_VARIABLE = "CLEW_OWN_LAUNCHER"
"""Variable that is set for ranks that `run_ranks` started: `run_ranks` then reports why they failed."""

LONGEST_SOCKET = 108
"""Number of bytes that the path of a socket must stay below (unix(7)): torch waits forever if it is longer."""

LAST_LINES = 12
"""Number of lines of a rank's output that are shown when it was killed."""

POLL_S = 0.05

TOGETHER_S = 0.5
"""Seconds after the first failure within which other ranks may fail for the same reason."""


def run_ranks(ranks: int, arguments: list[str], logs: Path | None = None) -> None:
    """Run `clew ARGUMENTS` in `ranks` processes until all are done.

    Rank 0 has this process's terminal and gets its SIGINT, SIGTERM and SIGHUP. The others write trainer-R.log in
    `logs`; None: their output is deleted at the end, and only the last lines of a rank that was killed are shown.

    Raises:
        LaunchError: A rank failed. The message gives the first cause; the other ranks have been killed.
        Interrupted: The ranks ended because somebody asked them to.
        SystemExit: A rank has already printed what is wrong, and nothing needs to be added.
    """
    with tempfile.TemporaryDirectory(prefix="clew-ranks-") as folder:
        errors = [Path(folder) / f"rank-{rank}.json" for rank in range(ranks)]
        written = [(logs or Path(folder)) / f"trainer-{rank}.log" for rank in range(ranks)]
        begins = [log.stat().st_size if log.exists() else 0 for log in written]
        port = free_port()
        children: list[subprocess.Popen[bytes]] = []

        def pass_on(number: int, _: object) -> None:
            running = [child for child in children if child.poll() is None]
            if running:  # rank 0, unless it is done
                running[0].send_signal(number)

        try:
            for rank in range(ranks):
                children.append(_start(rank, ranks, port, arguments, errors[rank], written[rank]))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, pass_on)
            failed = _wait(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        if failed:
            # Rank 0 wrote on the terminal.
            ends = [_last_lines(*pair, kept=logs is not None) for pair in zip(written[1:], begins[1:], strict=True)]
            cause = _first_cause(failed, errors, ["", *ends])
            if not cause:  # a rank has said all, and its exit code is the answer
                raise SystemExit(max(failed.values()))
            # The interrupted rank ends; others find only that it is gone.
            raise Interrupted(cause) if max(failed.values()) > 128 else LaunchError(cause)


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables (torchrun's) that make a process rank `rank` of `ranks`, which meet at `port`.
    If the process calls `die_with_parent`, it dies with this one."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PARENT_VARIABLE: str(os.getpid()),
    }


def report_failure(error: BaseException) -> bool:
    """Write down why this rank failed, if its launcher asked for that. Return whether the launcher is `run_ranks`,
    which reports the error. The text is empty for SystemExit, whose message has already been printed."""
    path = os.environ.get(ERROR_VARIABLE)
    if path is None:
        return False
    now = time.time()
    text = ""
    if not isinstance(error, SystemExit):
        text = str(error) if isinstance(error, ClewError) else described(error)
    # torchrun wants `timestamp`, in whole seconds; `time` tells which of several ranks failed first.
    message = {"message": text, "extraInfo": {"timestamp": str(int(now)), "time": now}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))
    return OWN_LAUNCHER_VARIABLE in os.environ


def starts_ranks(ranks: int) -> bool:
    """Return whether this process has to start the trainer's ranks, because it is not one of them itself."""
    return ranks > 1 and "RANK" not in os.environ


def check_world(ranks: int) -> None:
    """Raise ConfigError when a launcher started a different number of ranks than launch.ranks."""
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and size != str(ranks):
        advice = f"Set launch.ranks={size}" if size.isdecimal() else "Its launcher must set WORLD_SIZE to a number"
        raise ConfigError(f"Cannot start this rank: WORLD_SIZE is {size!r}, and launch.ranks is {ranks}. {advice}.")


def _start(rank: int, ranks: int, port: int, arguments: list[str], error: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start one rank in its own session, so that Ctrl-C reaches only the parent."""
    own = {OWN_LAUNCHER_VARIABLE: "1", ERROR_VARIABLE: str(error)}
    environment = {**os.environ, **rank_variables(rank, ranks, port), **own}
    if len(os.fsencode(served := error.with_suffix(".sock"))) < LONGEST_SOCKET:
        environment[SOCKET_VARIABLE] = str(served)
    with log.open("ab") if rank else nullcontext() as output:  # rank 0 writes where this process does
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "clew", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )


def _wait(children: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all ranks are done, or until shortly after one has failed.

    Return the exit codes of failed ranks, without those that crashed later than others failed: a rank may crash because
    its peer is gone. SIGKILL is never such a crash.
    """

    def failed() -> dict[int, int]:
        return {rank: code for rank, child in enumerate(children) if (code := child.poll())}

    while any(child.poll() is None for child in children) and not failed():
        time.sleep(POLL_S)
    # Polled again: the rank that made another one fail ended earlier, but perhaps just after it was polled.
    first = failed()
    deadline = time.monotonic() + TOGETHER_S
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(POLL_S)
    return {rank: code for rank, code in failed().items() if rank in first or code >= 0 or code == -signal.SIGKILL}


def _first_cause(failed: dict[int, int], errors: list[Path], ends: list[str]) -> str:
    """Return which rank failed first and its error; empty when that rank has already printed everything.

    Args:
        failed: Exit codes of the ranks that ended before the others were killed.
        errors: File of each rank, see `report_failure`.
        ends: Last lines of each rank's output, shown for a rank that reported nothing, or a defect.
    """
    ranks = len(errors)
    killed = [rank for rank, code in failed.items() if code < 0]
    reported = {rank: read for rank in failed if (read := _read_failure(errors[rank])) is not None}
    if killed or not reported:  # a killed rank reports nothing, and others only report that it is gone
        rank = (killed or list(failed))[0]
        return f"trainer rank {rank} of {ranks} {how_it_ended(failed[rank])}.{ends[rank]}"
    first = min(reported, key=lambda rank: reported[rank][0])
    message = reported[first][1]
    everyone = len(reported) == ranks and all(each == message for _, each in reported.values())
    if everyone or not message or failed[first] > 128:
        return message
    return f"trainer rank {first} of {ranks}: {message}{ends[first] if failed[first] == DEFECT else ''}"


def _last_lines(log: Path, begin: int, *, kept: bool) -> str:
    """Return the end of what a rank wrote, as the rest of a message. It names the log if that is `kept`."""
    lines = written_since(log, begin).splitlines()[-LAST_LINES:]
    where = f" (full log: {log})" if kept else ""
    return "\n".join([f" Its last lines{where}:", *lines]) if lines else " It wrote nothing."


def _read_failure(path: Path) -> tuple[float, str] | None:
    """Return when a rank failed and why, as `report_failure` wrote it; None if it wrote nothing or only a part."""
    from clew.reading import read_json  # brings pydantic, which `clew --help` does without

    try:
        message = read_json(path, dict[str, Any])["message"]
        return float(message["extraInfo"]["time"]), str(message["message"])
    except (RecordError, LookupError, TypeError, ValueError):
        return None
