"""A verdict, and the processes that it is about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clew.hang.activity import DISTRIBUTED, Activity
from clew.hang.equal_stacks import ranges
from clew.hang.observed import Process, Snapshot

MESSAGES = ("send", "recv")
SOUND = ("healthy", "slow")
LOCAL = {
    "sleep": ("missing rank", "sleeps"),
    "lock": ("lock or I/O", "waits for a lock"),
    "file": ("lock or I/O", "waits for a file"),
    "network": ("external wait", "waits for the network"),
    "http": ("external wait", "waits for an HTTP server"),
    "pipe": ("external wait", "reads from a pipe"),
    "stdin": ("lock or I/O", "waits at a breakpoint or for input"),
    "process": ("external wait", "waits for another process"),
    "queue": ("rollout blocked", "waits for an item in a queue"),
    "queue_full": ("rollout blocked", "waits for room in a full queue"),
    "condition": ("rollout blocked", "waits for an event or condition that nobody sets"),
    "barrier": ("rollout blocked", "waits at a barrier for other threads"),
    "signal": ("rollout blocked", "waits for an event, condition or barrier of other processes"),
    "future": ("rollout blocked", "waits for a result"),
    "pool": ("rollout blocked", "waits for a worker pool"),
    "connections": ("rollout blocked", "waits for a connection of its client, whose connections are all in use"),
    "thread": ("rollout blocked", "waits for a thread"),
    "tasks": ("rollout blocked", "waits for other coroutines"),
    "select": ("rollout blocked", "waits for requests or events"),
    "data_loader": ("data loading", "waits for its data loader"),
    "compute": ("cpu", "computes"),
    "device": ("undetermined", "waits for its GPU"),
    "rpc": ("external wait", "waits for a remote call (torch.distributed.rpc)"),
    "ray": ("rollout blocked", "waits for a result of Ray"),
    "store": ("missing rank", "waits for a key of the store"),
    "unknown": ("undetermined", "does something that its stack does not show"),
}
"""Pattern and words for each kind of activity of a process that others wait for."""


def words_of(one: Activity) -> str:
    """Return what a thread or coroutine does, as a verb and its object."""
    if one.op == "main_loop":
        return "is an idle actor of Ray, with no method to run,"
    if one.kind == "condition" and one.op in ("acquire", "__enter__"):
        return "waits for a lock or semaphore that nobody releases"
    if one.kind == "condition" and one.op == "join":
        return "waits until all items of a queue have been worked on"
    if one.kind == "file" and not one.op.endswith(("open", "partner")):  # the kernel's wait for the other end of a FIFO
        return "waits for a file lock"
    return LOCAL[one.kind][1] if one.kind in LOCAL else f"is in {one.op}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of judging one job."""

    pattern: str
    ranks: tuple[int, ...] = ()
    """Ranks at fault."""
    pids: tuple[int, ...] = ()
    """Processes at fault."""
    sites: tuple[str, ...] = ()
    """Call sites, as file:line, of the processes at fault."""
    cause: str = ""
    """Kind of wait of the process at fault, or a word such as dead, slow or paused."""
    explanation: str = ""
    evidence: tuple[str, ...] = ()
    runner_up: str = ""
    confidence: str = "high"
    structural: bool = False
    """True if nothing outside could end the wait, so that longer watching cannot change the verdict."""
    next: str = ""
    restart: str = ""
    """Sentence that says whether a restart would hang again."""
    notes: tuple[str, ...] = ()

    def at(self, *sites: str) -> Verdict:
        """Return the verdict with further call sites."""
        return replace(self, sites=tuple(sorted({*self.sites, *sites} - {""})))

    @property
    def exit_code(self) -> int:
        """Return 0 if nothing is wrong, 1 after a diagnosed hang, 3 if nothing could be decided."""
        return 0 if self.pattern in SOUND else 3 if self.pattern == "undetermined" else 1


@dataclass(frozen=True, kw_only=True)
class Actor:
    """One process, with what it is doing."""

    process: Process
    activity: Activity
    threads: tuple[Activity, ...] = ()
    moving: bool = False
    role: str = "other"
    """rank, launcher, loader (a DataLoader's worker), idle (helpers, unoccupied workers, native programs) or other."""
    work: str = ""
    """Words about the native program that it waits for, if that program makes progress."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def rank(self) -> int | None:
        return self.process.rank if self.role == "rank" else None

    @property
    def dead(self) -> bool:
        return self.process.last.state in "ZX" or bool(self.process.exit)

    @property
    def stopped(self) -> bool:
        return self.process.last.state in "Tt"

    @property
    def hidden_exception(self) -> str:
        """Return the class of the exception given to the `__exit__` that the main thread is in; "" if there is none."""
        for frame in self.process.main_frames:
            text = " ".join(frame.locals.values()) if frame.name in ("__exit__", "_exit_wrapper") else ""
            if found := re.search(r"\b[A-Z]\w*(Error|Exception|Interrupt|Exit)\b", text):
                return found[0]
        return ""

    @property
    def says(self) -> str:
        """Return what the process does, in words."""
        one = self.activity
        if self.dead:
            return f"{self.process.label} has ended {self.process.exit}".rstrip()
        if self.stopped:
            return f"{self.process.label} is stopped"
        way = "to" if one.kind == "send" else "from"
        peer = f" {way} rank {ranges(one.peers)}" if one.peers else ""
        what = f"is in {one.op}" if one.kind in DISTRIBUTED else words_of(one)
        if one.kind in ("collective", *MESSAGES) and one.op != "backward":
            what = f"is in {one.op}{peer} of group {one.group}"
        if one.kind == "store" and one.op != "TCPStore":
            what = f"is in {one.op}() of the store"
        if one.kind == "unknown" and one.site:
            what = "is"
        if one.kind == "pipe" and self.process.waits_in.endswith("pipe_write"):
            what = "writes to a full pipe, which nobody reads,"
        at = f" at {one.place}" if one.site else ""
        of = f"thread {one.thread} of " if one.thread not in ("", "MainThread") and not one.task else ""
        return f"{of}{self.process.label} {what}{at}" + (f": it {self.work}" if self.work else "")


def verdict_about(pattern: str, culprits: Sequence[Actor], why: str, others: Sequence[Actor] = (), **more) -> Verdict:
    """Return a verdict that blames some processes, with what they and the others do as evidence.

    The call site is that of the culprits. If they have none, because they have ended, it is that of a waiting process.
    `others` are processes whose state is evidence, too; `more` has other fields, or replaces these.
    """
    sites = {a.activity.site for a in culprits if a.activity.site and not a.activity.site.startswith("<")}
    if culprits and not sites:  # one that waits for a process to end is less telling than others
        waiting = [a.activity for a in others if a not in culprits and a.activity.site and not a.dead]
        sites = {each.site for each in sorted(waiting, key=lambda each: each.kind in ("process", "thread"))[:1]}
    verdict = Verdict(
        pattern=pattern,
        ranks=tuple(sorted({a.rank for a in culprits if a.rank is not None})),
        pids=tuple(sorted(a.pid for a in culprits)),
        sites=tuple(sorted(sites)),
        explanation=why[:1].upper() + why[1:],
        evidence=tuple(a.says for a in [*culprits, *(o for o in others if o not in culprits)])[:12],
    )
    return replace(verdict, **more)


def sentences(actors: Sequence[Actor]) -> str:
    """Return a sentence about each of the first four processes: what it does, and where."""
    return " ".join(f"{a.says[:1].upper()}{a.says[1:]}." for a in actors[:4])


def names(actors: Sequence[Actor]) -> str:
    """Return the ranks of some processes as ranges, such as 0-3, 7."""
    return ranges([a.rank for a in actors if a.rank is not None])


def subject(actors: Sequence[Actor], one: str, several: str) -> str:
    """Return the beginning of a sentence about ranks, such as "Rank 3 is" or "Ranks 0-2 are"."""
    return f"Rank {names(actors)} {one}" if len(actors) == 1 else f"Ranks {names(actors)} {several}"


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Processes where the waiting ends, which `local_cause` and its rules judge, and everything around them."""

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
        whom = "it" if self.one.rank is None else f"rank {self.one.rank}"
        return f" {subject(ranked, 'waits', 'wait')} for {whom} in {ranked[0].activity.op}." if ranked else ""
