"""Something that admits only so many at a time: where throughput stops growing, and where the episodes wait then."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from clew.diagnose.stress.frames import Code, Place, stack_of_coroutine, stack_of_thread
from clew.diagnose.stress.steps import Episode
from clew.diagnose.stress.verdict import Verdict

LOOK_S = 0.02
"""How often the stacks of the waiting episodes are looked at ..."""

LOOK_AT = 64
"""... and at how many of them, drawn at random."""

SCALES = 0.6
"""A crowd that is k times as wide should get k times as much done; less than this share of it is not well."""

STRETCH = 1.3
"""An episode in the crowd takes longer than alone by more than this factor."""

EXPLAINS = 0.4
"""The place that is named explains this share of the additional time."""

MODELS = 0.5
"""The model explains a larger share of it."""

BUSY = 0.6
"""When the loop is silent, or the process wants a processor, for more of the time, that is what all wait for."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """How a wave of episodes fared."""

    width: int
    """Episodes at once, as asked for."""
    seconds: float
    episodes: int
    mean_s: float
    """Of an episode ..."""
    model_s: float
    """... and with the model, of that."""
    waits: dict[Place, float]
    """Seconds that a mean episode waited at each place."""
    busy_share: float
    """Of the time: the event loop was silent, or the process computed or waited for a processor."""

    @property
    def throughput(self) -> float:
        """Episodes a second."""
        return self.episodes / self.seconds


def saturates(alone: Crowd, narrow: Crowd, wide: Crowd) -> bool:
    """Whether throughput stops growing between two widths, and episodes take longer for it."""
    asked = wide.width / narrow.width
    gained = wide.throughput / narrow.throughput
    return asked > 1 and gained < SCALES * asked and wide.mean_s > STRETCH * alone.mean_s


def by_model(alone: Crowd, wide: Crowd) -> bool:
    """Whether it is the model that takes longer in the crowd; where all is busy here, that seems so of all."""
    return wide.busy_share <= BUSY and wide.model_s - alone.model_s > MODELS * (wide.mean_s - alone.mean_s)


def waited_most(alone: Crowd, wide: Crowd) -> Place | None:
    """Where an episode in the crowd waits for longer than alone, if that explains why it takes longer."""
    longer = {place: seconds - alone.waits.get(place, 0.0) for place, seconds in wide.waits.items()}
    place = max(longer, key=lambda each: longer[each], default=None)
    return place if place is not None and longer[place] >= EXPLAINS * (wide.mean_s - alone.mean_s) else None


def verdict(alone: Crowd, narrow: Crowd, wide: Crowd) -> Verdict | None:
    """What throughput saturates at, unless it is the model, a loop that is blocked or busy, or the processor."""
    if not saturates(alone, narrow, wide) or wide.busy_share > BUSY or by_model(alone, wide):
        return None
    place = waited_most(alone, wide)
    if place is None:
        return None
    longer = wide.waits[place] - alone.waits.get(place, 0.0)
    return Verdict(
        kind="serial",
        what=f"episodes wait for one another: throughput stops at {wide.throughput:.3g} episodes a second, however "
        f"many run",
        where=str(place),
        evidence=[
            *(f"{c.width} at once: {c.throughput:.3g} episodes a second" for c in (alone, narrow, wide)),
            f"at {wide.width} at once an episode takes {wide.mean_s:.2f} s, alone {alone.mean_s:.2f} s; "
            f"{longer:.2f} s more are spent waiting here",
            f"work of {wide.throughput * alone.mean_s:.1f} episodes goes on at a time, of {wide.width} asked",
            "look for a lock, a semaphore, a pool of connections or of threads that all episodes share",
        ],
    )


class Waits:
    """Looks at where the running episodes wait, while it is entered."""

    def __init__(self, running: Collection[Episode], code: Code) -> None:
        """running: kept up to date by whoever runs them."""
        self._running = running
        self._code = code
        self._draw = random.Random(0)
        self.seconds: defaultdict[Place, float] = defaultdict(float)
        """Of all episodes together."""

    async def __aenter__(self) -> Waits:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        seen = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            running = list(self._running)
            some = self._draw.sample(running, min(LOOK_AT, len(running)))
            for episode in some:
                place = waits_at(episode, self._code)
                if place is not None:
                    self.seconds[place] += (now - seen) * len(running) / len(some)
            seen = now


def waits_at(episode: Episode, code: Code) -> Place | None:
    """Where a running episode waits now."""
    if episode.thread_id is not None:
        return code.place(stack_of_thread(episode.thread_id))
    return code.place(stack_of_coroutine(episode.coroutine)) if episode.coroutine is not None else None


def concurrency(intervals: Iterable[Interval]) -> list[tuple[float, int]]:
    """How many of the intervals are open at once: (time, from then on so many), in order."""
    changes: Counter[float] = Counter()
    for start, end in intervals:
        changes[start] += 1
        changes[end] -= 1
    curve, open_now = [], 0
    for moment in sorted(changes):
        open_now += changes[moment]
        curve.append((moment, open_now))
    return curve


def union(intervals: Sequence[Interval]) -> float:
    """Seconds during which at least one interval is open."""
    curve = concurrency(intervals)
    return sum(b[0] - a[0] for a, b in itertools.pairwise(curve) if a[1])
