"""Runs waves of episodes of one agent, and stops the episodes that come to no end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clew.stress import serial
from clew.stress.busy import BusyWatch
from clew.stress.frames import Code
from clew.stress.origins import Origins
from clew.stress.requests import Requests
from clew.stress.serial import Waits
from clew.stress.steps import Episode, OpenEpisode, Stepped, run_episode, task_factory
from clew.stress.stuck import COMPUTES, StuckWatch
from clew.stress.watch import LoopWatch
from clew.stress.wave import Wave

CANCEL_S = 10.0
"""Seconds that stopped episodes may take to end."""

TIMEOUT_S = 120.0
"""Default seconds that an episode may take, not counting the model and a busy processor."""

IN_ALL = 5
"""Maximum total time of an episode, model and busy processor included, as a multiple of `timeout_s`."""

PATIENT = 5
"""Time that a wave may stand still, as a multiple of the slowest episode's time alone.

A wave is stuck when, for that long and for `patience_s`, no episode has ended, no request has come, and nothing has
computed.
"""

AGAIN_S = 3.0
"""Seconds that replace `patience_s` after a wave was stuck."""

LOOK_S = 0.5
"""Seconds between two looks at whether something moves."""

SAY_S = 10.0
"""Seconds between two lines of progress."""


class StoodStill(Exception):
    """Raised when the event loop stood still in a wave, or none of its episodes ended by itself."""

    def __init__(self, wave: Wave) -> None:
        super().__init__(wave.name)
        self.wave = wave


class Stage:
    """Runs waves of episodes of one agent."""

    def __init__(
        self,
        *,
        agent: Any,
        code: Code,
        open_episode: OpenEpisode,
        requests: Requests,
        timeout_s: float,
        patience_s: float,
        loop_watch: LoopWatch,
        stuck: StuckWatch,
        running: set[Episode],
        origins: Origins,
        busy: BusyWatch,
        say: Callable[[str], None],
    ) -> None:
        self.episodes = 0
        """Number of episodes run so far."""
        self._agent, self._code = agent, code
        self._open_episode, self._requests = open_episode, requests
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._longest_s = 0.0
        """Seconds that the slowest episode took alone."""
        self._loop_watch = loop_watch
        self._say = say
        self._stuck = stuck
        self._running = running
        self._origins, self._busy = origins, busy

    async def wave(
        self, name: str, jobs: Sequence[tuple[str, dict[str, Any]]], at_once: int, stepped: Stepped | None = None
    ) -> Wave:
        """Run a wave of episodes, and return when the last has ended.

        Args:
            name: Name of the wave.
            jobs: ID and row of each episode.
            at_once: Maximum number of episodes at once.
            stepped: Called after each step of an episode.

        Raises:
            StoodStill: If the event loop stood still, or no episode ended by itself.
        """
        self._say(f"{name}: {len(jobs)} episodes, {min(at_once, len(jobs))} at once")
        asyncio.get_running_loop().set_task_factory(task_factory(stepped, self._origins.made))
        episodes = [Episode(id=id, data=data) for id, data in jobs]
        room = asyncio.Semaphore(at_once)
        self._requests.take()
        self._loop_watch.take()
        began, computed, busy = time.monotonic(), time.process_time(), self._busy.busy_s()
        async with Waits(self._running, self._code, self._requests.now_asking) as waits:
            tasks = {asyncio.ensure_future(self._run(each, room, stepped)): each for each in episodes}
            await self._until_ended(name, tasks)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - computed
        self.episodes += len(episodes)
        requests = self._requests.take()
        asked = {request.episode for request in requests}
        for episode in episodes:
            if name in ("warm", "alone"):
                self._longest_s = max(self._longest_s, episode.seconds)
            if episode.error is None and episode.id not in asked:
                episode.error = "it made no request to the model with the API key that it was given"
        wave = Wave(
            name=name,
            width=at_once,
            episodes=episodes,
            requests=requests,
            seconds=seconds,
            cpu_s=cpu_s,
            busy_s=self._busy.busy_s() - busy,
            waits=waits.seconds,
            at_model=waits.at_model,
            waits_at=waits.asked_at,
            watched=self._loop_watch.take(),
        )
        if self._stuck.verdict is None and wave.ended:
            return wave
        wave.episodes = [episode for episode in episodes if episode.started]
        raise StoodStill(wave)

    async def _until_ended(self, name: str, tasks: Mapping[asyncio.Task[None], Episode]) -> None:
        """Wait until all episodes have ended or the event loop has stood still, then cancel what still runs.

        Episodes that do not end by themselves are stopped.
        """
        still = asyncio.ensure_future(self._stuck.happened.wait())
        left: set[asyncio.Task[Any]] = set(tasks)
        began = told = time.monotonic()
        quiet_s = 0.0
        """Seconds for which nothing has moved. Each round counts as LOOK_S, even if this process had to wait longer."""
        while left and not still.done():
            busy, requests = self._busy.busy_s(), self._requests.moved
            done, waiting = await asyncio.wait({*left, still}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            left = waiting - {still}
            now = time.monotonic()
            asked = self._requests.now_asking() or self._requests.moved != requests
            if done or asked or self._busy.busy_s() - busy > COMPUTES * LOOK_S:
                quiet_s = 0.0
            else:
                quiet_s += LOOK_S
            self._stop_endless({tasks[task]: task for task in left if task in tasks}, quiet_s)
            if left and now - told > SAY_S:
                told = now
                self._say(self._progress(name, len(tasks), len(left), now - began))
        still.cancel()
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_S)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    def _progress(self, name: str, episodes: int, left: int, seconds: float) -> str:
        """Return a line of progress for the user."""
        places = Counter(str(place) for each in list(self._running) if (place := serial.waits_at(each, self._code)))
        most = f"; most wait at {places.most_common(1)[0][0]}" if places else ""
        return f"{name}: {episodes - left} of {episodes} episodes have ended after {seconds:.0f} s{most}"

    def _stop_endless(self, tasks: Mapping[Episode, asyncio.Task[Any]], quiet_s: float) -> None:
        """Stop episodes that ran too long, or all running episodes if nothing has moved for too long."""
        now, idle = time.monotonic(), self._busy.idle_s()
        patience_s = max(self._patience_s, PATIENT * self._longest_s)
        still = quiet_s > patience_s
        model = self._requests.with_the_model() if not still else {}
        for episode in list(self._running & tasks.keys()):
            own = min(now - episode.started, idle - episode.idle_from) - model.get(episode.id, 0.0)
            if still:
                why = f"nothing moved for {quiet_s:.0f} s: no episode ended, no request came, nothing computed"
            elif own > self._timeout_s:
                why = f"it ran for {now - episode.started:.0f} s, {own:.0f} s of them without model and processor"
            elif now - episode.started > IN_ALL * self._timeout_s:
                why = f"it ran for {now - episode.started:.0f} s"
            else:
                continue
            episode.stopped = f"did not end: {why}"
            episode.at = str(serial.waits_at(episode, self._code) or "")
            tasks[episode].cancel()
        if still:
            self._patience_s = min(self._patience_s, AGAIN_S)

    async def _run(self, episode: Episode, room: asyncio.Semaphore, stepped: Stepped | None) -> None:
        async with room:
            episode.idle_from = self._busy.idle_s()
            self._running.add(episode)
            try:
                await run_episode(
                    self._agent,
                    episode,
                    self._open_episode,
                    timeout_s=None,
                    stepped=stepped,
                    code=self._code,
                )
            except asyncio.CancelledError:
                if episode.stopped:
                    episode.error = episode.stopped
                    return
                episode.error = "it was stopped: the event loop had stood still"
                raise
            finally:
                self._running.discard(episode)
