"""Results of a stress, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from clew.stress.agent_steps import Episode
from clew.stress.growth import Sample
from clew.stress.requests import Request
from clew.stress.serial import Interval, concurrency, union
from clew.stress.verdict import Verdict, grouped
from clew.stress.waves import Wave

Outcome = Literal["fit", "not fit", "not judged"]

PARTS = ("episode", "model", "agent code", "tools", "reward", "blocked")
"""Parts of an episode's time:

- episode: from start to end
- model: the engine has at least one of its requests
- agent code: computing, up to the model's last answer
- tools: waiting for anything else, up to the model's last answer
- reward: from the model's last answer to the end
- blocked: the model, or perhaps a tool, has answered, but another episode holds the event loop. This time counts in no
  other part.
"""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Episodes that failed in the same way."""

    error: str
    """Error of the first of these episodes."""
    count: int
    episodes: list[str]
    """IDs of the first eight."""
    at: str
    """Innermost line of the user's code in the error's traceback, or where the episode waited when it was stopped."""


@dataclass(frozen=True, kw_only=True)
class WaveReport:
    """One wave of episodes, of which `width` run at a time."""

    name: str
    width: int
    episodes: int
    seconds: float
    episodes_per_s: float
    failed: int
    requests: int
    requests_at_once: int
    """Largest number of requests to the model at the same time."""
    episodes_at_once: float
    """Effective number of episodes that progress at once: throughput times the seconds of an episode alone.

    It is 1 if the episodes run one after another, even if all have started. It is also 1 if no episode ran alone.
    """
    latency: dict[str, dict[str, float]]
    """Seconds of the episodes that did not fail, by PARTS: their percentiles p50, p90 and p99."""
    curve: list[tuple[float, int]]
    """Pairs of (seconds since the start, number of requests that the engine has)."""
    cpu_share: float
    """Processor seconds of this process per second."""


@dataclass(frozen=True, kw_only=True)
class Report:
    agent: str
    batch: int
    group: int
    dp: int
    width: int
    """Number of episodes at once: batch / dp prompts, each `group` times."""
    rows: int
    """Number of rows in the data, of which `rows_used` were run."""
    rows_used: int
    waves: list[WaveReport]
    failures: list[Failure]
    growth: list[Sample]
    verdicts: list[Verdict]
    """Verdicts, facts first and suspicions last."""
    notes: list[str]
    """Notes on what could not be judged, why, and what to do."""

    @property
    def outcome(self) -> Outcome:
        """Overall result.

        "not fit" if a certain verdict speaks against training with this agent; "not judged" if there is none but
        something could not be examined; otherwise "fit".
        """
        if any(verdict.certain for verdict in self.verdicts):
            return "not fit"
        return "not judged" if self.notes else "fit"

    @property
    def measured(self) -> WaveReport:
        """The widest wave."""
        return max(self.waves, key=lambda wave: wave.width)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"outcome": self.outcome}


def seconds_of_parts(episode: Episode, requests: Sequence[Request], holds: Sequence[Interval]) -> dict[str, float]:
    """Return the seconds of each part of an episode, by PARTS.

    Args:
        requests: The episode's own requests to the model.
        holds: Times during which other episodes held the event loop for long.
    """
    modelled = [(request.came, request.done) for request in requests]
    answered = max((request.done for request in requests), default=episode.started)
    model = union(modelled)
    held = [(max(began, episode.started), min(ended, episode.finished)) for began, ended in holds]
    held = [(began, ended) for began, ended in held if began < ended]
    blocked = union([*modelled, *held]) - model
    held_at_end = union([(max(began, answered), ended) for began, ended in held if ended > answered])
    reward = max(0.0, episode.finished - answered - held_at_end)
    rest = max(0.0, episode.seconds - model - reward - blocked)
    code = min(rest, episode.code_s)
    return {
        "episode": episode.seconds,
        "model": model,
        "agent code": code,
        "tools": rest - code,
        "reward": reward,
        "blocked": blocked,
    }


def wave_report(wave: Wave, alone_s: float | None) -> WaveReport:
    """Return the report on one wave. `alone_s` are the seconds that an episode takes alone; None if unknown."""
    episodes, requests = wave.episodes, wave.requests
    began = min(episode.started for episode in episodes)
    divided = [
        seconds_of_parts(
            episode,
            wave.requests_of(episode.id),
            [hold for other in episodes if other is not episode for hold in other.holds],
        )
        for episode in episodes
        if episode.error is None
    ]
    curve = [(moment - began, open_now) for moment, open_now in concurrency((r.came, r.done) for r in requests)]
    per_s = len(episodes) / wave.seconds
    return WaveReport(
        name=wave.name,
        width=wave.width,
        episodes=len(episodes),
        seconds=wave.seconds,
        episodes_per_s=per_s,
        failed=sum(episode.error is not None for episode in episodes),
        requests=len(requests),
        requests_at_once=max((open_now for _, open_now in curve), default=0),
        episodes_at_once=min(float(wave.width), per_s * (alone_s or 1 / per_s)),
        latency={part: _percentiles([seconds[part] for seconds in divided]) for part in PARTS} if divided else {},
        curve=curve,
        cpu_share=wave.cpu_s / wave.seconds,
    )


def failures(episodes: Iterable[Episode]) -> list[Failure]:
    """Return the failures by cause, most common first.

    Errors of the same line of code have one cause if their messages' first lines differ only in words with digits.
    """
    failed = [(episode.error, episode) for episode in episodes if episode.error is not None]
    causes = grouped(failed, lambda each: (re.sub(r"[\w-]*\d[\w-]*", "#", each[0].partition("\n")[0]), each[1].at))
    found = [
        Failure(error=alike[0][0], count=len(alike), episodes=[each.id for _, each in alike[:8]], at=at)
        for (_, at), alike in causes.items()
    ]
    return sorted(found, key=lambda failure: -failure.count)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
