"""Waits that say what they wait for, since when, and what unblocks them.

::

    with waiting("batch for step 7", unblocks="rollout", numbers=lambda: "8 groups wanted, 5 ready, 3 running"):
        ...

A `Reporter` writes what the process does, and all its present waits, to `status/<process>.json`. `clew status`, the
progress display and the supervisor read this file. It also logs each wait that grows old.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clew.asyncio_tasks import write_tasks_on_signal
from clew.errors import Interrupted

log = logging.getLogger("clew.waits")

OLD_S = 20.0
"""Age in seconds at which a wait is logged. It is logged again each time its age has doubled."""


@dataclass(eq=False)
class Wait:
    """One thing that this process is waiting for now."""

    what: str
    unblocks: str
    """Name of who can end the wait: a process, "the workflow", "a reward worker"."""
    numbers: Callable[[], str] | None = None
    """Function that returns, as text, the numbers that decide the wait. Called for each report."""
    since: float = field(default_factory=time.time)
    log_at: float = OLD_S

    @property
    def kind(self) -> tuple[str, str]:
        """Return a key that waits for different groups, episodes or steps share: words with digits are masked."""
        return re.sub(r"\S*\d\S*", "N", self.what), self.unblocks

    def numbers_now(self) -> str:
        """Return the result of `numbers`, or its error as text: an error must not end the thread that asks."""
        try:
            return self.numbers() if self.numbers else ""
        except Exception as error:
            return f"numbers not known: {type(error).__name__}: {error}"

    def as_dict(self, alike: int = 1) -> dict[str, Any]:
        """Return the wait as the status file has it.

        Args:
            alike: Number of waits of this kind.
        """
        return {
            "what": self.what,
            "alike": alike,
            "unblocks": self.unblocks,
            "numbers": self.numbers_now(),
            "since": self.since,
        }


_waits: dict[int, Wait] = {}


@contextmanager
def waiting(what: str, *, unblocks: str, numbers: Callable[[], str] | None = None) -> Iterator[Wait]:
    """Register a wait for as long as the block runs, in a thread or a coroutine. It costs about a microsecond."""
    wait = Wait(what, unblocks, numbers)
    _waits[id(wait)] = wait
    try:
        yield wait
    finally:
        del _waits[id(wait)]


def current_waits() -> list[Wait]:
    """Return the present waits of this process, oldest first."""
    # `list` copies in one step: other threads add and remove waits meanwhile, and there is no lock
    return sorted(list(_waits.values()), key=lambda wait: wait.since)


def oldest_of_each_kind() -> list[tuple[Wait, int]]:
    """Return the oldest present wait of each kind and how many waits are of that kind, oldest first."""
    waits = current_waits()
    counts = Counter(wait.kind for wait in waits)
    oldest: dict[tuple[str, str], Wait] = {}
    for wait in waits:
        oldest.setdefault(wait.kind, wait)
    return [(wait, counts[kind]) for kind, wait in oldest.items()]


def _waits_in_short() -> list[dict[str, Any]]:
    """Return the present waits without their numbers, which may take a lock."""
    return [{"what": wait.what, "unblocks": wait.unblocks, "since": wait.since} for wait in current_waits()]


class Reporter:
    """Writes to the run directory, once a second, what this process does and what it waits for.

    The file is `status/<process>.json`:
    ``{"process", "pid", "host", "started", "updated", "doing", "version", "waits": [...], ...facts}``.
    Its waits are the oldest of each kind.
    """

    PERIOD_S = 1.0

    def __init__(self, status_folder: Path, process: str) -> None:
        self.path = status_folder / f"{process}.json"
        self.process = process
        self.facts: dict[str, Any] = {"doing": "starting", "version": None}
        self._started = time.time()
        self._stop = threading.Event()
        self._write_lock = threading.Lock()
        status_folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Reporter:
        self.write()
        write_tasks_on_signal(self.path.with_suffix(".tasks"), _waits_in_short)
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        self._stop.set()
        self._thread.join()
        if exc is None or isinstance(exc, (KeyboardInterrupt, SystemExit)):
            self.set(doing="ended")
        elif isinstance(exc, Interrupted):
            self.set(doing="ended (interrupted)")
        else:
            self.set(doing="failed", error=f"{type(exc).__name__}: {exc}")
        self.write()

    def set(self, **facts: Any) -> None:
        """Change facts, which the next write includes. `doing` is one short phrase, `version` an integer."""
        self.facts.update(facts)

    def write(self) -> None:
        """Write the status file now. An error, such as a full disk, is only logged: writing the record raises it."""
        status = {
            "process": self.process,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "updated": time.time(),
            "waits": [wait.as_dict(alike) for wait, alike in oldest_of_each_kind()],
            **self.facts,
        }
        with self._write_lock:
            beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            try:
                beside.write_text(json.dumps(status))
                beside.replace(self.path)
            except OSError as error:
                log.warning("cannot write %s: %s", self.path, error)

    def _run(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            for wait, alike in oldest_of_each_kind():
                age = time.time() - wait.since
                if age >= wait.log_at:
                    wait.log_at = 2 * age
                    more = f" and {alike - 1} more alike" if alike > 1 else ""
                    numbers = f" ({said})" if (said := wait.numbers_now()) else ""
                    log.warning(
                        "waiting %.0f s for %s%s%s; %s unblocks it", age, wait.what, more, numbers, wait.unblocks
                    )
            self.write()
