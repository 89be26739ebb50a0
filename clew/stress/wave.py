"""A wave of episodes: the episodes that ran, and what was observed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from clew.stress import repeat, serial
from clew.stress.report import WaveReport, wave_report
from clew.stress.requests import Request
from clew.stress.serial import Crowd
from clew.stress.steps import Episode
from clew.stress.watch import Watched


@dataclass(kw_only=True)
class Wave:
    """Episodes that ran, and what was observed meanwhile."""

    name: str
    width: int
    episodes: list[Episode]
    requests: list[Request]
    seconds: float
    cpu_s: float
    busy_s: float
    """Seconds in which something that episodes may wait for computed or waited for a processor."""
    waits: Mapping[Any, float]
    at_model: Collection[Any]
    """Places where episodes mostly wait for the model."""
    waits_at: Mapping[str, Any]
    """Place where each episode was last seen to wait for the model, by episode ID. See `Waits.asked_at`."""
    watched: Watched

    @property
    def ended(self) -> list[Episode]:
        """Episodes that ended by themselves."""
        return [episode for episode in self.episodes if not episode.stopped]

    @property
    def stopped(self) -> list[Episode]:
        """Episodes that were stopped."""
        return [episode for episode in self.episodes if episode.stopped]

    @property
    def mean_s(self) -> float:
        return sum(episode.seconds for episode in self.ended) / max(1, len(self.ended))

    @property
    def model_s(self) -> float:
        """Mean seconds per episode in which the model had a request of it."""
        by_episode: dict[str, list[serial.Interval]] = {episode.id: [] for episode in self.ended}
        for request in self.requests:
            if request.episode in by_episode:
                by_episode[request.episode].append((request.came, request.done))
        return sum(map(serial.union, by_episode.values())) / max(1, len(by_episode))

    @property
    def crowd(self) -> Crowd:
        """Summary for `serial`. The time counts until the end of the last episode that ended by itself."""
        ended = self.ended
        began = min((episode.started for episode in self.episodes), default=0.0)
        seconds = self.seconds
        if self.stopped and ended:
            seconds = max(episode.finished for episode in ended) - began
        return Crowd(
            width=self.width,
            seconds=max(seconds, 1e-6),
            episodes=len(ended),
            mean_s=self.mean_s,
            model_s=self.model_s,
            waits={place: waited / max(1, len(ended)) for place, waited in self.waits.items()},
            busy_s=min(self.busy_s, seconds),
            at_model=self.at_model,
            took={episode.id: episode.seconds for episode in ended},
        )

    @property
    def told(self) -> dict[str, repeat.Told]:
        """Requests and rewards for `repeat`, by episode ID, of the episodes that did not fail."""
        return {
            episode.id: repeat.Told(
                requests=[request for request in self.requests if request.episode == episode.id], reward=episode.reward
            )
            for episode in self.episodes
            if episode.error is None
        }

    @property
    def refused_last(self) -> list[str]:
        """Messages with which the provider refused the last request of episodes that failed."""
        last = {request.episode: request.refused for request in self.requests}
        return [last[each.id] for each in self.episodes if each.error is not None and last.get(each.id)]

    def report(self, alone_s: float | None) -> WaveReport:
        return wave_report(self.name, self.width, self.episodes, self.requests, self.seconds, self.cpu_s, alone_s)
