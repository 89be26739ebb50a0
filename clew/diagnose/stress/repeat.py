"""Results that differ: between two runs with the same seeds, and between an episode alone and in a crowd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clew.diagnose.stress.requests import Request


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one episode did, as far as it should repeat."""

    requests: Sequence[Request]
    """In the order in which they came."""
    reward: object


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


def _difference(a: Told, b: Told) -> str:
    exchanges_a, exchanges_b = (Counter((r.asked, r.answered) for r in told.requests) for told in (a, b))
    if exchanges_a == exchanges_b:
        return "" if a.reward == b.reward else f"the reward is {a.reward!r}, then {b.reward!r}"
    asked_a, asked_b = ([r.asked for r in told.requests] for told in (a, b))
    only_a, only_b = Counter(asked_a) - Counter(asked_b), Counter(asked_b) - Counter(asked_a)
    if not only_a and not only_b:
        return ""  # the model's doing
    number = min([*map(asked_a.index, only_a), *map(asked_b.index, only_b)])
    before_a, before_b = (Counter((r.asked, r.answered) for r in told.requests[:number]) for told in (a, b))
    if before_a != before_b and Counter(asked_a[:number]) == Counter(asked_b[:number]):
        return ""  # the model answered the earlier requests differently
    one = next((asked for asked in asked_a if asked in only_a), "")
    other = next((asked for asked in asked_b if asked in only_b), "")
    if not one or not other:
        return f"{len(asked_a)} requests, then {len(asked_b)}"
    return f"request {number} differs: {_shown(one, other)}"


def _shown(one: str, other: str) -> str:
    start = max(0, _common(one, other) - 20)
    return f"{one[start : start + 80]!r}, then {other[start : start + 80]!r}"


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
