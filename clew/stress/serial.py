"""Bottlenecks that limit how many episodes progress at once: where throughput stops growing, and where they wait."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from clew.stress.agent_steps import Episode
from clew.stress.busy import Watcher
from clew.stress.frames import Code, Place, stack_of_coroutine, stack_of_thread
from clew.stress.verdict import Verdict

if TYPE_CHECKING:
    from clew.stress.waves import Wave

LOOK_S = 0.02
"""Seconds between two looks at the stacks of waiting episodes."""

LOOK_AT = 64
"""Maximum number of episodes, drawn at random, in each look."""

SCALES = 0.6
"""Minimum share of the ideal gain in throughput. Ideally, k times the width gives k times the throughput."""

STRETCH = 1.3
"""Factor above which an episode counts as longer in the crowd than in a narrower wave."""

LASTS = 1.5
"""Multiple of an episode's time alone above which a crowd takes too long. Without a bottleneck, it takes no longer than
its longest episode."""

EXPLAINS = 0.4
"""Minimum share of the additional time that a place must explain to be named."""

MODELS = 0.5
"""Share of the additional time above which the model explains it."""

BUSY = 0.5
"""Share of the time in which the processor is busy, above which a place where episodes wait is only suspected."""

MODELS_PLACE = 0.5
"""Share of the time at a place during which the model has a request, above which episodes wait for the model there."""

Interval = tuple[float, float]


def slows(narrow: Wave, wide: Wave) -> bool:
    """Return whether throughput stops growing between two widths, for any reason."""
    return wide.width > narrow.width and wide.throughput / narrow.throughput < SCALES * wide.width / narrow.width


def saturates(alone: Wave, narrow: Wave, wide: Wave) -> bool:
    """Return whether throughput stops growing although neither the processor nor a blocked event loop limits it.

    The time in which one of these does is left out. The episodes that ran in both must also take longer in the wider
    crowd, because some episodes of a crowd may simply be long by themselves.
    """
    widened = wide.width / narrow.width
    gained = (len(wide.ended) / wide.idle_s) / (len(narrow.ended) / narrow.idle_s)
    took_wide, took_narrow = ({episode.id: episode.seconds for episode in wave.ended} for wave in (wide, narrow))
    both = took_wide.keys() & took_narrow.keys()
    stretch = sum(took_wide[each] for each in both) / sum(took_narrow[each] for each in both) if both else 0.0
    alone_s = alone.idle_s / len(alone.ended)
    return widened > 1 and gained < SCALES * widened and wide.idle_s > LASTS * alone_s and stretch > STRETCH


def by_model(alone: Wave, wide: Wave) -> bool:
    """Return whether the model explains why episodes take longer in the crowd."""
    return wide.model_s - alone.model_s > MODELS * (wide.mean_s - alone.mean_s)


def waited_most(alone: Wave, wide: Wave) -> Place | None:
    """Return the place whose additional waiting best explains why episodes take longer in the crowd.

    Returns:
        None if no place explains enough of the additional time. Places where episodes wait for the model are left out.
    """
    places = wide.waits.seconds.keys() - alone.waits.at_model
    place = max(sorted(places), key=lambda each: _longer_at(each, alone, wide), default=None)
    if place is None or _longer_at(place, alone, wide) < EXPLAINS * (wide.mean_s - alone.mean_s):
        return None
    return place


def _longer_at(place: Place, alone: Wave, wide: Wave) -> float:
    """Return how many seconds longer an episode waits at a place in the crowd than alone."""
    return wide.waited_s(place) - alone.waited_s(place)


def verdict(alone: Wave, narrow: Wave, wide: Wave) -> Verdict | None:
    """Return a verdict that names the place where throughput saturates.

    Returns:
        None if throughput does not saturate, if the model or the processor is the cause, or if no place explains it.
    """
    if not saturates(alone, narrow, wide) or by_model(alone, wide):
        return None
    place = waited_most(alone, wide)
    if place is None:
        return None
    return Verdict(
        kind="serial",
        what=f"episodes wait for one another: throughput stops at {wide.throughput:.3g} episodes a second, even "
        f"if more run at once",
        where=str(place),
        evidence=[
            *(f"{c.width} at once: {c.throughput:.3g} episodes a second" for c in (alone, narrow, wide)),
            f"at {wide.width} at once an episode takes {wide.mean_s:.2f} s, alone {alone.mean_s:.2f} s; "
            f"{_longer_at(place, alone, wide):.2f} s more are spent waiting here",
            f"of {wide.width} episodes at once, {wide.throughput * alone.mean_s:.1f} make progress",
            f"nothing was computed for {1 - wide.busy_share:.0%} of the time",
            "look for a lock, a semaphore, a pool of connections or of threads that all episodes share",
        ],
    )


class Waits(Watcher):
    """Records, while entered, where the running episodes wait."""

    def __init__(self, running: Collection[Episode], code: Code, asking: Callable[[], Collection[str]]) -> None:
        """Watch `running`, which the caller keeps up to date. `asking` returns the IDs of those that ask the model."""
        super().__init__()
        self._asking = asking
        self._running = running
        self._code = code
        self._draw = random.Random(0)
        self.seconds: defaultdict[Place, float] = defaultdict(float)
        """Seconds that all episodes together waited at each place."""
        self.model_s: defaultdict[Place, float] = defaultdict(float)
        """The part of `seconds` during which the model had a request of the episode."""
        self.asked_at: dict[str, Place] = {}
        """Place where each episode was last seen to wait for the model, or else the first place where it waited."""

    @property
    def at_model(self) -> set[Place]:
        """Places where episodes mostly wait for the model."""
        return {place for place, seconds in self.model_s.items() if seconds > MODELS_PLACE * self.seconds[place]}

    def run(self) -> None:
        seen = time.monotonic()
        while not self.stop.wait(LOOK_S):
            now = time.monotonic()
            running = list(self._running)
            some = self._draw.sample(running, min(LOOK_AT, len(running)))
            asking = {*self._asking()}
            places = [(episode, waits_at(episode, self._code)) for episode in some]
            asking &= {*self._asking()}  # one that was answered meanwhile may have been seen at its next line
            for episode, place in places:
                if place is not None:
                    if episode.id in asking or episode.id not in self.asked_at:
                        self.asked_at[episode.id] = place
                    seconds = (now - seen) * len(running) / len(some)  # the drawn ones stand for all
                    self.seconds[place] += seconds
                    if episode.id in asking:
                        self.model_s[place] += seconds
            seen = now


def waits_at(episode: Episode, code: Code) -> Place | None:
    """Return the place where a running episode waits now."""
    thread, coroutine = episode.thread_id, episode.coroutine  # read once: another thread may end the episode
    if thread is not None:
        return code.place(stack_of_thread(thread))
    return code.place(stack_of_coroutine(coroutine))


def places_of(running: Collection[Episode], code: Code) -> list[str]:
    """Return the places where running episodes wait now. Episodes whose place is unknown are left out."""
    return [str(place) for episode in list(running) if (place := waits_at(episode, code)) is not None]


def concurrency(intervals: Iterable[Interval]) -> list[tuple[float, int]]:
    """Return the number of open intervals over time, as sorted pairs (time, number open from then on)."""
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
    """Return the seconds during which at least one interval is open."""
    curve = concurrency(intervals)
    return sum(b[0] - a[0] for a, b in itertools.pairwise(curve) if a[1])
