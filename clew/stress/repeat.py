"""Results that differ between two runs with the same seeds, or between an episode alone and in a crowd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clew.printing import common_length, counted
from clew.stress.agent_steps import Episode
from clew.stress.requests import Request
from clew.stress.verdict import Kind, Verdict, grouped


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Requests and reward of one episode: what should repeat when it is run again."""

    requests: Sequence[Request]
    """Requests in order of arrival."""
    reward: object

    @property
    def earned(self) -> object:
        """Reward in a form that can be compared between two runs.

        A provider draws the IDs of its answers by chance, so each ID is replaced with the request it answers.
        """
        if not isinstance(self.reward, dict):
            return self.reward
        asked = {request.id: request.asked for request in self.requests}
        return Counter((asked.get(name, name), value) for name, value in self.reward.items())


def behaviour_by_episode(episodes: Iterable[Episode], requests: Sequence[Request]) -> dict[str, Behaviour]:
    """Return the requests and rewards of the episodes that did not fail, by episode ID."""
    by_episode = grouped(requests, lambda request: request.episode)
    return {
        episode.id: Behaviour(requests=by_episode.get(episode.id, []), reward=episode.reward)
        for episode in episodes
        if episode.error is None
    }


@dataclass(frozen=True)
class Difference:
    """First difference between two runs of an episode."""

    episode: str
    of: Literal["reward", "count", "request"]
    what: str

    def __str__(self) -> str:
        return f"{self.episode}: {self.what}"


def differences(first: Mapping[str, Behaviour], second: Mapping[str, Behaviour]) -> list[Difference]:
    """Return a difference for each episode that acted differently in the two runs.

    Requests that run side by side may come in any order. Once the model answered the same request differently, later
    differences are not the agent's doing.
    """
    both = sorted(first.keys() & second.keys())
    return [found for episode in both if (found := _difference(episode, first[episode], second[episode])) is not None]


def judge_differences(
    kind: Kind, what: str, differences: Sequence[Difference], where: str, advice: Sequence[str] = ()
) -> Verdict:
    """Return a verdict with the first differences as its evidence."""
    return Verdict(
        kind=kind,
        what=what,
        where=where,
        evidence=[*map(str, differences[:4]), *advice],
        of_rewards=any(each.of == "reward" for each in differences),
    )


def by_chance(first: Mapping[str, Behaviour], second: Mapping[str, Behaviour]) -> list[str]:
    """Return the IDs of the episodes in both runs to which the model answered the same request differently."""
    return [
        episode
        for episode in sorted(first.keys() & second.keys())
        if _answers_differ(first[episode], second[episode], {request.asked for request in first[episode].requests})
    ]


def _difference(episode: str, a: Behaviour, b: Behaviour) -> Difference | None:
    asked_a, asked_b = ([r.asked for r in side.requests] for side in (a, b))
    own_a, own_b = _first_of_its_own(asked_a, asked_b), _first_of_its_own(asked_b, asked_a)
    if _answers_differ(a, b, {*asked_a[:own_a], *asked_b[:own_b]}):
        return None
    if own_a is None and own_b is None:
        if a.earned == b.earned:
            return None
        return Difference(episode, "reward", f"the reward is {a.reward!r}, then {b.reward!r}")
    if own_a is None or own_b is None:
        return Difference(episode, "count", f"{counted(len(asked_a), 'request')}, then {len(asked_b)}")
    one, other = asked_a[own_a], asked_b[own_b]
    start = max(0, common_length(one, other) - 20)
    shown = f"{one[start : start + 80]!r}, then {other[start : start + 80]!r}"
    return Difference(episode, "request", f"request {min(own_a, own_b)} differs: {shown}")


def _first_of_its_own(these: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the index of the first text that the others lack, or have less often; None if they have all."""
    left = Counter(others)
    for place, asked in enumerate(these):
        if not left[asked]:
            return place
        left[asked] -= 1
    return None


def _answers_differ(a: Behaviour, b: Behaviour, asked: Collection[str]) -> bool:
    """Return whether the model answered one of these requests differently.

    If one run made a request more often, its surplus answers are ignored.
    """
    for question in asked:
        answers_a, answers_b = ([r.answered for r in side.requests if r.asked == question] for side in (a, b))
        if any(x != y for x, y in zip(answers_a, answers_b, strict=False)):
            return True
    return False
