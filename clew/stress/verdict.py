"""A finding of the stress about an agent, with the place and the numbers it rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from clew.printing import counted

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Kind = Literal["hangs", "blocks", "serial", "shared", "growth", "differs", "fails", "rewrites", "sampling", "rewards"]
"""Kinds of finding:

- hangs: episodes that do not end
- blocks: calls that block the event loop
- serial: something limits how many episodes run at a time
- shared: state shared between episodes
- growth: something grows with every episode
- differs: the same seeds give other results
- fails: episodes that fail
- rewrites: requests that change the conversation so far
- sampling: sampling that the agent decides
- rewards: rewards of episodes that should have failed
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    kind: Kind
    what: str
    """The finding in one sentence."""
    where: str = ""
    """File, line and function, or the name of an attribute."""
    evidence: list[str] = field(default_factory=list)
    certain: bool = True
    """False for a suspicion, which may be intended (a cache, a counter) and does not make an agent unfit."""
    of_rewards: bool = False
    """True if rewards of the same episodes differ."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their keys, both in order of appearance."""
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def listed(episodes: Iterable[str]) -> str:
    """Return the number of different episodes, and the IDs of the first six."""
    ids = sorted(set(episodes))
    return f"{counted(len(ids), 'episode')}: {', '.join(ids[:6])}{', …' if len(ids) > 6 else ''}"
