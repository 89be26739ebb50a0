"""Results that differ: between two runs with the same seeds, and between an episode alone and in a crowd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from clew.diagnose.stress.requests import Request


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one episode did, as far as it should repeat."""

    requests: Sequence[Request]
    """In the order in which they came."""
    reward: object

    @property
    def earned(self) -> object:
        """The reward, with what was asked in the place of an answer's ID: a provider draws its IDs by chance."""
        if not isinstance(self.reward, dict):
            return self.reward
        asked = {request.id: request.asked for request in self.requests}
        return Counter((asked.get(name, name), value) for name, value in self.reward.items())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where one episode's two runs part, although the model told it the same."""

    episode: str
    what: str


def differences(first: Mapping[str, Told], second: Mapping[str, Told]) -> list[Difference]:
    """One for each episode of both that differs by its own doing. Episodes that failed are to be left out.

    Requests that run side by side may come in any order. When the model answered the same request differently, what
    follows is not the agent's doing.
    """
    found = []
    for episode in sorted(first.keys() & second.keys()):
        what = _difference(first[episode], second[episode])
        if what:
            found.append(Difference(episode=episode, what=what))
    return found


def by_chance(first: Mapping[str, Told], second: Mapping[str, Told]) -> list[str]:
    """The episodes of both that the model told something else when it was asked the same."""
    return [
        episode
        for episode in sorted(first.keys() & second.keys())
        if _told_otherwise(first[episode], second[episode], {request.asked for request in first[episode].requests})
    ]


def _difference(a: Told, b: Told) -> str:
    asked_a, asked_b = ([r.asked for r in told.requests] for told in (a, b))
    own_a, own_b = _first_of_its_own(asked_a, asked_b), _first_of_its_own(asked_b, asked_a)
    if _told_otherwise(a, b, {*asked_a[:own_a], *asked_b[:own_b]}):
        return ""
    if own_a is None and own_b is None:
        return "" if a.earned == b.earned else f"the reward is {a.reward!r}, then {b.reward!r}"
    if own_a is None or own_b is None:
        return f"{len(asked_a)} requests, then {len(asked_b)}"
    return f"request {min(own_a, own_b)} differs: {_shown(asked_a[own_a], asked_b[own_b])}"


def _first_of_its_own(these: Sequence[str], others: Sequence[str]) -> int | None:
    """The place of the first that is not, or not so often, among the others."""
    left = Counter(others)
    for place, asked in enumerate(these):
        if not left[asked]:
            return place
        left[asked] -= 1
    return None


def _told_otherwise(a: Told, b: Told, asked: Collection[str]) -> bool:
    """Whether the model answered one of these requests differently, as far as both made it equally often."""
    for each in asked:
        told_a, told_b = ([r.answered for r in told.requests if r.asked == each] for told in (a, b))
        both = min(len(told_a), len(told_b))
        if told_a[:both] != told_b[:both]:
            return True
    return False


def _shown(one: str, other: str) -> str:
    start = max(0, _common(one, other) - 20)
    return f"{one[start : start + 80]!r}, then {other[start : start + 80]!r}"


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
