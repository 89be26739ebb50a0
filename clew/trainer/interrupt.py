"""Being asked to end (Ctrl-C, SIGTERM): first where nothing is cut in two, and only after a while anywhere."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clew.errors import Interrupted

PATIENCE_S = 5.0
"""Seconds in which the process should come to a place where it can end; after that it is cut short where it is."""


class Interrupts:
    """Holds SIGINT and SIGTERM back until `check` is called, for `PATIENCE_S` or until a second signal; then they are a
    KeyboardInterrupt: in the user's code that does not return, or in a long step. Of the main thread.

    Ranks that follow rank 0 never call `check`: it tells them when to end, and has twice the time for that.
    """

    def __init__(self, *, leads: bool = True) -> None:
        self._asked = False
        self._patience_s = PATIENCE_S if leads else 2 * PATIENCE_S
        self._wake: Callable[[], object] = _nothing
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def check(self) -> None:
        """Raise Interrupted when somebody asked."""
        if self._asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted("")

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have `wake` called when somebody asks: it ends a wait in which nobody calls `check`."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = _nothing

    def _ask(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        signal.signal(signal.SIGALRM, self._insist)  # only now: before, it is the user's code's to use
        signal.setitimer(signal.ITIMER_REAL, self._patience_s)
        self._wake()

    def _insist(self, number: int, frame: object) -> None:
        raise KeyboardInterrupt


def _nothing() -> None: ...
