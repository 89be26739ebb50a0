"""Detection of an event loop that stands still for good.

Such a loop is in a blocking call that waits for what only another episode could give back, for example a threading.Lock
that is held across an await. The call is interrupted, so that the stress can report it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection
from types import FrameType
from typing import Self

from clew.stress.busy import Watcher, scheduled
from clew.stress.frames import Code, lines_of, stack_of_thread, told, waits_for_events
from clew.stress.serial import places_of
from clew.stress.steps import Episode
from clew.stress.verdict import Verdict

STUCK_S = 30.0
"""Seconds after which a loop that stands still without computing is taken to never move again."""

AGAIN_S = 0.05
"""Seconds after which each further such call is interrupted, once one has been seen."""

COMPUTES = 0.1
"""Share of the time above which a thread that computes, or waits for a processor, does not stand still."""

SIGNAL = signal.SIGUSR2
"""Signal that interrupts the call. Python handles signals in the main thread only."""


class Stuck(Exception):
    """Raised inside the call that would never return."""


class StuckWatch(Watcher):
    """Watches the event loop in which it is entered. This must be the main thread's."""

    def __init__(self, code: Code, running: Collection[Episode], stuck_s: float) -> None:
        """Create a watch, which lets the loop stand still for `stuck_s`. The caller keeps `running` up to date."""
        super().__init__()
        self.verdict: Verdict | None = None
        self.happened = asyncio.Event()
        self._code = code
        self._running = running
        self._stuck_s = stuck_s

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread_id, self._native_id = threading.get_ident(), threading.get_native_id()
        self._watches = threading.current_thread() is threading.main_thread()
        if self._watches:
            self._handler = signal.signal(SIGNAL, self._interrupt)
            await super().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop.set()
        if self._watches:
            await asyncio.to_thread(self.thread.join)  # it may be waiting for the loop to answer
            signal.signal(SIGNAL, self._handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        place = self._code.place(lines_of(frame))
        if place is not None and place.user:  # otherwise it has moved on by itself
            raise Stuck("the event loop stood still here, and was interrupted")

    def run(self) -> None:
        while not self.stop.wait(AGAIN_S):
            if waits_for_events(self._thread_id):
                continue
            answered = threading.Event()
            self._loop.call_soon_threadsafe(answered.set)
            patience = self._stuck_s if self.verdict is None else AGAIN_S
            wanted = self._wanted_s()
            while not answered.wait(patience) and not self.stop.is_set():
                before, wanted = wanted, self._wanted_s()
                place = self._code.place(stack_of_thread(self._thread_id))
                if wanted - before > COMPUTES * patience or place is None or not place.user:
                    continue
                if self.verdict is None:
                    self.verdict = self._judged()
                    self._loop.call_soon_threadsafe(self.happened.set)
                patience = AGAIN_S
                signal.pthread_kill(self._thread_id, SIGNAL)

    def _wanted_s(self) -> float:
        """Return the seconds that the loop's thread has computed or, if the kernel tells, waited for a processor."""
        computed = time.clock_gettime(time.pthread_getcpuclockid(self._thread_id))
        return max(computed, sum(scheduled(self._native_id)))

    def _judged(self) -> Verdict:
        stack = stack_of_thread(self._thread_id)
        lines = [told(line) for line in stack if self._code.place([line]) is not None]
        waiting = Counter(places_of(self._running, self._code))
        here = str(self._code.place(stack) or "")
        return Verdict(
            kind="blocks",
            what=f"the event loop stood still for {self._stuck_s:g} s in a call that waits for what another episode "
            f"holds, perhaps across an await: it would never move again",
            where=here,
            evidence=[
                "it stands at " + ", called by ".join(lines[:6]),
                *(f"{count} episodes wait at {place}" for place, count in waiting.most_common(4) if place != here),
                "hold no threading.Lock across an await: use asyncio.Lock, or release it before",
            ],
        )
