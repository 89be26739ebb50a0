"""Runs waves of episodes of one agent, observes them, and stops the episodes that do not end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from clew.errors import EpisodeError
from clew.printing import counted
from clew.rollout.agents import SharedClient
from clew.rollout.reward_function import reward_of_agent
from clew.stress import serial
from clew.stress.agent_steps import Episode, Stepped, name_of, run_episode, task_factory
from clew.stress.busy import BusyWatch
from clew.stress.frames import Code, Place
from clew.stress.origins import Origins
from clew.stress.repeat import Behaviour, behaviour_by_episode
from clew.stress.requests import Request
from clew.stress.serial import Waits
from clew.stress.verdict import grouped
from clew.stress.watch import MOVES, Block, LoopWatch

if TYPE_CHECKING:
    from clew.stress.gateway import Gateway

CANCEL_S = 10.0
"""Seconds that episodes may take to end when they are cancelled. After that, their code is not resumed any more."""

TIMEOUT_S = 120.0
"""Default limit of an episode in seconds, not counting the model and a busy processor."""

IN_ALL = 5
"""Maximum total time of an episode, model and busy processor included, as a multiple of `timeout_s`."""

PATIENT = 5
"""Time that a wave may stand still, as a multiple of the slowest episode's time alone.

A wave is stuck when, for that long and for at least `stuck_s`, no episode has ended, the model has had no request, and
nothing has computed.
"""

MANY = 32
"""Number of requests from which an episode that does not end seems to ask again without a limit."""

AGAIN_S = 3.0
"""Seconds that replace `stuck_s` after a wave was stuck."""

LOOK_S = 0.5
"""Seconds between two checks of whether anything moves."""

NO_REQUEST = "it made no request to the model with the API key that it was given"
"""Error of an episode that returned a reward although it had not asked the model."""

SAY_S = 10.0
"""Seconds between two lines of progress."""


@dataclass(kw_only=True)
class Wave:
    """Episodes that ran, and what was observed meanwhile."""

    name: str
    width: int
    """Number of episodes at once, as requested."""
    episodes: list[Episode]
    requests: list[Request]
    seconds: float
    cpu_s: float
    """Seconds for which this process computed."""
    busy_s: float
    """Seconds in which something that episodes may wait for was computing or waiting for a processor. See `busy.py`."""
    waits: Waits
    blocks: list[Block]

    @property
    def ended(self) -> list[Episode]:
        """Episodes that ended by themselves."""
        return [episode for episode in self.episodes if not episode.stopped]

    @property
    def stopped(self) -> list[Episode]:
        return [episode for episode in self.episodes if episode.stopped]

    @property
    def mean_s(self) -> float:
        return sum(episode.seconds for episode in self.ended) / max(1, len(self.ended))

    @cached_property
    def counted_s(self) -> float:
        """Seconds that throughput is measured by. Time after the last episode that ended by itself does not count."""
        seconds = self.seconds
        if self.stopped and self.ended:
            began = min(episode.started for episode in self.episodes)
            seconds = max(episode.finished for episode in self.ended) - began
        return max(seconds, 1e-6)

    @property
    def throughput(self) -> float:
        return len(self.ended) / self.counted_s

    @cached_property
    def model_s(self) -> float:
        """Mean seconds per episode during which the model had at least one of its requests."""
        intervals = ([(each.came, each.done) for each in self.requests_of(episode.id)] for episode in self.ended)
        return sum(map(serial.union, intervals)) / max(1, len(self.ended))

    def waited_s(self, place: Place) -> float:
        """Return the mean seconds per episode spent waiting at a place."""
        return self.waits.seconds.get(place, 0.0) / max(1, len(self.ended))

    @property
    def busy_share(self) -> float:
        """Share of the time in which something computed or waited for a processor."""
        return min(1.0, self.busy_s / self.counted_s)

    @property
    def idle_s(self) -> float:
        """Seconds in which episodes waited for a lock, a tool or the model, not for a processor or a blocked loop."""
        blocked_s = sum(block.seconds for block in self.blocks if not block.computing)
        idle_s = self.counted_s * (1 - self.busy_share) - blocked_s
        return max(idle_s, 0.02 * self.counted_s)  # never 0: others divide by it

    @cached_property
    def behaviour(self) -> dict[str, Behaviour]:
        return behaviour_by_episode(self.episodes, self.requests)

    @cached_property
    def _by_episode(self) -> dict[str, list[Request]]:
        return grouped(self.requests, lambda request: request.episode)

    def requests_of(self, episode: str) -> Sequence[Request]:
        """Return the requests of an episode, in order of arrival."""
        return self._by_episode.get(episode, ())

    def asked_at(self, episode: str) -> str:
        """Return the user's line where an episode asks the model, as `asked at ...`; empty if it is unknown."""
        place = self.waits.asked_at.get(episode)
        return f"asked at {place.where}" if place is not None else ""


class StoodStill(Exception):
    """Raised when the event loop stood still in a wave, or none of its episodes ended by itself."""

    def __init__(self, wave: Wave) -> None:
        super().__init__(wave.name)
        self.wave = wave


class WaveRunner:
    """Runs waves of episodes of one agent. The caller enters its watches."""

    def __init__(
        self,
        agent: Any,
        gateway: Gateway,
        *,
        timeout_s: float,
        stuck_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Prepare to run an agent. Arguments are those of `clew.stress.run.stressed`."""
        self.gateway, self.requests, self.client = gateway, gateway.requests, SharedClient()
        self.code = Code(agent)
        self.origins = Origins(self.code)
        self.busy = BusyWatch()
        self.running: set[Episode] = set()
        self.loop_watch = LoopWatch(self.code, self.running, stuck_s)
        self.say, self.timeout_s = say, timeout_s
        self.episodes = 0
        """Number of episodes run so far."""
        self._agent = agent
        self._patience_s = stuck_s
        self._longest_s = 0.0
        """Seconds that the slowest episode took alone."""

    @asynccontextmanager
    async def open_episode(self, id: str) -> AsyncIterator[tuple[str, str, SharedClient]]:
        """Open a session of the gateway for an episode. It is closed on exit."""
        key = self.gateway.open_episode(id)
        try:
            yield self.gateway.base_url, key, self.client
        finally:
            await asyncio.shield(self.gateway.close(key))

    async def wave(
        self, name: str, jobs: Sequence[tuple[str, dict[str, Any]]], at_once: int, stepped: Stepped | None = None
    ) -> Wave:
        """Run an episode for each ID and row, `at_once` at a time, and return when the last has ended.

        `stepped` is called after each step of an episode. An episode without an answer from the model counts as failed.

        Raises:
            StoodStill: If the event loop stood still, or no episode ended by itself.
        """
        self.say(f"{name}: {counted(len(jobs), 'episode')}, {min(at_once, len(jobs))} at once")
        asyncio.get_running_loop().set_task_factory(task_factory(stepped, self.origins.made))
        episodes = [Episode(id=id, data=data) for id, data in jobs]
        room = asyncio.Semaphore(at_once)
        self.requests.take()
        self.loop_watch.take()
        began, computed, busy = time.monotonic(), time.process_time(), self.busy.busy_s
        async with Waits(self.running, self.code, self.requests.now_asking) as waits:
            tasks = {asyncio.ensure_future(self._run(each, room, stepped)): each for each in episodes}
            await self._until_ended(name, tasks)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - computed
        self.episodes += len(episodes)
        given_up, requests = self.requests.given_up(), self.requests.take()
        if name in ("warm", "alone"):
            self._longest_s = max(self._longest_s, *(episode.seconds for episode in episodes))
        wave = Wave(
            name=name,
            width=at_once,
            episodes=episodes,
            requests=requests,
            seconds=seconds,
            cpu_s=cpu_s,
            busy_s=self.busy.busy_s - busy,
            waits=waits,
            blocks=self.loop_watch.take(),
        )
        for episode in episodes:
            if episode.error is None:
                self._check(episode, wave.requests_of(episode.id), given_up.get(episode.id))
        if self.loop_watch.stuck is None and wave.ended:
            return wave
        wave.episodes = [episode for episode in episodes if episode.started]
        raise StoodStill(wave)

    def _check(self, episode: Episode, requests: Sequence[Request], gave_up_s: float | None) -> None:
        """Fail an episode that got no answer or an invalid reward. Fill in the rewards that it set at the gateway.

        `gave_up_s` are the seconds after which it gave up a request; None if it gave up none.
        """
        if not requests:
            episode.at = self.code.defined_at
            episode.error = NO_REQUEST
            if gave_up_s is not None:
                episode.error = (
                    f"it ended without an answer from the model: it gave up its request after {gave_up_s:.1f} s"
                )
            return
        ids = {request.id for request in requests if not request.refused}
        own = dict(self.requests.rewards.get(episode.id, {}))
        try:
            if not ("" in ids and isinstance(episode.reward, dict)):  # a provider may leave out the ID
                reward_of_agent(episode.reward, name_of(self._agent), ids=ids, own=own)
        except EpisodeError as error:
            episode.error, episode.at = str(error), self.code.defined_at
        episode.reward = own if episode.reward is None else episode.reward

    async def _until_ended(self, name: str, tasks: Mapping[asyncio.Task[None], Episode]) -> None:
        """Wait for all episodes, and stop those that do not end. If the event loop stood still, cancel all that run."""
        still = asyncio.ensure_future(self.loop_watch.stood_still.wait())
        left: set[asyncio.Task[Any]] = set(tasks)
        began = reported = time.monotonic()
        quiet_s = 0.0
        """Seconds for which nothing has moved. Each round counts as LOOK_S, even if this process had to wait longer."""
        while left and not still.done():
            busy, requests = self.busy.busy_s, self.requests.last_activity
            done, waiting = await asyncio.wait({*left, still}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            left = waiting - {still}
            now = time.monotonic()
            asked = self.requests.now_asking() or self.requests.last_activity != requests
            if done or asked or self.busy.busy_s - busy > MOVES * LOOK_S:
                quiet_s = 0.0
            else:
                quiet_s += LOOK_S
            self._stop_endless({tasks[task]: task for task in left if task in tasks}, quiet_s)
            if left and now - reported > SAY_S:
                reported = now
                places = Counter(serial.places_of(self.running, self.code)).most_common(1)
                most = f"; most wait at {places[0][0]}" if places else ""
                ended = f"{len(tasks) - len(left)} of {len(tasks)} episodes have ended"
                self.say(f"{name}: {ended} after {now - began:.0f} s{most}")
        still.cancel()
        for abandoned in (False, True):
            for task in left:
                tasks[task].abandoned = abandoned
                task.cancel()
            if left:
                _, left = await asyncio.wait(left, timeout=CANCEL_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises errors that are not the agent's; the agent's are kept in its episode

    def _stop_endless(self, tasks: Mapping[Episode, asyncio.Task[Any]], quiet_s: float) -> None:
        """Stop episodes that ran too long, or all running episodes if nothing has moved for too long."""
        now, idle = time.monotonic(), self.busy.idle_s()
        still = quiet_s > max(self._patience_s, PATIENT * self._longest_s)
        model = self.requests.with_the_model() if not still else {}
        for episode in list(self.running & tasks.keys()):
            if episode.stopped:
                if not episode.abandoned and now - episode.stopped_at > CANCEL_S:
                    episode.abandoned = True
                    tasks[episode].cancel()
                continue
            own = min(now - episode.started, idle - episode.idle_from) - model.get(episode.id, 0.0)
            if still:
                why = f"nothing moved for {quiet_s:.0f} s: no episode ended, no request came, nothing computed"
            elif own > self.timeout_s:
                why = f"it ran for {now - episode.started:.0f} s, {own:.0f} s of them idle and without a request"
            elif now - episode.started > IN_ALL * self.timeout_s:
                why = f"it ran for {now - episode.started:.0f} s"
            else:
                continue
            made = self.requests.count(episode.id)
            why += f", with {counted(made, 'request')} to the model"
            why += "; bound the number of tries" if made >= MANY else ""
            episode.stopped, episode.stopped_at = f"did not end: {why}", now
            episode.at = str(serial.waits_at(episode, self.code) or "")
            tasks[episode].cancel()
        if still:
            self._patience_s = min(self._patience_s, AGAIN_S)

    async def _run(self, episode: Episode, room: asyncio.Semaphore, stepped: Stepped | None) -> None:
        async with room:
            episode.idle_from = self.busy.idle_s()
            self.running.add(episode)
            try:
                await run_episode(
                    self._agent, episode, self.open_episode, timeout_s=None, stepped=stepped, code=self.code
                )
            except asyncio.CancelledError:
                if not episode.stopped:
                    episode.error = "it was stopped: the event loop had stood still"
                    raise
            finally:
                episode.error = episode.stopped or episode.error
                self.running.discard(episode)
