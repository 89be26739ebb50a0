"""A stopwatch for the activities of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of a step by activity. Time inside a nested activity counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within = 0.0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        before, self._within = self._within, 0.0
        began = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.seconds[what] += whole - self._within
            self._within = before + whole

    def note(self, what: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere. The activity that goes on here does not count them again."""
        self.seconds[what] += seconds
        self._within += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by activity."""
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken
