"""Calls that block an event loop, and the lines that make them.

A loop may also stand still for good, in a call that waits for what only another episode could give back, for example a
threading.Lock that is held across an await. That call is interrupted, so that the stress can report it.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from clew.stress.agent_steps import Episode
from clew.stress.busy import Watcher, scheduled, sleeps_in_a_call, working_threads
from clew.stress.frames import Code, Line, Place, line_in_words, lines_of, stack_of_thread, waits_for_events
from clew.stress.serial import places_of
from clew.stress.verdict import Verdict, grouped

ASYNCIO = str(Path(asyncio.__file__).parent)

BEAT_S = 0.005
"""Seconds between two requests to the loop for a sign of life, and between two looks at its stack until it answers."""

COMPUTES_S = 0.05
"""Seconds of computing without an await above which a single task is at fault.

A task that sleeps in a blocking call is at fault however short the sleep is: hundreds of episodes do the same, one
after another.
"""

SHARE = 0.05
"""Share of the time above which a place that blocks is named in a verdict."""

COMPUTES_SHARE = 0.15
"""Share of the time above which a place that computes is named. Any agent computes: eight that read answers in streams
with the openai package took up to 8 %."""

ONCE_S = 1.0
"""Seconds above which a single block is named in any case."""

CHANCE_S = 0.05
"""Seconds below which a single block is not reported: on a busy machine, even starting a thread can take this long."""

STUCK_S = 30.0
"""Seconds after which a loop that stands still without computing counts as stuck for good."""

INTERRUPT_S = 0.05
"""Seconds after which each further stuck call is interrupted, once one has been seen."""

MOVES = 0.1
"""Share of the time for which a thread computes or waits for a processor, above which it does not stand still."""

SIGNAL = signal.SIGUSR2
"""Signal that interrupts the call. Python handles signals in the main thread only."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Finding that one task blocked the loop."""

    place: Place
    seconds: float
    computing: bool
    """False if it waited in a blocking call."""


@dataclass
class Hold:
    """Samples taken while one task held the loop; `block` judges them."""

    task: object
    places: Counter[Place]
    """Number of samples at each place."""
    slept_s: float = 0.0
    """Seconds for which the loop's thread slept in a system call, not counting the interpreter's lock."""
    waited_s: float = 0.0
    """Remaining seconds, including `cpu_s`, in which this process had a processor and no other thread computed.

    Another thread that computes may hold the interpreter, and the loop's thread then waits for it.
    """
    cpu_s: float = 0.0
    """Seconds for which the loop's thread computed."""

    def block(self, slept: float) -> Block | None:
        """Return the block that this hold amounts to; None if it is harmless.

        `slept` is the share of the time without computing (`waited_s - cpu_s`) that counts as sleep in a blocking
        call, because no thread that may hold the interpreter waited for a processor.
        """
        if not self.places:
            return None
        place = self.places.most_common(1)[0][0]
        seconds = self.slept_s + slept * max(0.0, self.waited_s - self.cpu_s)
        if place.user and seconds > 0.5 * (self.slept_s + max(self.waited_s, self.cpu_s)):
            return Block(place=place, seconds=seconds, computing=False)
        if self.cpu_s >= COMPUTES_S:
            return Block(place=place, seconds=self.cpu_s, computing=True)
        return None


class Stuck(Exception):
    """Raised inside the call that would never return."""


class LoopWatch(Watcher):
    """Measures, while entered, how long calls and computations block the event loop it is entered in.

    It interrupts a call in which the loop has stood still for `stuck_s` without computing, and later ones already after
    INTERRUPT_S. Enter it in the main thread.
    """

    def __init__(self, code: Code, running: Collection[Episode] = (), stuck_s: float = STUCK_S) -> None:
        """Prepare to watch. The caller keeps `running` up to date."""
        super().__init__()
        self.stuck: Verdict | None = None
        """Verdict on the call that was interrupted first."""
        self.stood_still = asyncio.Event()
        self._code = code
        self._running = running
        self._stuck_s = stuck_s
        self._blocks: list[Block] = []

    async def __aenter__(self) -> Self:
        self._handler = signal.signal(SIGNAL, self._interrupted)
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        signal.signal(SIGNAL, self._handler)

    def take(self) -> list[Block]:
        """Return the blocks since the last call, and start anew."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def run(self) -> None:
        while not self.stop.is_set():
            if waits_for_events(self.loop_thread):
                self.stop.wait(BEAT_S)
                continue
            answered = threading.Event()
            sent, ran = time.monotonic(), sum(scheduled(self.loop_native))
            try:
                self.loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            if not answered.wait(2 * BEAT_S):
                self._blocks.extend(self._sample_until(answered, sent, ran))
            self.stop.wait(BEAT_S)

    def _sample_until(self, answered: threading.Event, sent: float, ran: float) -> list[Block]:
        """Sample the loop's stack until it answers, and return the blocks that were seen.

        The loop was asked for a sign of life at `sent`; its thread had run, or waited for a processor, for `ran`
        seconds by then.
        """
        holds: list[Hold] = []
        seen, (computed, others) = time.monotonic(), self._computed_s()
        threads = working_threads()
        denied = sum(scheduled(thread)[1] for thread in threads)
        waits = 2 * BEAT_S  # seconds that passed before the first look
        # Time since which the loop stands still, and the seconds that it had computed or been ready to run by then.
        still_since, moved = sent, max(computed, ran)
        while True:
            task = asyncio.current_task(self.loop)
            stack = stack_of_thread(self.loop_thread)
            now, (cpu, by_others) = time.monotonic(), self._computed_s()
            wanted = sum(scheduled(self.loop_native))
            place = self._code.place(stack)
            if place is not None and not self._in_asyncio(stack):
                if not holds or holds[-1].task is not task:
                    holds.append(Hold(task, Counter()))
                hold = holds[-1]
                hold.places[place] += 1
                # Check the stack again: while this thread was without the interpreter, the loop may have gone on.
                if sleeps_in_a_call(self.loop_native, stack) and stack_of_thread(self.loop_thread)[:1] == stack[:1]:
                    hold.slept_s += max(0.0, now - sent - (wanted - ran))
                else:
                    hold.waited_s += max(0.0, min(now - seen, 2 * BEAT_S) + waits - (by_others - others))
                hold.cpu_s += cpu - computed
            patience = self._stuck_s if self.stuck is None else INTERRUPT_S
            if now - still_since >= patience:
                if max(cpu, wanted) - moved <= MOVES * patience and place is not None and place.user:
                    self._interrupt(stack)
                still_since, moved = now, max(cpu, wanted)
            sent, ran = now, wanted
            seen, computed, others, waits = now, cpu, by_others, 0.0
            if answered.wait(BEAT_S) or self.stop.is_set():
                break
        idle = sum(hold.waited_s - hold.cpu_s for hold in holds)
        # Read only now: the kernel counts a thread's wait once the thread runs again, as the loop's thread now does.
        denied = sum(scheduled(thread)[1] for thread in threads) - denied
        slept = max(0.0, 1 - denied / idle) if idle > 0 else 0.0
        return [block for hold in holds if (block := hold.block(slept)) is not None]

    def _interrupt(self, stack: Sequence[Line]) -> None:
        """Interrupt the call in which the loop stands still. The first one is judged."""
        if self.stuck is None:
            lines = [line_in_words(line) for line in stack if self._code.place([line]) is not None]
            here = str(self._code.place(stack))
            waiting = Counter(places_of(self._running, self._code))
            self.stuck = Verdict(
                kind="blocks",
                what=f"the event loop stood still for {self._stuck_s:g} s in a call that waits for what another "
                f"episode holds, perhaps across an await: it would never move again",
                where=here,
                evidence=[
                    "it stands at " + ", called by ".join(lines[:6]),
                    *(f"{count} episodes wait at {place}" for place, count in waiting.most_common(4) if place != here),
                    "hold no threading.Lock across an await: use asyncio.Lock, or release it before",
                ],
            )
            self.loop.call_soon_threadsafe(self.stood_still.set)
        signal.pthread_kill(self.loop_thread, SIGNAL)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._code.users_place(lines_of(frame)) is not None:  # otherwise it has moved on by itself
            raise Stuck("the event loop stood still here, and was interrupted")

    def _computed_s(self) -> tuple[float, float]:
        """Return the processor seconds of the loop's thread, and of all others."""
        own = time.clock_gettime(time.pthread_getcpuclockid(self.loop_thread))
        return own, time.process_time() - own

    def _in_asyncio(self, stack: Sequence[Line]) -> bool:
        """Return whether the loop is idle, or in asyncio's own code, which is no fault of the user's code.

        Asyncio's own code starts a process or a thread, for example, when the user's code calls it.
        """
        called = list(itertools.takewhile(lambda line: not self._code.is_user(line[0].co_filename), stack))
        idle = len(called) == len(stack) and stack[0][0].co_filename.endswith("selectors.py")
        return idle or any(line[0].co_filename.startswith(ASYNCIO) for line in called)


def judge_blocks(blocks: Iterable[Block], watched_s: float) -> list[Verdict]:
    """Return a verdict for each line that blocked the loop for a notable share of `watched_s`, or once for ONCE_S.

    The line with the largest total comes first.
    """
    by_line = grouped(blocks, lambda block: block.place.where)
    verdicts = []
    for of_line in sorted(by_line.values(), key=_total_s, reverse=True):
        total, longest = _total_s(of_line), max(of_line, key=lambda block: block.seconds)
        share, what = SHARE, "blocks the event loop"
        advice = "use the library's asynchronous form, or asyncio.to_thread"
        if 2 * _total_s(block for block in of_line if block.computing) > total:
            share, what = COMPUTES_SHARE, "computes without an await, and no other episode moves"
            advice = "move it into asyncio.to_thread or a process"
        if total < share * watched_s and longest.seconds < ONCE_S:
            continue
        if len(of_line) == 1 and longest.seconds < CHANCE_S:
            continue
        numbers = (
            f"{len(of_line)} times, {total:.2f} s in all ({total / watched_s:.0%} of the time), "
            f"{longest.seconds * 1000:.0f} ms the longest"
        )
        verdicts.append(Verdict(kind="blocks", what=what, where=str(longest.place), evidence=[numbers, advice]))
    return verdicts


def _total_s(blocks: Iterable[Block]) -> float:
    return sum(block.seconds for block in blocks)
