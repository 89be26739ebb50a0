"""Lines of the user's code that created a task, a thread, a process, a file or a socket, or drew a random number."""

from __future__ import annotations

import functools
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from clew.stress import audit
from clew.stress.frames import Code, lines_of, stack_of_coroutine, told
from clew.stress.steps import current_episode

DRAWS: dict[ModuleType, tuple[str, ...]] = {
    random: (
        *("random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss"),
        *("getrandbits", "triangular", "expovariate", "normalvariate"),
    ),
    uuid: ("uuid1", "uuid4"),
    secrets: ("token_hex", "token_urlsafe", "token_bytes", "choice", "randbelow"),
    os: ("urandom",),
    time: ("time", "time_ns"),
}
"""Functions whose results differ in each run."""

NUMPY_DRAWS = (
    *("rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "uniform", "normal"),
    "default_rng",
)
"""Functions of numpy.random whose results differ in each run. They are watched only if it has been imported."""


STARTS_THREAD = ("_thread.start_new_thread", "_thread.start_joinable_thread")

HEARD = frozenset(("open", "socket.connect", *STARTS_THREAD, "subprocess.Popen", "os.fork", "os.posix_spawn"))
"""Audit events that are recorded."""


class Origins:
    """Records, while entered, the lines of the user's code that create what an episode may leave behind."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
        self.tasks: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.files: dict[str, str] = {}
        """Line that opened each file, by absolute path."""
        self.sockets: dict[int, str] = {}
        """Line that connected each socket, by file descriptor."""
        self.processes: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        """Lines that drew random numbers or read the clock, with counts."""
        self._replaced: list[tuple[ModuleType, str, Callable[..., Any]]] = []

    async def __aenter__(self) -> Origins:
        self._listening = audit.listening(self._hear)
        self._listening.__enter__()
        modules = dict(DRAWS)
        if "numpy.random" in sys.modules:
            modules[sys.modules["numpy.random"]] = NUMPY_DRAWS
        for module, names in modules.items():
            for name in names:
                original = getattr(module, name)
                self._replaced.append((module, name, original))
                setattr(module, name, self._noting(original))
        return self

    async def __aexit__(self, *_: object) -> None:
        for module, name, original in self._replaced:
            setattr(module, name, original)
        self._listening.__exit__(None, None, None)

    def made(self, task: Any) -> None:
        """Record the line that is creating a task."""
        self.tasks[task] = self.place(1)

    def place(self, depth: int) -> str:
        """Return the user's line that is running, or the line where the current episode waits; empty if there is none.

        Args:
            depth: Number of frames to skip above the caller.
        """
        place = self._code.place(lines_of(sys._getframe(depth + 1)))
        episode = current_episode()
        if (place is None or not place.user) and episode is not None and episode.coroutine is not None:
            place = self._code.place(stack_of_coroutine(episode.coroutine))
        return place.where if place is not None and place.user else ""

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        place = self.place(2) if event in HEARD else ""
        if not place:
            return
        if event == "open":
            if isinstance(arguments[0], (str, bytes)):
                path = str(Path(os.fsdecode(arguments[0])).absolute())
                before = self.files.get(path, "")  # mkstemp opens a file, and another line opens it again
                if place not in before:
                    self.files[path] = f"{before} or {place}" if before else place
        elif event == "socket.connect":
            self.sockets[arguments[0].fileno()] = place
        elif event in STARTS_THREAD:
            thread = getattr(arguments[0], "__self__", None)
            if isinstance(thread, threading.Thread):
                self.threads[thread] = place
        else:
            self.processes[place] += 1

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            if self._code.is_user(frame.f_code.co_filename) and current_episode() is not None:
                self.drawn[told((frame.f_code, frame.f_lineno))] += 1
            return original(*arguments, **named)

        return call
