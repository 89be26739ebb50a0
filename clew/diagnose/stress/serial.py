"""Something that admits only so many at a time: where throughput stops growing, and where the episodes wait then."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from clew.diagnose.stress.frames import Code, Place, stack_of_coroutine, stack_of_thread
from clew.diagnose.stress.steps import Episode
from clew.diagnose.stress.verdict import Verdict

WAITS_THREAD = "clew waits watch"

LOOK_S = 0.02
"""How often the stacks of the waiting episodes are looked at ..."""

LOOK_AT = 64
"""... and at how many of them, drawn at random."""

SCALES = 0.6
"""A crowd that is k times as wide should get k times as much done; less than this share of it is not well."""

STRETCH = 1.3
"""An episode in the crowd takes longer than among a few by more than this factor."""

LASTS = 1.5
"""A crowd that nothing holds up lasts no longer than one of its episodes alone, but for the longest: less than this
factor."""

EXPLAINS = 0.4
"""The place that is named explains this share of the additional time."""

MODELS = 0.5
"""The model explains a larger share of it."""

BUSY = 0.5
"""Where what episodes wait for is busy for a larger share of the time, a place that some wait at may be a lock's."""

MODELS_PLACE = 0.5
"""For a larger share of the time that an episode alone waits at a place, the model has its request."""

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
    busy_s: float
    """Of the time: something that the episodes may wait for computed, or waited for a processor. See `busy`."""
    at_model: Collection[Place] = ()
    """Places where an episode waits for the model: what is slow there is the model, or Clew's gateway."""
    took: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each episode, by its ID."""

    @property
    def throughput(self) -> float:
        """Episodes a second."""
        return self.episodes / self.seconds

    @property
    def idle_s(self) -> float:
        """Seconds in which nothing wanted a processor: a lock, a tool or the model was waited for."""
        return max(self.seconds - self.busy_s, 0.02 * self.seconds)

    @property
    def busy_share(self) -> float:
        """Of the time."""
        return min(1.0, self.busy_s / self.seconds)


def slows(narrow: Crowd, wide: Crowd) -> bool:
    """Whether throughput stops growing between two widths, for whatever reason."""
    return wide.width > narrow.width and wide.throughput / narrow.throughput < SCALES * wide.width / narrow.width


def saturates(alone: Crowd, narrow: Crowd, wide: Crowd) -> bool:
    """Whether throughput stops growing between two widths, also where the processor's time is left out, and the same
    episodes take longer for it: some may take long for reasons of their own."""
    asked = wide.width / narrow.width
    gained = (wide.episodes / wide.idle_s) / (narrow.episodes / narrow.idle_s)
    both = wide.took.keys() & narrow.took.keys()
    stretch = sum(wide.took[each] for each in both) / sum(narrow.took[each] for each in both) if both else 0.0
    alone_s = alone.idle_s / alone.episodes
    return asked > 1 and gained < SCALES * asked and wide.idle_s > LASTS * alone_s and stretch > STRETCH


def by_model(alone: Crowd, wide: Crowd) -> bool:
    """Whether it is the model that takes longer in the crowd."""
    return wide.model_s - alone.model_s > MODELS * (wide.mean_s - alone.mean_s)


def waited_most(alone: Crowd, wide: Crowd) -> Place | None:
    """Where an episode in the crowd waits for longer than alone, if that explains why it takes longer, and it is not
    the model that it waits for."""
    longer = {
        place: seconds - alone.waits.get(place, 0.0)
        for place, seconds in wide.waits.items()
        if place not in alone.at_model
    }
    place = max(longer, key=lambda each: longer[each], default=None)
    return place if place is not None and longer[place] >= EXPLAINS * (wide.mean_s - alone.mean_s) else None


def verdict(alone: Crowd, narrow: Crowd, wide: Crowd) -> Verdict | None:
    """What throughput saturates at, unless it is the model or the processor."""
    if not saturates(alone, narrow, wide) or by_model(alone, wide):
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
            f"nothing computed for {1 - wide.busy_share:.0%} of the time",
            "look for a lock, a semaphore, a pool of connections or of threads that all episodes share",
        ],
    )


class Waits:
    """Looks at where the running episodes wait, while it is entered, from a thread of its own."""

    def __init__(self, running: Collection[Episode], code: Code, asking: Callable[[], Collection[str]]) -> None:
        """running: kept up to date by whoever runs them. asking: the IDs of those whose request the model has now."""
        self._asking = asking
        self._running = running
        self._code = code
        self._stop = threading.Event()
        self._draw = random.Random(0)
        self.seconds: defaultdict[Place, float] = defaultdict(float)
        """Of all episodes together."""
        self.model_s: defaultdict[Place, float] = defaultdict(float)
        """The part of it during which the model had a request of the episode."""
        self.asked_at: dict[str, Place] = {}
        """Where each episode was last seen to wait for the model; for anything, if it never was."""

    @property
    def at_model(self) -> set[Place]:
        """Places where mostly the model is waited for."""
        return {place for place, seconds in self.model_s.items() if seconds > MODELS_PLACE * self.seconds[place]}

    async def __aenter__(self) -> Waits:
        self._thread = threading.Thread(target=self._look, name=WAITS_THREAD, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        seen = time.monotonic()
        while not self._stop.wait(LOOK_S):
            now = time.monotonic()
            running = list(self._running)
            some = self._draw.sample(running, min(LOOK_AT, len(running)))
            asking = self._asking()
            for episode in some:
                place = waits_at(episode, self._code)
                if place is not None:
                    if episode.id in asking or episode.id not in self.asked_at:
                        self.asked_at[episode.id] = place
                    seconds = (now - seen) * len(running) / len(some)
                    self.seconds[place] += seconds
                    if episode.id in asking:
                        self.model_s[place] += seconds
            seen = now


def waits_at(episode: Episode, code: Code) -> Place | None:
    """Where a running episode waits now."""
    thread, coroutine = episode.thread_id, episode.coroutine  # it may end meanwhile, in another thread
    if thread is not None:
        return code.place(stack_of_thread(thread))
    return code.place(stack_of_coroutine(coroutine)) if coroutine is not None else None


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
