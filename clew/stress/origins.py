"""Lines of the user's code that create what an episode may leave behind, write files, or draw random numbers."""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from clew.stress.agent_steps import Episode, current_episode
from clew.stress.frames import Code, line_in_words, lines_of, stack_of_coroutine
from clew.stress.verdict import Verdict, grouped, listed

DRAWS: dict[ModuleType, tuple[str, ...]] = {
    random: (
        *("random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss"),
        *("getrandbits", "triangular", "expovariate", "normalvariate"),
    ),
    uuid: ("uuid1", "uuid4"),
    secrets: ("token_hex", "token_urlsafe", "token_bytes", "choice", "randbelow"),
    os: ("urandom",),
    time: (CLOCKS := ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")),
}
"""Functions whose results differ in each run."""

NUMPY_DRAWS = (
    *("rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "uniform", "normal"),
    "default_rng",
)
"""Functions of numpy.random whose results differ in each run. They are watched only if it has been imported."""

STARTS_PROCESS = ("subprocess.Popen", "os.fork", "os.posix_spawn")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file that an episode began to overwrite."""

    path: str
    where: str
    episode: Episode


class Origins:
    """Records, while entered, which lines of the user's code create resources, write files and draw random numbers."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._entered = ExitStack()
        self.threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
        self.tasks: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self.files: dict[str, str] = {}
        """Line that opened each file, by absolute path."""
        self.written: list[Written] = []
        self.temporary: dict[str, str] = {}
        """Line that made each temporary file or folder, by path."""
        self.sockets: dict[int, str] = {}
        """Line that connected each socket, by file descriptor."""
        self.processes: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        """Lines that drew random numbers, with counts."""
        self.clocks: Counter[str] = Counter()
        """Lines that read a clock, with counts."""

    async def __aenter__(self) -> Origins:
        _add_hook()
        _listening.append(self)
        self._entered.callback(_listening.remove, self)
        modules = dict(DRAWS)
        if "numpy.random" in sys.modules:
            modules[sys.modules["numpy.random"]] = NUMPY_DRAWS
        draws = [(module, name) for module, names in modules.items() for name in names]
        self._entered.enter_context(calls_noted(draws, self._note_draw))
        # Python 3.11 raises no audit event for a thread.
        self._entered.enter_context(calls_noted([(threading.Thread, "start")], self._note_thread))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered.close()

    def made(self, task: Any) -> None:
        """Record the line that is creating a task."""
        self.tasks[task] = self._place()

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record an audit event of Python, in the thread in which it happens."""
        if event == "open":
            if isinstance(arguments[0], (str, bytes)):
                self._note_open(*arguments)
        elif event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
            if place := self._place():
                self.temporary[str(arguments[0])] = place
        elif event == "socket.connect":
            if place := self._place():
                self.sockets[arguments[0].fileno()] = place
        elif event in STARTS_PROCESS and (place := self._place()):
            self.processes[place] += 1

    def _place(self) -> str:
        """Return the user's line that is running, or the line where the current episode waits; empty without one."""
        place = self._code.users_place(lines_of(sys._getframe(1)))
        episode = current_episode.get()
        if place is None and episode is not None:
            place = self._code.users_place(stack_of_coroutine(episode.coroutine))
        return place.where if place is not None else ""

    def _note_open(self, name: str | bytes, mode: str | None, flags: int) -> None:
        place = self._place()
        if not place:
            return
        path = str(Path(os.fsdecode(name)).absolute())
        before = self.files.get(path, "")  # mkstemp opens a file, and another line opens it again
        if place not in before:
            self.files[path] = f"{before} or {place}" if before else place
        episode = current_episode.get()
        overwrites = flags & (os.O_WRONLY | os.O_RDWR) and not flags & (os.O_APPEND | os.O_EXCL)
        if episode is None or not overwrites or path.startswith("/dev/"):
            return
        running = self._code.users_place(lines_of(sys._getframe(1)))
        if running is not None:
            self.written.append(Written(path=path, where=str(running), episode=episode))

    def _note_thread(self, caller: FrameType, function: str, thread: threading.Thread) -> None:
        if place := self._place():
            self.threads[thread] = place

    def _note_draw(self, caller: FrameType, function: str, /, *arguments: Any, **named: Any) -> None:
        if function == "default_rng" and any(each is not None for each in (*arguments, *named.values())):
            return  # it has a seed
        if self._code.is_user(caller.f_code.co_filename) and current_episode.get() is not None:
            lines = self.clocks if function in CLOCKS else self.drawn
            lines[line_in_words((caller.f_code, caller.f_lineno))] += 1


_listening: list[Origins] = []


@functools.cache
def _add_hook() -> None:
    """Add the audit hook, once for the whole process: Python can never remove one."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for origins in _listening:
            origins.hear(event, arguments)

    sys.addaudithook(hook)


@contextmanager
def calls_noted(functions: Iterable[tuple[ModuleType | type, str]], note: Callable[..., None]) -> Iterator[None]:
    """Call `note` with the caller's frame, the function's name and the arguments before each call, while entered."""

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            note(sys._getframe(1), name, *arguments, **named)
            return original(*arguments, **named)

        return call

    originals = [(module, name, getattr(module, name)) for module, name in functions]
    for module, name, original in originals:
        setattr(module, name, noting(name, original))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def judge_written(written: Sequence[Written], *, matters: bool) -> list[Verdict]:
    """Return one verdict for each line that writes a file which another episode writes at the same time.

    `matters` is True if episodes were seen to depend on one another. Otherwise, the file may be a cache or a log, and
    the verdict is only a suspicion.
    """
    by_line: dict[str, dict[str, list[Written]]] = defaultdict(dict)
    for path, files in grouped(written, lambda file: file.path).items():
        second = next((b for a, b in itertools.pairwise(files) if _overlap(a.episode, b.episode)), None)
        if second is not None:
            by_line[second.where][path] = files
    verdicts = []
    for where, by_path in by_line.items():
        path, *others = by_path
        what = f"the file {path} is" if not others else f"the file {path} and {len(others)} more are each"
        what += " written by episodes that run at the same time"
        what += "; each reads the other's" if matters else ", perhaps a cache"
        advice = "give each episode a folder of its own: tempfile.TemporaryDirectory()"
        evidence = [f"written by {listed(file.episode.id for file in by_path[path])}", advice]
        verdicts.append(Verdict(kind="shared", what=what, where=where, evidence=evidence, certain=matters))
    return verdicts


def _overlap(first: Episode, second: Episode) -> bool:
    return first is not second and second.started < first.finished and first.started < second.finished
