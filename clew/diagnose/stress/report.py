"""What a stress found, as data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from clew.diagnose.stress.growth import QUANTITIES, Sample
from clew.diagnose.stress.requests import Request
from clew.diagnose.stress.serial import concurrency, union
from clew.diagnose.stress.steps import Episode
from clew.diagnose.stress.verdict import Verdict

Outcome = Literal["fit", "not fit", "not judged"]

PARTS = ("episode", "model", "agent code", "tools", "reward")
"""episode: from start to end. model: at least one request is with the engine. reward: from the model's last answer to
the end. agent code: computing, before that. tools: waiting for anything else, before that."""


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Seconds an episode."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Episodes that failed alike."""

    error: str
    """The first of them."""
    count: int
    episodes: list[str]
    at: str
    """The user's line that raised, or let pass, the error."""


@dataclass(frozen=True, kw_only=True)
class WaveReport:
    """One wave of episodes, all started at once."""

    name: str
    width: int
    """Episodes at once, as asked for."""
    episodes: int
    seconds: float
    episodes_per_s: float
    failed: int
    requests: int
    requests_at_once: int
    """To the model, at most."""
    episodes_at_once: float
    """So much of the episodes' own time went by in a second: 1 when they run one after another, although all have
    started; None of a wave that cannot be compared with one alone."""
    latency: dict[str, Percentiles]
    """By PARTS, of the episodes that did not fail."""
    curve: list[tuple[float, int]]
    """(seconds since the start, requests with the engine)"""
    cpu_share: float
    """Processor time of this process a second."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a stress found."""

    agent: str
    batch: int
    group: int
    dp: int
    width: int
    """Episodes at once: batch / dp prompts, each `group` times."""
    rows: int
    """Of the data ..."""
    rows_used: int
    """... and how many of them were run."""
    waves: list[WaveReport]
    failures: list[Failure]
    growth: list[Sample]
    verdicts: list[Verdict]
    """Facts first, then suspicions."""
    notes: list[str]
    """What could not be judged, why, and what to do."""

    @property
    def outcome(self) -> Outcome:
        """Not fit when something certain speaks against training with this agent; not judged when something could not
        be looked at."""
        if any(verdict.certain for verdict in self.verdicts):
            return "not fit"
        return "not judged" if self.notes else "fit"

    @property
    def measured(self) -> WaveReport:
        """The widest wave."""
        return max(self.waves, key=lambda wave: wave.width)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"outcome": self.outcome}


def parts(episode: Episode, requests: Sequence[Request]) -> dict[str, float]:
    """How an episode's seconds divide, by PARTS."""
    model = union([(request.came, request.done) for request in requests])
    answered = max((request.done for request in requests), default=episode.started)
    reward = max(0.0, episode.finished - answered)
    rest = max(0.0, episode.seconds - model - reward)
    code = min(rest, episode.code_s)
    return {"episode": episode.seconds, "model": model, "agent code": code, "tools": rest - code, "reward": reward}


def wave_report(
    name: str,
    width: int,
    episodes: Sequence[Episode],
    requests: Sequence[Request],
    seconds: float,
    cpu_s: float,
    alone_s: float | None,
) -> WaveReport:
    """alone_s: what an episode takes alone."""
    began = min(episode.started for episode in episodes)
    by_episode = {episode.id: [r for r in requests if r.episode == episode.id] for episode in episodes}
    divided = [parts(episode, by_episode[episode.id]) for episode in episodes if episode.error is None]
    curve = [(moment - began, open_now) for moment, open_now in concurrency((r.came, r.done) for r in requests)]
    return WaveReport(
        name=name,
        width=width,
        episodes=len(episodes),
        seconds=seconds,
        episodes_per_s=len(episodes) / seconds,
        failed=sum(episode.error is not None for episode in episodes),
        requests=len(requests),
        requests_at_once=max((open_now for _, open_now in curve), default=0),
        episodes_at_once=min(float(width), len(episodes) / seconds * (alone_s or seconds / len(episodes))),
        latency={part: _percentiles(each[part] for each in divided) for part in PARTS} if divided else {},
        curve=curve,
        cpu_share=cpu_s / seconds,
    )


def failures(episodes: Iterable[Episode]) -> list[Failure]:
    """By cause, commonest first: errors that differ only in numbers and IDs (words that hold digits) are one."""
    kinds: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        if episode.error is not None:
            kind = re.sub(r"[\w-]*\d[\w-]*", "#", episode.error.partition("\n")[0])
            kinds.setdefault((kind, episode.at), []).append(episode)
    found = [
        Failure(error=alike[0].error or "", count=len(alike), episodes=[each.id for each in alike[:8]], at=at)
        for (_, at), alike in kinds.items()
    ]
    return sorted(found, key=lambda failure: -failure.count)


def growth_shown(samples: Sequence[Sample]) -> dict[str, list[tuple[int, float]]]:
    """Quantity to its points (episodes so far, count), of those that were counted."""
    names = Counter(name for sample in samples for name in sample.counts)
    return {
        name: [(sample.episodes, sample.counts[name]) for sample in samples if name in sample.counts]
        for name in QUANTITIES
        if names[name] > 1
    }


def _percentiles(values: Iterable[float]) -> Percentiles:
    p50, p90, p99 = np.percentile(list(values), [50, 90, 99])
    return Percentiles(p50=float(p50), p90=float(p90), p99=float(p99))
