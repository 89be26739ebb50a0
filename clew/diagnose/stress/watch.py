"""What blocks an event loop, and where."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from clew.diagnose.stress.frames import Code, Line, Place, stack_of_thread
from clew.diagnose.stress.verdict import Verdict

WATCH_THREAD = "clew loop watch"

BEAT_S = 0.005
"""How often the loop is asked for a sign of life, and how often its stack is looked at while it gives none."""

LATE_S = 0.05
"""A loop that is silent for this long is blocked."""

WAITS_S = 0.02
"""A single task that waits for this long in a blocking call, within such a silence, is at fault ..."""

COMPUTES_S = 0.05
"""... and so is one that computes for this long without an await."""

SHARE = 0.05
"""A place is named in a verdict when it took this share of the time."""

ONCE_S = 1.0
"""A single block this long is named in any case."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One task's hold on the loop."""

    place: Place
    seconds: float
    computing: bool
    """False: it waited, in a call that blocks."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a LoopWatch saw."""

    blocks: list[Block]
    seconds: float
    """How long it watched."""
    late_share: float
    """Of this time: how much the loop spent silent, for more than 10 ms at a stretch: blocked, or always busy."""

    def __add__(self, other: Watched) -> Watched:
        seconds = self.seconds + other.seconds
        late = (self.late_share * self.seconds + other.late_share * other.seconds) / max(seconds, 1e-9)
        return Watched(blocks=[*self.blocks, *other.blocks], seconds=seconds, late_share=late)


@dataclass
class Hold:
    """One task's hold on the loop, as it is sampled."""

    task: object
    places: Counter[Place]
    """Samples."""
    tops: Counter[Line]
    """Samples, by the innermost line."""
    waited_s: float = 0.0
    """Time that went by, as far as this process had a processor to see it go by, and no other thread computed: that one
    may have had the interpreter, for which the loop's then waited."""
    cpu_s: float = 0.0
    """Time that the loop's thread computed."""

    def block(self) -> Block | None:
        """What it amounts to. A task that waits stands still at one line and does not compute; one that moves on
        but hardly computes is not at fault: the process lacks a processor, or another thread has the interpreter."""
        if not self.places:
            return None
        place = self.places.most_common(1)[0][0]
        stands_still = self.tops.most_common(1)[0][1] >= max(3, 0.8 * self.tops.total())
        if stands_still and self.waited_s >= WAITS_S and self.cpu_s < 0.5 * self.waited_s:
            return Block(place=place, seconds=self.waited_s, computing=False)
        if self.cpu_s >= COMPUTES_S:
            return Block(place=place, seconds=self.cpu_s, computing=True)
        return None


class LoopWatch:
    """Watches the event loop in which it is entered, from a thread of its own."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._stop = threading.Event()
        self._blocks: list[Block] = []
        self._late_s = 0.0
        self._since = 0.0

    async def __aenter__(self) -> LoopWatch:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=WATCH_THREAD, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> Watched:
        """What was seen since the last look."""
        now = time.monotonic()
        watched = Watched(
            blocks=list(self._blocks), seconds=now - self._since, late_share=self._late_s / max(now - self._since, 1e-9)
        )
        self._blocks, self._late_s, self._since = [], 0.0, now
        return watched

    def _run(self) -> None:
        while not self._stop.is_set():
            answered = threading.Event()
            sent = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            if not answered.wait(2 * BEAT_S):
                holds = self._sample_until(answered)
                silent = time.monotonic() - sent
                self._late_s += silent
                if silent >= LATE_S:
                    self._blocks += [block for hold in holds if (block := hold.block()) is not None]
            self._stop.wait(BEAT_S)

    def _sample_until(self, answered: threading.Event) -> list[Hold]:
        holds: list[Hold] = []
        seen, computed, others = time.monotonic(), time.clock_gettime(self._cpu_clock), self._others_s()
        waits = 2 * BEAT_S
        """What went by before the first look."""
        while True:
            task = asyncio.current_task(self._loop)
            stack = stack_of_thread(self._thread_id)
            now, cpu, by_others = time.monotonic(), time.clock_gettime(self._cpu_clock), self._others_s()
            place = self._code.place(stack)
            if place is not None and not stack[0][0].co_filename.endswith("selectors.py"):
                if not holds or holds[-1].task is not task:
                    holds.append(Hold(task, Counter(), Counter()))
                hold = holds[-1]
                hold.places[place] += 1
                hold.tops[stack[0]] += 1
                hold.waited_s += max(0.0, min(now - seen, 2 * BEAT_S) + waits - (by_others - others))
                hold.cpu_s += cpu - computed
            seen, computed, others, waits = now, cpu, by_others, 0.0
            if answered.wait(BEAT_S) or self._stop.is_set():
                return holds

    def _others_s(self) -> float:
        """Processor time of all threads but the loop's."""
        return time.process_time() - time.clock_gettime(self._cpu_clock)


def verdicts(watched: Watched) -> list[Verdict]:
    """The places that took a share of the time worth naming, worst first."""
    by_place: dict[Place, list[Block]] = defaultdict(list)
    for block in watched.blocks:
        by_place[block.place].append(block)
    found = []
    for place, blocks in sorted(by_place.items(), key=lambda each: -_total(each[1])):
        total, longest = _total(blocks), max(block.seconds for block in blocks)
        if total < SHARE * watched.seconds and longest < ONCE_S:
            continue
        computing = 2 * sum(block.seconds for block in blocks if block.computing) > total
        found.append(
            Verdict(
                kind="blocks",
                what="computes without an await, and no other episode moves" if computing else "blocks the event loop",
                where=str(place),
                evidence=[
                    f"{len(blocks)} times, {total:.2f} s in all ({total / watched.seconds:.0%} of the time), "
                    f"{longest * 1000:.0f} ms the longest",
                    "move it into asyncio.to_thread or a process"
                    if computing
                    else "use the library's asynchronous form, or asyncio.to_thread",
                ],
            )
        )
    return found


def _total(blocks: Sequence[Block]) -> float:
    return sum(block.seconds for block in blocks)
