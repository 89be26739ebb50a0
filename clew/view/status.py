"""State of a run's processes: what each does and waits for. `clew status` shows it.

Only the run directory is read. So any terminal shows the same, even for a run that hangs.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any, NotRequired

from pydantic import with_config
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from typing_extensions import TypedDict

from clew.errors import RecordError
from clew.processes import is_lock_free
from clew.reading import STRICT, Count, Moment, read_json
from clew.record.run import RunDirectory
from clew.record.run_warnings import read_warnings, warnings_in_words
from clew.view.find_episode import settings_of
from clew.view.text import one_line, pairs

ROLES = ("trainer", "rollout", "server")
"""Processes that are listed first, in this order."""
ENDED = ("ended", "failed")
"""Words with which `doing` begins after the end of a process."""


@with_config(STRICT)
class Waiting(TypedDict):
    """One kind of wait of a process, as `clew.waits` writes it."""

    what: str
    alike: Count
    unblocks: str
    numbers: str
    since: Moment


@with_config(STRICT)
class Status(TypedDict):
    """Fields of status/PROCESS.json that are checked when it is read. It has more."""

    process: str
    pid: Count
    updated: Moment
    doing: str
    version: Count | None
    waits: list[Waiting]
    error: NotRequired[str]
    warning: NotRequired[str | None]


STALE_S = 5.0
"""Age in seconds from which a status file belongs to a process that is stopped, hung in C code, or gone."""


def read_statuses(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the contents of the status files of a run's processes, trainer first. `doing` says if one was killed."""
    paths = sorted(run.status.glob("[!.]*.json"), key=lambda p: (len(p.stem), p.stem))  # server-10 after server-2
    paths.sort(key=lambda p: ROLES.index(p.stem) if p.stem in ROLES else 9)
    statuses: list[dict[str, Any]] = []
    for path in paths:
        statuses.append(status := read_json(path, Status))
        here = status.get("host") == socket.gethostname()  # a lock may not be visible on another machine
        if here and not status["doing"].startswith(ENDED) and is_lock_free(path.with_suffix(".lock")):
            status["doing"] = f"ended (pid {status['pid']} is gone)"
    return statuses


def ended_early(run: RunDirectory, *, with_error: bool) -> str:
    """Return a line that says that a run ended before its last step and, `with_error`, why; "" if it did not."""
    with suppress(RecordError):  # what cannot be read is reported where it is shown
        statuses = read_statuses(run)
        ended = {each["process"]: each["doing"].startswith(ENDED) for each in statuses}
        config, step = settings_of(run), run.steps.count() or max(run.checkpointed(), default=0)
        # `clew replay` with other settings trains fewer steps than the configuration says
        wanted = 0 if config.get("debug.replay_rollout_data") else config.get("training.steps")
        if "trainer" in ended and all(ended.values()) and isinstance(wanted, int) and step < wanted:
            failed = next((each for each in statuses if with_error and each.get("error")), None)
            why = f": {failed['process']} failed with {_in_a_line(failed['error']).rstrip('.')}" if failed else ""
            return f"The run has ended at step {step} of {wanted}{why}. Start it again with the same command to go on."
    return ""


def _in_a_line(error: str) -> str:
    """Return the line of an error that says what is wrong: the last one of a traceback, otherwise the first."""
    first, *more = error.strip().split("\n")
    return more[-1] if more and "Traceback" in first else first


def status_table(run: RunDirectory) -> Group:
    """Return a table of the processes: version, activity, up to four waits each; then warnings, errors and branches."""
    table = Table(expand=True, box=None, pad_edge=False)
    for column in ("process", "version", "doing", "waiting for", "since", "numbers", "unblocked by"):
        table.add_column(column, overflow="fold", no_wrap=column in ("process", "version", "since"))
    now, captions = time.time(), list[str]()
    for status in read_statuses(run):
        doing, age = status["doing"], now - status["updated"]
        alive = not doing.startswith(ENDED)
        if alive and age > STALE_S:
            doing = f"no sign of life for {age:.0f} s (pid {status['pid']})"
        waits = [_wait_cells(wait, now) for wait in status["waits"][:4] if alive] or [()]
        version = "" if status["version"] is None else str(status["version"])
        table.add_row(status["process"], version, doing, *waits[0])
        for wait in waits[1:]:
            table.add_row("", "", "", *wait)
        said = status.get("warning") if alive else one_line(_in_a_line(status.get("error", "")), 400).plain
        branched = branched_share(status.get("episodes_branched"), status.get("episodes"))
        captions += [f"{status['process']}: {note}" for note in (said, branched) if note]
    return Group(table, *(Text(each, "yellow", overflow="fold", no_wrap=False) for each in captions))


def show_status(console: Console, run: RunDirectory) -> None:
    console.print(status_table(run))
    if line := ended_early(run, with_error=False):  # the table shows the error
        console.print(Text(line, "yellow"))
    if warned := warnings_in_words(read_warnings(run.warnings_path)[0]):
        console.print()
        console.print(pairs(("warning", line) for line in warned))


def branched_share(branched: Any, episodes: Any) -> str:
    """Return a note on how many episodes branched, and what that means; "" if none did."""
    if not isinstance(branched, int) or not isinstance(episodes, int) or not 0 < branched <= episodes:
        return ""
    return (
        f"{branched} of {episodes} episodes branched ({branched / episodes:.0%}): a request did not continue the "
        f"recorded conversation, so tokens are processed again (docs/agents.md)"
    )


def _wait_cells(wait: dict[str, Any], now: float) -> tuple[str, ...]:
    more = f" (and {wait['alike'] - 1} more)" if wait["alike"] > 1 else ""
    return (wait["what"] + more, f"{now - wait['since']:.1f} s", wait["numbers"], wait["unblocks"])
