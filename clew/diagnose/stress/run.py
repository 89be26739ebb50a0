"""The stress itself: waves of episodes, and what is judged by each.

::

    warm        1 episode            imports and first uses; nothing is judged
    alone       a few, one by one    what an episode takes, asks and is told without company
    narrow      width / 4 at once    ─┐ throughput: does it grow with the width?
    crowd       width at once        ─┤ what blocks the loop; do answers cross over?
    again       the same             ─┘ the same seeds: the same results?
    watched     a few at once: after each step, which of the objects that outlive an episode has changed
    traced      a few at once, three times: what memory the user's code holds
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clew.diagnose.stress import files, growth, process, repeat, serial, shared, watch
from clew.diagnose.stress.frames import Code
from clew.diagnose.stress.report import Report, WaveReport, failures, wave_report
from clew.diagnose.stress.requests import Request, Requests
from clew.diagnose.stress.serial import Crowd, Waits
from clew.diagnose.stress.steps import Episode, OpenEpisode, Stepped, run_episode, task_factory
from clew.diagnose.stress.stuck import STUCK_S, StuckWatch
from clew.diagnose.stress.verdict import Verdict
from clew.diagnose.stress.watch import LoopWatch, Watched
from clew.diagnose.stress.words import texts

ALONE = 3
"""Episodes that run alone, one after another."""

WATCHED = 8
"""Episodes at once in the wave that is watched after each step ..."""

TRACED = 4
"""... and in those whose memory is traced, which slows them down several times."""

CANCEL_S = 10.0
"""How long episodes that are stopped may take to end."""

FAILED_SHARE = 0.1
"""More failed episodes than this speak against the agent."""


@dataclass(kw_only=True)
class Wave:
    """Episodes that ran, and what was seen meanwhile."""

    name: str
    width: int
    episodes: list[Episode]
    requests: list[Request]
    seconds: float
    cpu_s: float
    wanted_s: float
    """Time for which the process computed, or could have if it had got a processor; of all threads together."""
    waits: Mapping[Any, float]
    watched: Watched

    @property
    def mean_s(self) -> float:
        return sum(episode.seconds for episode in self.episodes) / len(self.episodes)

    @property
    def model_s(self) -> float:
        """Seconds of a mean episode in which the model had a request of it."""
        by_episode: dict[str, list[serial.Interval]] = defaultdict(list)
        for request in self.requests:
            by_episode[request.episode].append((request.came, request.done))
        return sum(map(serial.union, by_episode.values())) / len(self.episodes)

    @property
    def crowd(self) -> Crowd:
        """As `serial` judges it."""
        return Crowd(
            width=self.width,
            seconds=self.seconds,
            episodes=len(self.episodes),
            mean_s=self.mean_s,
            model_s=self.model_s,
            waits={place: seconds / len(self.episodes) for place, seconds in self.waits.items()},
            busy_share=max(self.watched.late_share, self.wanted_s / self.seconds),
        )

    @property
    def told(self) -> dict[str, repeat.Told]:
        """As `repeat` compares it: of the episodes that did not fail."""
        return {
            episode.id: repeat.Told(
                requests=[request for request in self.requests if request.episode == episode.id], reward=episode.reward
            )
            for episode in self.episodes
            if episode.error is None
        }

    @property
    def refused_last(self) -> list[str]:
        """How the provider refused the last request of episodes that failed."""
        last = {request.episode: request.refused for request in self.requests}
        return [last[each.id] for each in self.episodes if each.error is not None and last.get(each.id)]

    def report(self, alone_s: float | None) -> WaveReport:
        return wave_report(self.name, self.width, self.episodes, self.requests, self.seconds, self.cpu_s, alone_s)


async def stress(
    agent: Any,
    rows: Sequence[dict[str, Any]],
    *,
    open_episode: OpenEpisode,
    requests: Requests,
    batch: int,
    group: int,
    dp: int = 1,
    timeout_s: float | None = None,
    stuck_s: float = STUCK_S,
    sessions: Callable[[], int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the agent as one rollout process of `dp` would: batch / dp prompts at once, each `group` times.

    open_episode: opens a session of the gateway for an episode's ID; the same ID comes again in later waves, and is to
    get the same seeds. requests: where the gateway notes what they ask. timeout_s: of an episode.
    stuck_s: how long the loop may stand still. sessions: how many the gateway holds open. say: told what runs now. To
    be called in the process's main event loop; the gateway's must be another thread's.
    """
    prompts = -(-batch // dp)
    jobs = [(f"g{number:06d}.e{copy}", rows[number % len(rows)]) for copy in range(group) for number in range(prompts)]
    width = len(jobs)
    code = Code(agent)
    gc.collect()
    gc.freeze()  # a full collection of what was there before would hold up the loop
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    sampler = growth.Sampler(code, sessions)
    samples: list[growth.Sample] = []
    running: set[Episode] = set()
    waves: list[Wave] = []
    changes: list[shared.Change] = []

    def report(verdicts: Sequence[Verdict], notes: list[str], alone_s: float | None = None) -> Report:
        return Report(
            agent=f"{type(agent).__module__}.{type(agent).__qualname__}",
            batch=batch,
            group=group,
            dp=dp,
            width=width,
            waves=[wave.report(alone_s) for wave in waves[1:5] or waves],
            failures=failures(episode for wave in waves for episode in wave.episodes),
            growth=samples,
            verdicts=sorted(verdicts, key=lambda verdict: not verdict.certain),
            notes=notes,
        )

    stuck, process_state = StuckWatch(code, running, stuck_s), process.ProcessState(code)
    written = files.Files(code)
    try:
        async with stuck, process_state, written:
            async with LoopWatch(code) as loop_watch:
                stage = _Stage(agent, code, open_episode, requests, timeout_s, loop_watch, stuck, running, say)
                waves.append(await stage.wave("warm", jobs[:1], 1, process_state.stepped))
                waves.append(await stage.wave("alone", jobs[:ALONE], 1))
                for name, at_once in (("narrow", max(1, width // 4)), ("crowd", width), ("again", width)):
                    waves.append(await stage.wave(name, jobs[:at_once], at_once))
                    samples.append(await sampler.sample(stage.episodes))
                process_state.look()
                state = shared.State(agent, code)

                def stepped(episode: Episode) -> None:
                    state.stepped(episode)
                    process_state.stepped(episode)

                waves.append(await stage.wave("watched", jobs[:WATCHED], WATCHED, stepped))
                changes = state.changes
            tracemalloc.start(growth.DEPTH)
            for _ in range(3):
                waves.append(await stage.wave("traced", jobs[:TRACED], TRACED))
                samples.append(await sampler.sample(stage.episodes))
    except StoodStill as end:
        waves.append(end.wave)
        assert stuck.verdict is not None
        return report([stuck.verdict], [f"all after the wave {end.wave.name!r}, in which the event loop stood still"])
    finally:
        tracemalloc.stop()
        loop.set_task_factory(factory)
        gc.unfreeze()
        for task in sampler.left_tasks():
            task.cancel()
    warm, alone, narrow, crowd, again, *_ = waves
    verdicts, notes = _judge(warm, alone, narrow, crowd, again)
    matters = any(verdict.kind in ("shared", "differs") for verdict in verdicts)
    verdicts += shared.verdicts(changes, matters=matters) + files.verdicts(written.opened, matters=matters)
    verdicts += growth.verdicts(samples)
    verdicts += process.verdicts(process_state.changes)
    return report(verdicts, notes, alone.mean_s)


class StoodStill(Exception):
    """A wave came to no end by itself."""

    def __init__(self, wave: Wave) -> None:
        super().__init__(wave.name)
        self.wave = wave


class _Stage:
    """Runs waves of episodes of one agent."""

    def __init__(
        self,
        agent: Any,
        code: Code,
        open_episode: OpenEpisode,
        requests: Requests,
        timeout_s: float | None,
        loop_watch: LoopWatch,
        stuck: StuckWatch,
        running: set[Episode],
        say: Callable[[str], None],
    ) -> None:
        self.episodes = 0
        """So far."""
        self._agent, self._code = agent, code
        self._open_episode, self._requests = open_episode, requests
        self._timeout_s = timeout_s
        self._loop_watch = loop_watch
        self._say = say
        self._stuck = stuck
        self._running = running

    async def wave(
        self, name: str, jobs: Sequence[tuple[str, dict[str, Any]]], at_once: int, stepped: Stepped | None = None
    ) -> Wave:
        """Run the episodes, at most so many at once; ends when the last has ended. Raises StoodStill."""
        self._say(f"{name}: {len(jobs)} episodes, {min(at_once, len(jobs))} at once")
        asyncio.get_running_loop().set_task_factory(task_factory(stepped))
        episodes = [Episode(id=id, data=data) for id, data in jobs]
        room = asyncio.Semaphore(at_once)
        self._requests.take()
        self._loop_watch.take()
        began, computed, denied = time.monotonic(), time.process_time(), watch.denied_s(watch.threads())
        async with Waits(self._running, self._code) as waits:
            await self._until_ended([asyncio.ensure_future(self._run(each, room, stepped)) for each in episodes])
        seconds, cpu_s = time.monotonic() - began, time.process_time() - computed
        self.episodes += len(episodes)
        requests = self._requests.take()
        asked = {request.episode for request in requests}
        for episode in episodes:
            if episode.error is None and episode.id not in asked:
                episode.error = "it made no request to the model with the API key that it was given"
        wave = Wave(
            name=name,
            width=at_once,
            episodes=episodes,
            requests=requests,
            seconds=seconds,
            cpu_s=cpu_s,
            wanted_s=cpu_s + max(0.0, watch.denied_s(watch.threads()) - denied),
            waits=waits.seconds,
            watched=self._loop_watch.take(),
        )
        if self._stuck.verdict is None:
            return wave
        wave.episodes = [episode for episode in episodes if episode.started]
        raise StoodStill(wave)

    async def _until_ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Or until the event loop stood still; what runs then is cancelled."""
        still = asyncio.ensure_future(self._stuck.happened.wait())
        left: set[asyncio.Task[Any]] = set(tasks)
        while left and not still.done():
            _, waiting = await asyncio.wait({*left, still}, return_when=asyncio.FIRST_COMPLETED)
            left = waiting - {still}
        still.cancel()
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _run(self, episode: Episode, room: asyncio.Semaphore, stepped: Stepped | None) -> None:
        async with room:
            self._running.add(episode)
            try:
                await run_episode(
                    self._agent,
                    episode,
                    self._open_episode,
                    timeout_s=self._timeout_s,
                    stepped=stepped,
                    code=self._code,
                )
            except asyncio.CancelledError:
                episode.error = "it was stopped: the event loop had stood still"
                raise
            finally:
                self._running.discard(episode)


def _judge(warm: Wave, alone: Wave, narrow: Wave, crowd: Wave, again: Wave) -> tuple[list[Verdict], list[str]]:
    """What the waves at full speed tell, and what they cannot."""
    notes: list[str] = []
    verdicts = watch.verdicts(crowd.watched + again.watched)
    quicker = min(crowd, again, key=lambda wave: wave.seconds).crowd
    asked = [request for wave in (alone, narrow, crowd, again) for request in wave.requests]
    refused = [request.refused for request in asked if request.refused]
    waits = serial.verdict(alone.crowd, narrow.crowd, quicker)
    if refused:
        notes.append(
            f"latency, throughput and what runs one at a time: {len(refused)} of {len(asked)} requests were refused "
            f"({_refusals(refused)}), and waits before another try are in them. Ask for less at once: --batch, --group."
        )
    elif waits is not None:
        verdicts.append(waits)
    elif quicker.width == narrow.width:
        notes.append("with so few episodes at once, nothing can be said about what runs one at a time")
    elif serial.saturates(alone.crowd, narrow.crowd, quicker) and serial.by_model(alone.crowd, quicker):
        notes.append(
            f"what runs one at a time: throughput did not grow with the width because the model answers more slowly: "
            f"it has an episode for {quicker.model_s:.2f} s at {quicker.width} at once, alone for {alone.model_s:.2f} s"
        )
    elif serial.saturates(alone.crowd, narrow.crowd, quicker) and not verdicts:
        notes.append(
            f"throughput did not grow with the width, and why is not known: at {quicker.width} at once the event loop "
            f"or the processor was busy for {min(quicker.busy_share, 1):.0%} of the time"
            + (f", and episodes waited most at {place}" if (place := serial.waited_most(alone.crowd, quicker)) else "")
            + ". Ask again with a stand-in of longer latency."
        )
    differing = _differing(warm, alone, crowd, again)
    told_otherwise = repeat.by_chance(crowd.told, again.told)
    if told_otherwise and not differing:
        notes.append(
            f"whether the same seeds give the same results: run again, {len(told_otherwise)} of {len(crowd.episodes)} "
            f"episodes were answered differently where they asked the same, so what differs may be the model's doing"
        )
    verdicts += _strangers(alone, crowd, again) + _crossing(crowd, again) + differing
    return verdicts + _failing(alone, crowd, again), notes


def _failing(alone: Wave, crowd: Wave, again: Wave) -> list[Verdict]:
    failed = [sum(e.error is not None for e in wave.episodes) for wave in (alone, crowd, again)]
    of = len(crowd.episodes) + len(again.episodes)
    if not failed[0] and failed[1] + failed[2] <= FAILED_SHARE * of:
        return []
    commonest = failures([*alone.episodes, *crowd.episodes, *again.episodes])[0]
    what = f"{failed[1] + failed[2]} of {of} episodes failed at {crowd.width} at once, {failed[0]} of "
    what += f"{len(alone.episodes)} alone"
    refused = [each for wave in (alone, crowd, again) for each in wave.refused_last]
    evidence = [commonest.error]
    if refused:
        what += f"; the provider had refused the last request of {len(refused)} of them"
        evidence.append(f"the provider said {_refusals(refused)}; ask for less at once (--batch, --group)")
    return [Verdict(kind="fails", what=what, where=commonest.at, evidence=evidence)]


def _refusals(refused: Sequence[str]) -> str:
    """How often of each kind, and what the commonest says."""
    kinds = Counter(each.partition(":")[0] for each in refused).most_common()
    example = next(each for each in refused if each.startswith(kinds[0][0]))
    return ", ".join([f"{count} times {kind}" for kind, count in kinds]) + f", such as {example!r}"


def _strangers(*waves: Wave) -> list[Verdict]:
    """Episodes that were refused because they came with the API key of another, as the gateway's message names it."""
    episodes = [episode for wave in waves for episode in wave.episodes]
    names = {episode.id for episode in episodes}
    found = [
        episode
        for episode in episodes
        if episode.error and (names - {episode.id}).intersection(re.findall(r"session (\S+) has ended", episode.error))
    ]
    if not found:
        return []
    return [
        Verdict(
            kind="shared",
            what=f"{len(found)} of {len(episodes)} episodes used the API key of another, whose session had ended",
            where=found[0].at,
            evidence=[
                f"{found[0].id}: {found[0].error}",
                "make the client anew in each run, with the base_url and api_key that it is given",
            ],
        )
    ]


def _crossing(crowd: Wave, again: Wave) -> list[Verdict]:
    found = [
        crossing
        for wave, other in ((crowd, again), (again, crowd))
        for crossing in shared.crossings(wave.requests, _is_own(wave, other))
    ]
    if not found:
        return []
    evidence = [f"{each.asker} asked with {each.text!r}, which {each.owner} had been told" for each in found[:4]]
    return [
        Verdict(kind="shared", what=f"answers cross over, between {len(found)} pairs of episodes", evidence=evidence)
    ]


def _is_own(wave: Wave, other: Wave) -> Callable[[str, str], bool]:
    """Text of the episode's data, or that it asks with in another wave, although nobody was told it there."""
    data = {episode.id: "\n".join(texts(episode.data)) for episode in wave.episodes}
    asked: defaultdict[str, str] = defaultdict(str)
    for request in other.requests:
        asked[request.episode] += request.asked + "\n"
    told = "\n".join(request.answered for request in other.requests)
    return lambda episode, text: text in data[episode] or (text in asked[episode] and text not in told)


def _differing(warm: Wave, alone: Wave, crowd: Wave, again: Wave) -> list[Verdict]:
    """What an episode does depends on chance, or on the company it is in."""
    by_chance_alone = repeat.differences(warm.told, alone.told)
    by_chance = repeat.differences(crowd.told, again.told) or by_chance_alone
    if by_chance:
        repeats_alone = warm.told and not by_chance_alone
        hint = ["alone, an episode repeats: look at what they share"] if repeats_alone else []
        return [
            Verdict(
                kind="differs",
                what=f"{len(by_chance)} of {len(crowd.episodes)} episodes differ when they are run again with the same "
                f"seeds and answers",
                evidence=[f"{each.episode}: {each.what}" for each in by_chance[:4]] + hint,
            )
        ]
    by_company = repeat.differences(alone.told, crowd.told)
    if by_company:
        return [
            Verdict(
                kind="shared",
                what="an episode does something else when others run before or beside it",
                evidence=[f"{each.episode}, alone and in a crowd: {each.what}" for each in by_company[:4]],
            )
        ]
    return []
