"""Attribution of a stack to the user's code, a library's, or Clew's own."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import clew
from clew.asyncio_tasks import suspended

_CLEW = str(Path(clew.__file__).parent) + os.sep  # without it, a user's clew_agents.py beside Clew would be Clew's
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LOOP = ("asyncio/base_events.py", "asyncio/events.py", "asyncio/runners.py")
_RUNS = ("_run_once", "run_forever", "run_until_complete", "_run", "run")

Line = tuple[CodeType, int]
"""A function's code, and a line number in its file."""


@dataclass(frozen=True, order=True)
class Place:
    """A line of code, and the call that it had made."""

    where: str
    """`file:line function` of the user's code if it is on the stack, otherwise of the innermost line of a library."""
    within: str = ""
    """Innermost call in an installed library, or else in Python's own, that the line led to; empty without one."""
    user: bool = True
    """False if none of the user's code was on the stack."""

    def __str__(self) -> str:
        return f"{self.where}, in {self.within}" if self.within else self.where


class Code:
    """Distinguishes the user's code from that of libraries."""

    def __init__(self, agent: object) -> None:
        """Count the agent's own package as the user's code, wherever it is installed."""
        package = type(agent).__module__.partition(".")[0]
        file = getattr(sys.modules.get(package), "__file__", None)
        self._own = str(Path(file).parent) + os.sep if file and Path(file).name == "__init__.py" else file
        self.is_user = cache(self._is_user)
        run = getattr(inspect.unwrap(getattr(agent, "run", agent)), "__code__", None)  # type: ignore[arg-type]
        self.defined_at = line_in_words((run, run.co_firstlineno)) if run is not None else ""
        """Line where the agent's `run` is defined; empty if it is unknown."""

    def _is_user(self, file: str) -> bool:
        if file.startswith(("<", _CLEW)):
            return False
        if self._own and file.startswith(self._own):
            return True
        return "site-packages" not in file and not file.startswith(_LIBRARIES)

    def place(self, stack: Iterable[Line]) -> Place | None:
        """Return the innermost line of the user's code in a stack (innermost first), or else of a library.

        The result is None if only Clew's code is on the stack.
        """
        lines = [line for line in stack if not is_clew(line[0].co_filename)]
        if not lines:
            return None
        number = next((i for i, line in enumerate(lines) if self.is_user(line[0].co_filename)), None)
        if number is None:
            return Place(line_in_words(lines[0]), user=False)
        called = lines[:number]
        library = next((line for line in called if "site-packages" in line[0].co_filename), None)
        within = library or (called[0] if called else None)
        return Place(line_in_words(lines[number]), line_in_words(within) if within else "")

    def users_place(self, stack: Iterable[Line]) -> Place | None:
        """Return the innermost line of the user's code in a stack; None if there is none."""
        place = self.place(stack)
        return place if place is not None and place.user else None


def is_clew(file: str) -> bool:
    return file.startswith(_CLEW)


def is_loop(file: str) -> bool:
    """Return whether a source file belongs to asyncio's event loop."""
    return file.endswith(_LOOP)


def stack_of_thread(thread_id: int) -> list[Line]:
    """Return the current stack of a thread, innermost first, up to its event loop or the thread's start."""
    return list(lines_of(sys._current_frames().get(thread_id)))


def waits_for_events(thread_id: int) -> bool:
    """Return whether a thread's event loop has nothing to do.

    This looks at the stack, because asking the loop itself would wake it, and on a busy machine the loop would then
    have to wait for a processor each time.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None or not frame.f_code.co_filename.endswith("selectors.py") or frame.f_back is None:
        return False
    caller = frame.f_back.f_code  # subprocess waits in a selector, too, and blocks the loop
    return is_loop(caller.co_filename) and caller.co_name in _RUNS


def lines_of(frame: FrameType | None) -> Iterator[Line]:
    """Yield the stack from a frame outwards, innermost first, up to its event loop or the thread's start."""
    while frame is not None:
        code = frame.f_code
        if is_loop(code.co_filename) and code.co_name in _RUNS:
            return
        yield code, frame.f_lineno
        frame = frame.f_back


def stack_of_error(error: BaseException) -> list[Line]:
    """Return the stack in which an error was raised, innermost first."""
    return [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)][::-1]


def stack_of_coroutine(awaited: Any) -> list[Line]:
    """Return the stack of a suspended coroutine, innermost first.

    It continues into the tasks that the coroutine awaits, and into the first unfinished child of an `asyncio.gather`.
    """
    lines: list[Line] = []
    while awaited is not None and len(lines) < 100:
        code, frame, inner = suspended(awaited)
        if code is not None and frame is not None:
            lines.append((code, frame.f_lineno))
            if inner is None and "clew_drives" in code.co_varnames:
                inner = frame.f_locals.get("clew_drives")  # see agent_steps.driven
        if hasattr(awaited, "get_coro"):
            inner = awaited.get_coro()
        elif getattr(awaited, "_children", None):  # of asyncio.gather
            inner = next((child for child in awaited._children if not child.done()), None)
        awaited = inner
    return lines[::-1]


def working_directory() -> Path:
    """Return the working directory; the root if an episode has removed it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def shown_path(name: str) -> str:
    """Return the path of a source file, shortened: relative to the working directory or to the library folder."""
    file = Path(name)
    for folder in (working_directory(), *map(Path, _LIBRARIES)):
        if file.is_relative_to(folder):
            file = file.relative_to(folder)
            break
    parts = file.parts
    return str(Path(*parts[parts.index("site-packages") + 1 :])) if "site-packages" in parts else str(file)


def line_in_words(line: Line) -> str:
    """Return a line as `file:line function`."""
    code, number = line
    return f"{shown_path(code.co_filename)}:{number} {code.co_qualname}"
