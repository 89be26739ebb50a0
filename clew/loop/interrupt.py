"""Handling of requests to end (Ctrl-C, SIGTERM): at first only at safe places, after a while anywhere."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clew.errors import Interrupted

PATIENCE_S = 5.0
"""Seconds that the process has to reach a safe place to end; after that it is interrupted wherever it is."""


class Interrupts:
    """Holds SIGINT and SIGTERM back until `check` is called.

    After `PATIENCE_S`, or at a second signal, they raise KeyboardInterrupt instead: in user code that does not return,
    or in a long step. Use it in the main thread only. Ranks other than 0 never call `check`: rank 0 tells them when to
    end, and they wait twice as long for it.
    """

    def __init__(self, *, leads: bool = True) -> None:
        self._asked = self._holding = False
        self._patience_s = PATIENCE_S if leads else 2 * PATIENCE_S
        self._wake: Callable[[], object] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def check(self) -> None:
        """Raise Interrupted when somebody asked this process to end."""
        if self._asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupted("")

    def hold(self) -> None:
        """Interrupt nothing from now on, however long it takes, unless a second signal comes."""
        self._holding = True
        if self._asked:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do not interrupt the block, however long it takes, unless a second signal comes."""
        self.hold()
        try:
            yield
        finally:
            self._holding = False
            if self._asked:
                signal.setitimer(signal.ITIMER_REAL, self._patience_s)

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Call `wake` when somebody asks this process to end, to stop a wait in which nobody calls `check`."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    def _ask(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        # Not before: until now, SIGALRM belongs to user code. The default handler of SIGINT raises KeyboardInterrupt.
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        if not self._holding:
            signal.setitimer(signal.ITIMER_REAL, self._patience_s)
        if self._wake is not None:
            self._wake()
