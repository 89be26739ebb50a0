"""Process-wide state that an episode changes: it affects all other episodes, and the trainer's process too."""

from __future__ import annotations

import locale
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from clew.stress.agent_steps import Episode
from clew.stress.frames import Code, lines_of, stack_of_coroutine, working_directory
from clew.stress.origins import calls_noted
from clew.stress.verdict import Verdict, grouped, listed

CALLS: list[tuple[ModuleType, str]] = [
    *((os, name) for name in ("chdir", "fchdir", "umask", "putenv", "unsetenv")),
    (locale, "setlocale"),
    (signal, "signal"),
]
"""Functions that change the state of the process."""


def _changed_by(function: str, argument: Any) -> str:
    """Return the name of the state that a call changes, as in `_now`. `argument` is the first one of the call."""
    if function in ("putenv", "unsetenv"):
        return f"os.environ['{os.fsdecode(argument)}']"
    if function == "signal":
        known = argument in {*signal.Signals}  # the user's own call says what is wrong with another number
        return f"the handler of {signal.Signals(argument).name}" if known else ""
    return {"umask": "the umask", "setlocale": "the locale"}.get(function, "the working directory")


@dataclass(frozen=True, kw_only=True)
class ProcessChange:
    """One change that an episode left behind at the end of a step."""

    name: str
    before: Any
    now: Any
    where: str
    episode: str


class ProcessState:
    """Finds process-wide state that episodes change, by comparing it after each step.

    While entered, it also records the lines that change such state. On exit, it restores the original state.
    """

    def __init__(self, code: Code) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._first: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._called: dict[str, str] = {}
        """Line that last changed each piece of state, until its change is seen."""
        self._entered = ExitStack()
        self._left = False
        """True after the exit. Tasks that an episode left behind still run then, while other watches restore state."""
        self.changes: list[ProcessChange] = []

    async def __aenter__(self) -> ProcessState:
        self._first = self._before = _now()
        self._entered.enter_context(calls_noted(CALLS, self._note))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered.close()
        with self._lock:
            self._left = True
        now = _now()
        for name in now.keys() | self._first.keys():
            if now.get(name) != self._first.get(name):
                _restore(name, self._first.get(name))

    def _note(self, caller: FrameType, function: str, /, *arguments: Any, **named: Any) -> None:
        place = self._code.users_place(lines_of(caller))
        if place is not None:
            first = arguments[0] if arguments else named.get("signalnum", next(iter(named.values()), None))
            self._called[_changed_by(function, first)] = str(place)

    def look(self) -> None:
        """Take the present state as the baseline, so that earlier changes are attributed to no episode."""
        self._before = _now()

    def stepped(self, episode: Episode) -> None:
        """Attribute all changes since the last look to this episode."""
        with self._lock:
            if self._left:
                return
            now = _now()
            for name in sorted(now.keys() | self._before.keys()):
                before, after = self._before.get(name), now.get(name)
                if before != after:
                    # A line is named once: a later change may be that of a library's thread.
                    where = self._called.pop(name, "") or str(
                        self._code.place(stack_of_coroutine(episode.coroutine)) or ""
                    )
                    self.changes.append(
                        ProcessChange(name=name, before=before, now=after, where=where, episode=episode.id)
                    )
            self._before = now


def _now() -> dict[str, Any]:
    """Return the present state, by name."""
    state: dict[str, Any] = {f"os.environ['{name}']": value for name, value in os.environ.items()}
    state |= {f"the handler of {each.name}": signal.getsignal(each) for each in signal.Signals}
    state["the working directory"] = str(working_directory())
    state["the locale"] = locale.setlocale(locale.LC_ALL)
    status = Path("/proc/self/status")  # only on Linux: elsewhere, the umask cannot be read without being set
    lines = status.read_text().splitlines() if status.exists() else []
    state["the umask"] = next((line.split()[1] for line in lines if line.startswith("Umask:")), None)
    return state


_SETTERS: dict[str, Callable[[Any], object]] = {
    "the working directory": os.chdir,
    "the umask": lambda mask: os.umask(int(mask, 8)),
    "the locale": partial(locale.setlocale, locale.LC_ALL),
    **{f"the handler of {each.name}": partial(signal.signal, each) for each in signal.Signals},
}
"""Functions that restore state, by its name in `_now`, without environment variables."""


def _restore(name: str, value: Any) -> None:
    """Restore the state with this name in `_now`. None: remove a variable, but leave other state as it is."""
    if name.startswith("os.environ"):
        variable = name[len("os.environ['") : -len("']")]
        os.environ.pop(variable, None)
        if value is not None:
            os.environ[variable] = value
    elif value is not None:
        _SETTERS[name](value)


def judge_process(changes: list[ProcessChange]) -> list[Verdict]:
    """Return a verdict for each name that was changed.

    An environment variable that all episodes set to the same value may be intended, and is only a suspicion.
    """
    verdicts = []
    for name, made in grouped(changes, lambda change: change.name).items():
        perhaps = name.startswith("os.environ") and len({change.now for change in made}) == 1
        what = f"{name} is changed by an episode, for the whole process"
        what += ", perhaps once for all" if perhaps else ": all others, and whatever else runs here, have it too"
        evidence = [
            *(f"{change.episode}: from {change.before!r} to {change.now!r}" for change in made[:3]),
            f"changed by {listed(change.episode for change in made)}",
            "hand it to whatever needs it (cwd=, env= of a subprocess), or set it before training starts",
        ]
        where, certain = made[0].where, not perhaps
        verdicts.append(Verdict(kind="shared", what=what, where=where, evidence=evidence, certain=certain))
    return verdicts
