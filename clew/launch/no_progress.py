"""Watch the progress of a run's processes, and run `clew hang` when there has been none for long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.config import Config
from clew.errors import LaunchError
from clew.launch.ranks import report_failure
from clew.printing import print
from clew.processes import PARENT_VARIABLE
from clew.record.run import RunDirectory
from clew.record.run_warnings import append_warning

SUPERVISED_VARIABLE = "CLEW_SUPERVISED"
"""Variable that is set for processes of `clew train`, which watches them itself."""

LOOK_S = 1.0
"""Seconds between two looks at the status files."""

USUAL = 2.0
"""Multiple of the run's longest pause so far from which a pause counts as unusual."""

STARTING_S = 60.0
"""Minimum of the time limit in seconds before the first step, while modules are imported and models loaded."""

ANSWER_S = 120.0
"""Time limit of `clew hang`."""

NO_PROGRESS = ("process", "pid", "host", "started", "updated", "waits", "warning", "tokens_per_s", "cache_bytes")
"""Fields of a status file that say nothing about progress: they may change without it."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang that `clew hang` diagnosed."""

    pattern: str
    explanation: str
    quiet_s: float
    """Seconds without progress."""
    report: Path
    started: bool
    """True if a step was committed since the processes were started. Before that, slow imports can look like a hang."""


class Watch:
    """Watcher of the progress of one run's processes, which runs `clew hang` when there is none."""

    def __init__(self, run: RunDirectory, after_s: float | None) -> None:
        """Prepare to watch.

        Args:
            after_s: Seconds without progress after which `clew hang` runs; None: never.
        """
        self._run = run
        self._after_s = after_s
        self._asking: subprocess.Popen[str] | None = None
        self.begin()

    def begin(self) -> None:
        """Start afresh, because the processes were just started."""
        self.stop()
        self._marks: dict[str, Any] = {}
        self._progressed_at: dict[str, float] = {}
        self._last = self._patient_from = time.monotonic()
        self._longest_s = 0.0
        self._first = self._run.steps.count()
        self._started = False
        self._next = self._asked_at = 0.0
        self._patience = 1

    def look(self) -> Hang | None:
        """Look at the status files, at most once a second. Return a hang when `clew hang` has just diagnosed one."""
        now = time.monotonic()
        if self._after_s is None or now < self._next:
            return None
        self._next = now + LOOK_S
        self._started = started = self._run.steps.json_path(self._first).exists()
        if (progressed := self._last_progress(now)) > self._last:
            self._longest_s = max(self._longest_s, progressed - self._last) if started else 0.0
            self._last = self._patient_from = progressed
            self._patience = 1
        if self._asking is not None:
            return self._answer(now)
        least_s = USUAL * self._longest_s if started else STARTING_S
        if now - self._patient_from >= self._patience * max(self._after_s, least_s):
            self._ask(now)
        return None

    def stop(self) -> None:
        """End `clew hang` if it runs."""
        if self._asking is not None:
            self._asking.kill()
            self._asking.communicate()
            self._asking = None

    def _last_progress(self, now: float) -> float:
        """Return when the trainer last made progress; while it waits for rollout, when any process last did."""
        rollout_counts = False
        for path in self._run.status.glob("[!.]*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                status = json.loads(path.read_text())
                mark = {name: value for name, value in status.items() if name not in NO_PROGRESS}
                mark["doing"] = re.sub(r"\d+", "#", status["doing"])  # it may count the seconds of a wait
                if mark != self._marks.get(path.stem):
                    self._marks[path.stem], self._progressed_at[path.stem] = mark, now
                if path.stem.startswith("trainer"):
                    rollout_counts |= any(wait["unblocks"] == "rollout" for wait in status["waits"])
        counted = [at for name, at in self._progressed_at.items() if rollout_counts or name.startswith("trainer")]
        return max(counted, default=self._last)

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._report = self._run.reports / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.json"
        command = [sys.executable, "-P", "-m", "clew", "hang", str(self._run.path), "--json", str(self._report)]
        self._asking = subprocess.Popen(
            [*command, "--html", str(self._report.with_suffix(".html"))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )

    def _answer(self, now: float) -> Hang | None:
        asking = self._asking
        assert asking is not None
        if asking.poll() is None and now - self._asked_at < ANSWER_S:
            return None
        late = asking.poll() is None
        asking.kill()
        error = asking.communicate()[1].strip().removeprefix("clew: ")
        self._asking = None
        quiet_s = now - self._last
        page = self._report.with_suffix(".html")
        went_on = self._last > self._asked_at
        if not went_on:
            self._patient_from, self._patience = now, 2 * self._patience
        if went_on or asking.returncode == 0:  # nothing hangs
            self._report.unlink(missing_ok=True)
            page.unlink(missing_ok=True)
            return None
        # Python itself exits with 1, too, when it cannot import a module.
        if late or asking.returncode not in (1, 3) or not self._report.exists():
            why = f"gave no answer within {ANSWER_S:.0f} s" if late else f"could not say why: {error}"
            self._warn(f"no progress for {quiet_s:.0f} s, and `clew hang` {why}")
            return None
        verdict = json.loads(self._report.read_text())
        pattern, explanation = verdict["pattern"], verdict["explanation"]
        self._warn(f"no progress for {quiet_s:.0f} s: {pattern}. {explanation} Report: {page}")
        if asking.returncode == 3:  # not judged
            return None
        return Hang(
            pattern=pattern, explanation=explanation, quiet_s=quiet_s, report=self._report, started=self._started
        )

    def _warn(self, text: str) -> None:
        append_warning(self._run.warnings_path, process="supervisor", step=self._run.steps.count(), text=text)


@contextmanager
def with_hang_watch(config: Config) -> Iterator[None]:
    """Watch a run from a thread of its first rank, unless `clew train` does: for `clew sft` and `clew learn`.

    After a diagnosed hang, hang.action=abort and restart end this process with the verdict as its error: its launcher
    ends the other ranks, and may start all of them again.
    """
    if os.environ.get("RANK", "0") != "0" or SUPERVISED_VARIABLE in os.environ or config.hang.after_s is None:
        yield
        return
    end = threading.Event()
    thread = threading.Thread(target=_watch_until, args=(config, end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _watch_until(config: Config, end: threading.Event) -> None:
    while not (config.run_path / "status").is_dir():  # made once the data has been read
        if end.wait(LOOK_S):
            return
    watch = Watch(RunDirectory(config.run_path), config.hang.after_s)
    while not end.wait(LOOK_S):
        hang = watch.look()
        if hang is None:
            continue
        text = f"no progress for {hang.quiet_s:.0f} s: {hang.pattern}. {hang.explanation} (report: {hang.report})"
        ends = hang.started and config.hang.action != "warn" and not end.is_set()
        if not ends or not report_failure(LaunchError(text)):
            print(f"clew: {text}" if ends else f"warning: {text}", file=sys.stderr, flush=True)
        if ends:
            os._exit(2)  # the main thread is stuck in a wait, and cannot be asked to end
    watch.stop()
