"""The processes where the waiting ends, which `local_cause` and its rules judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.observed import Snapshot
from clew.hang.verdict import Actor, Verdict, sentences, subject, verdict_about


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Processes where the waiting ends, and everything around them."""

    culprits: list[Actor]
    waiters: list[Actor]
    job: list[Actor]
    """The culprits and the waiters, also those that have ended."""
    snapshot: Snapshot

    @property
    def one(self) -> Actor:
        return self.culprits[0]

    @property
    def act(self) -> Activity:
        return self.one.activity

    @property
    def blocked_ranks(self) -> list[Actor]:
        """Return the ranks that wait for the culprit in a collective or message, maybe on their GPUs."""
        return [a for a in self.waiters if a.rank is not None and a.activity.kind in (*DISTRIBUTED, "device")]

    @property
    def sources(self) -> dict[str, str]:
        return self.snapshot.sources

    @property
    def parent(self) -> Actor | None:
        """Return the process that has started the culprit."""
        return next((a for a in self.job if a.pid == self.one.process.parent), None)

    def blame(self, pattern: str, blamed: Sequence[Actor], why: str, **more) -> Verdict:
        """Return a verdict about some of these processes, with what all of them do as evidence."""
        return verdict_about(pattern, blamed, why, self.job, **more)

    @property
    def says(self) -> str:
        """Return a sentence about each of the first four culprits: what it does, and where."""
        return sentences(self.culprits)

    @property
    def who_waits(self) -> str:
        """Return a sentence about the ranks that wait for the culprit in a collective; "" if there is none."""
        ranked = self.blocked_ranks
        return f" {subject(ranked, 'waits', 'wait')} for it in {ranked[0].activity.op}." if ranked else ""
