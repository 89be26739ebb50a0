"""Process-wide state that an episode changes: it affects all other episodes, and the trainer's process too."""

from __future__ import annotations

import functools
import locale
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from clew.stress.frames import Code, lines_of, stack_of_coroutine
from clew.stress.steps import Episode
from clew.stress.verdict import Verdict

CALLS: dict[str, tuple[ModuleType, tuple[str, ...]]] = {
    "the working directory": (os, ("chdir", "fchdir")),
    "the umask": (os, ("umask",)),
    "the locale": (locale, ("setlocale",)),
    "the handler of": (signal, ("signal",)),
    "os.environ": (os, ("putenv", "unsetenv")),
}
"""Module and functions that change each kind of state. The key is the beginning of the state's name."""


@dataclass(frozen=True, kw_only=True)
class Change:
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
        """Line that last changed each kind of state."""
        self._replaced: list[tuple[ModuleType, str, Callable[..., Any]]] = []
        self._left = False
        """True after the exit. Tasks that an episode left behind still run then, while others restore their state."""
        self.changes: list[Change] = []

    async def __aenter__(self) -> ProcessState:
        self._first = self._before = _now()
        for name, (module, functions) in CALLS.items():
            for function in functions:
                original = getattr(module, function)
                self._replaced.append((module, function, original))
                setattr(module, function, self._noting(name, original))
        return self

    async def __aexit__(self, *_: object) -> None:
        for module, function, original in self._replaced:
            setattr(module, function, original)
        with self._lock:
            self._left = True
        self._restore()

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            if (place := self._code.place(lines_of(sys._getframe(1)))) is not None and place.user:
                self._called[name] = str(place)
            return original(*arguments, **named)

        return call

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
                if now.get(name) != self._before.get(name):
                    where = next((place for kind, place in self._called.items() if name.startswith(kind)), None)
                    where = where or str(self._code.place(stack_of_coroutine(episode.coroutine)) or "")
                    before, after = self._before.get(name), now.get(name)
                    change = Change(name=name, before=before, now=after, where=where, episode=episode.id)
                    self.changes.append(change)
            self._before = now

    def _restore(self) -> None:
        now = _now()
        for name in now.keys() | self._first.keys():
            was = self._first.get(name)
            if now.get(name) == was:
                continue
            if name.startswith("os.environ"):
                variable = name[len("os.environ['") : -len("']")]
                os.environ.pop(variable, None)
                if was is not None:
                    os.environ[variable] = was
            elif name.startswith("the handler of"):
                if threading.current_thread() is threading.main_thread() and was is not None:
                    signal.signal(signal.Signals[name.rpartition(" ")[2]], was)
            elif was is not None:
                restore: dict[str, Callable[[], Any]] = {
                    "the working directory": functools.partial(os.chdir, was),
                    "the umask": lambda was=was: os.umask(int(was, 8)),
                    "the locale": functools.partial(locale.setlocale, locale.LC_ALL, was),
                }
                restore[name]()


def _now() -> dict[str, Any]:
    """Return the present state, by name."""
    state: dict[str, Any] = {f"os.environ['{name}']": value for name, value in os.environ.items()}
    state |= {f"the handler of {each.name}": signal.getsignal(each) for each in signal.Signals}
    state["the working directory"] = str(Path.cwd())
    state["the locale"] = locale.setlocale(locale.LC_ALL)
    state["the umask"] = next(
        (line.split()[1] for line in _status().splitlines() if line.startswith("Umask:")), None
    )  # on Linux; elsewhere it cannot be read without being set
    return state


def _status() -> str:
    try:
        return Path("/proc/self/status").read_text()
    except OSError:
        return ""


def verdicts(changes: list[Change]) -> list[Verdict]:
    """Return a verdict for each name that was changed.

    An environment variable that all episodes set to the same value may be intended, and is only a suspicion.
    """
    by_name: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_name[change.name].append(change)
    found = []
    for name, made in by_name.items():
        perhaps = name.startswith("os.environ") and len({change.now for change in made}) == 1
        episodes = sorted({change.episode for change in made})
        found.append(
            Verdict(
                kind="shared",
                what=f"{name} is changed by an episode, for the whole process"
                + (", perhaps once for all" if perhaps else ": all others, and whatever else runs here, have it too"),
                where=made[0].where,
                evidence=[
                    *(f"{each.episode}: from {each.before!r} to {each.now!r}" for each in made[:3]),
                    f"changed by {', '.join(episodes[:6])}{', …' if len(episodes) > 6 else ''}",
                    "hand it to whatever needs it (cwd=, env= of a subprocess), or set it before training starts",
                ],
                certain=not perhaps,
            )
        )
    return found
