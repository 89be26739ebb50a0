"""Helpers that the benchmarks share: one line a ratio, and a clock for everything that happens inside clew/record/."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


def show(name: str, ratio: float, limit: str = "", detail: str = "", *, percent: bool = False) -> None:
    """One line: the ratio, and the limit beside it."""
    value = f"{ratio:7.1%} " if percent else f"{ratio:7.2f}x"
    print(f"{name:<52} {value}  {f'(limit {limit})' if limit else '':<16} {detail}", flush=True)


class RecordClock:
    """Seconds during which some thread is inside the functions and methods of clew.record.

    It wraps them in this process, wherever they have been imported to; so everything else must be imported before.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_name: dict[str, float] = defaultdict(float)
        """Each counted once however they call one another; of all threads together."""
        self._lock = threading.Lock()
        self._inside = 0
        """Threads that are; `seconds` runs since `_since` while there are any."""
        self._since = 0.0
        self._within = threading.local()
        wrapped: dict[int, Any] = {}
        for module in [module for name, module in sys.modules.items() if name.startswith("clew.")]:
            for name, value in list(vars(module).items()):
                if not getattr(value, "__module__", "").startswith("clew.record"):
                    continue
                if inspect.isfunction(value):
                    if id(value) not in wrapped:
                        wrapped[id(value)] = self._timed(value)
                    setattr(module, name, wrapped[id(value)])
                elif inspect.isclass(value) and id(value) not in wrapped and not issubclass(value, BaseException):
                    wrapped[id(value)] = value
                    self._wrap_methods(value)

    def table(self, steps: int) -> str:
        """Milliseconds a step of the dearest, by name."""
        dearest = sorted(self.by_name.items(), key=lambda each: -each[1])[:8]
        return ", ".join(f"{name} {1000 * value / steps:.1f}" for name, value in dearest)

    def _wrap_methods(self, cls: type) -> None:
        for name, value in list(vars(cls).items()):
            if inspect.isfunction(value) and (not name.startswith("_") or name == "__post_init__"):
                setattr(cls, name, self._timed(value))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__qualname__

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if inspect.isgeneratorfunction(function) or getattr(self._within, "record", False):
                return function(*args, **kwargs)
            self._within.record = True
            began = self._enter()
            try:
                return function(*args, **kwargs)
            finally:
                self.by_name[name] += self._leave() - began
                self._within.record = False

        return timed

    def _enter(self) -> float:
        with self._lock:
            now = time.perf_counter()
            if self._inside == 0:
                self._since = now
            self._inside += 1
            return now

    def _leave(self) -> float:
        with self._lock:
            now = time.perf_counter()
            self._inside -= 1
            if self._inside == 0:
                self.seconds += now - self._since
            return now
