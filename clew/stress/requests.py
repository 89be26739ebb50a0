"""Requests of the agent's episodes to the model.

They are noted where the engine is called, whichever engine it is, or where requests are passed on to a provider.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from clew.gateway.output_parser import THINK_CLOSES
from clew.stress.serial import union
from clew.stress.verdict import grouped


@dataclass(frozen=True, kw_only=True)
class Request:
    episode: str
    asked: str
    """The whole prompt."""
    answered: str
    came: float
    """Time of arrival, from time.monotonic()."""
    done: float
    id: str = ""
    """ID of the answer, by which an agent may name it in its rewards."""
    refused: str = ""
    """Reason why there is no answer, in the provider's words; empty if there was no refusal."""
    cut: bool = False
    """True if the stress cut the answer short."""

    @property
    def said(self) -> str:
        """Words of the answer, without its reasoning."""
        return plain(self.answered.rpartition(THINK_CLOSES)[2])


def plain(text: str) -> str:
    """Return a text with single spaces in the place of all white space, which agents trim and reflow."""
    return " ".join(text.split())


class Requests:
    """Requests since the last `take`. One thread may write while another reads."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._open: dict[int, tuple[str, float]] = {}
        self._given_up: dict[str, float] = {}
        self._numbers = itertools.count()
        self.last_activity = time.monotonic()
        """time.monotonic() when the last request arrived or was answered."""
        self.troubles: dict[tuple[str, int], Literal["fault", "cut"]] = {}
        """Trouble to make for requests, by episode ID and number: an error of the server, or an answer cut short."""
        self.warned: dict[str, dict[str, str]] = defaultdict(dict)
        """First warning that each episode got, by the kind of the warning and the episode's ID."""
        self.rewards: dict[str, dict[str, float]] = {}
        """Rewards that an agent set through the gateway, by episode ID and response ID."""
        self.knows_tokens = False
        """True if the gateway renders the conversations itself: only then are there warnings and troubles."""

    def note(self, request: Request) -> None:
        self._requests.append(request)

    def warn(self, episode: str, warning: str, kind: str) -> None:
        self.warned[kind].setdefault(episode, warning)

    @contextmanager
    def asking(self, episode: str) -> Iterator[None]:
        """Count a request of this episode as being with the model while entered."""
        number, came = next(self._numbers), time.monotonic()
        self._open[number], self.last_activity = (episode, came), came
        try:
            yield
        except asyncio.CancelledError:  # the client has gone
            self._given_up[episode] = time.monotonic() - came
            raise
        finally:
            del self._open[number]
            self.last_activity = time.monotonic()

    def with_the_model(self) -> dict[str, float]:
        """Return the seconds during which the model had at least one request of an episode, by episode ID.

        Requests in progress count, as do those that ended since the last `take`. Episodes without either are left out.
        """
        now = time.monotonic()
        asked = [(request.episode, request.came, request.done) for request in list(self._requests)]
        asked += [(episode, came, now) for episode, came in list(self._open.values())]
        by_episode = grouped(asked, lambda each: each[0])
        return {episode: union([(came, done) for _, came, done in each]) for episode, each in by_episode.items()}

    def count(self, episode: str) -> int:
        """Return the number of an episode's requests since the last `take`, those in progress included."""
        made = [request.episode for request in list(self._requests)]
        return [*made, *(each for each, _ in list(self._open.values()))].count(episode)

    def now_asking(self) -> set[str]:
        """Return the IDs of the episodes that have a request with the model now."""
        return {episode for episode, _ in list(self._open.values())}

    def given_up(self) -> dict[str, float]:
        """Return the seconds after which each episode gave up a request, or for which it has waited so far, by ID."""
        now = time.monotonic()
        return {episode: now - came for episode, came in list(self._open.values())} | self._given_up

    def take(self) -> list[Request]:
        """Remove and return all finished requests, in order of arrival."""
        taken, self._requests = self._requests, []
        self._given_up = {}
        return sorted(taken, key=lambda request: request.came)
