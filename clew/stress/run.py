"""The stress itself: waves of episodes, and what each wave shows.

::

    warm        1 episode            imports and first uses; nothing is judged
    alone       a few, one by one    time, requests and answers of an episode on its own
    narrow      width / 4 at once    ─┐ throughput: does it grow with the width?
    crowd       width at once        ─┤ what blocks the loop; do answers cross over?
    again       the same             ─┘ the same seeds: the same results?
    confirm     the same, if episodes seem to wait for one another (a busy machine may cause that once, but not always),
                or if the process's memory grows (which ends once caches and the allocator are warm)
    watched     a few at once: after each step, which of the objects that outlive an episode has changed?
    read        the same, if several episodes changed one object: does one read what another has left there?
    troubled    a few at once, whose server fails or cuts an answer short: does a reward come of it all the same?
    traced      a few at once, three times: what memory the user's code holds
    elsewhere   a few, in two other processes with another PYTHONHASHSEED: the same results?

An episode that does not end by itself is stopped and reported. The timings are judged without it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from clew.stress import growth, shared
from clew.stress.agent_steps import Episode, Stepped
from clew.stress.crossings import crossed_rows, judge_rows
from clew.stress.elsewhere import Source, also_elsewhere, judge_elsewhere, run_some_elsewhere
from clew.stress.gateway import Gateway
from clew.stress.judge import add_warnings, hanging, judge, judge_warnings, waits_for_one_another
from clew.stress.origins import judge_written
from clew.stress.process_state import ProcessState, judge_process
from clew.stress.report import Report, failures, wave_report
from clew.stress.variables import Uses
from clew.stress.verdict import Verdict
from clew.stress.watch import STUCK_S
from clew.stress.waves import TIMEOUT_S, StoodStill, Wave, WaveRunner

Rows = Sequence[dict[str, Any]]

ALONE = 3
"""Number of episodes that run alone, one after another."""

WATCHED = 8
"""Number of episodes at once in the wave that is examined after each step."""

FAILS = 3
"""Number of requests in a row that fail: the first try of OpenAI's and Anthropic's clients, and their two retries."""

TRACED = 4
"""Number of episodes at once in the waves whose memory is traced, except those that confirm growth.

Tracing slows episodes down several times.
"""

CONFIRMING = 2
"""Maximum number of further waves that confirm a finding."""


def stressed(
    agent: Any,
    rows: Rows,
    *,
    gateway: Gateway,
    batch: int,
    group: int,
    dp: int = 1,
    timeout_s: float = TIMEOUT_S,
    stuck_s: float = STUCK_S,
    source: Source | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the agent as one of `dp` rollout processes would: batch / dp prompts at once, each `group` times.

    Call this in the main thread, which runs the agent's event loop. The gateway is stopped at the end.

    Args:
        agent: Instance of the agent's class. It serves all episodes.
        timeout_s: Maximum seconds of an episode, not counting time with the model or with a busy processor.
        stuck_s: Maximum seconds for which the event loop may stand still, or nothing may move in a wave.
        source: Recipe to create the agent in another process. None: no other process is tried.
    """

    async def work() -> Report:
        runner = WaveRunner(agent, gateway, timeout_s=timeout_s, stuck_s=stuck_s, say=say)
        try:
            return await Stress(agent, rows, runner, source, batch=batch, group=group, dp=dp).run()
        finally:
            await runner.client.really_close()

    try:
        return asyncio.run(work())
    finally:
        gateway.stop()


class Stress:
    """One stress of an agent: its waves, and what they have shown so far."""

    def __init__(self, agent: Any, rows: Rows, runner: WaveRunner, source: Source | None, **asked: int) -> None:
        """Prepare to run. `asked` holds batch, group and dp."""
        self._agent, self._rows, self._runner, self._source, self._asked = agent, rows, runner, source, asked
        self._prompts = -(-asked["batch"] // asked["dp"])
        self._jobs = [
            (f"g{number:06d}.e{copy}", rows[number % len(rows)])
            for copy in range(asked["group"])
            for number in range(self._prompts)
        ]
        side_by_side = WATCHED // min(2, asked["group"])
        self._watched = [job for i, job in enumerate(self._jobs) if i % self._prompts < side_by_side][:WATCHED]
        """Jobs of the waves that are examined after each step: two of each row, because they may share an object."""
        self._process = ProcessState(runner.code)
        self._sampler = growth.Sampler(runner.code, runner.origins, runner.gateway.sessions.count)
        self._leftovers = growth.Complaints(runner.code)
        self._waves: list[Wave] = []
        """Waves in the order of the module's docstring, without `troubled` and `elsewhere`."""
        self._samples: list[growth.Sample] = []

    async def run(self) -> Report:
        runner, loop = self._runner, asyncio.get_running_loop()
        factory = loop.get_task_factory()
        gc.collect()
        gc.freeze()  # a full collection of what was there before would hold up the loop
        try:
            async with runner.loop_watch, self._process, runner.origins, runner.busy:
                loop.set_exception_handler(self._leftovers.hear)
                crowds = await self._run_crowds()
                state, changes, uses = await self._watch_state()
                if runner.requests.knows_tokens:
                    await self._make_trouble(crowds[3])
                await self._trace_memory()
            verdicts, notes = await self._judge(crowds, state, changes, uses)
            return self._report(verdicts, notes, crowds[1].mean_s)
        except StoodStill as end:
            self._waves.append(end.wave)
            stuck = runner.loop_watch.stuck
            what = "of which no episode ended" if stuck is None else "in which the event loop stood still"
            note = f"all after the wave {end.wave.name!r}, {what}. Repair that first."
            return self._report([stuck] if stuck is not None else [], [note], None)
        finally:
            tracemalloc.stop()
            loop.set_task_factory(factory)
            gc.unfreeze()
            for task in self._sampler.left_tasks():
                task.cancel()

    async def _run_crowds(self) -> list[Wave]:
        """Run the waves at full speed, from warm to confirm, and return them."""
        jobs = self._jobs
        await self._wave("warm", jobs[:1], 1, self._process.stepped)
        await self._wave("alone", jobs[:ALONE], 1)
        some = sorted(random.Random(0).sample(range(len(jobs)), max(1, len(jobs) // 4)))
        for name, crowd in (("narrow", [jobs[number] for number in some]), ("crowd", jobs), ("again", jobs)):
            await self._sampled_wave(name, crowd)
        for _ in range(CONFIRMING):
            if waits_for_one_another(self._waves) is not None or growth.grows(self._samples, "resident") is not None:
                await self._sampled_wave("confirm", jobs)
        return list(self._waves)

    async def _watch_state(self) -> tuple[shared.State, list[shared.ObjectChange], Uses]:
        """Run the waves that are examined after each step."""
        self._process.look()
        state = shared.State(self._agent, self._runner.code)

        def stepped(episode: Episode) -> None:
            state.stepped(episode)
            self._process.stepped(episode)

        await self._wave("watched", self._watched, WATCHED, stepped)
        changes = list(state.changes)
        suspects = shared.suspects(changes)
        uses = Uses(suspects, self._runner.code)

        def used(episode: Episode) -> None:
            before = len(state.changes)
            state.stepped(episode)
            for change in state.changes[before:]:
                if change.inside:
                    uses.wrote(change.variable, episode)

        if suspects:
            with uses:
                await self._wave("read", self._watched, WATCHED, used)
        return state, changes, uses

    async def _make_trouble(self, crowd: Wave) -> None:
        """Run the wave with trouble, in turns: the first answer is cut, or the second, third or first request fails."""
        requests, jobs = self._runner.requests, self._jobs[:WATCHED]
        for (episode, _), first in zip(jobs, itertools.cycle((None, 1, 2, 0))):
            if first is None:
                requests.troubles[episode, 0] = "cut"
            else:
                requests.troubles |= {(episode, first + more): "fault" for more in range(FAILS)}
        warned, requests.warned = requests.warned, defaultdict(dict)  # the trouble may be the reason of new warnings
        try:
            troubled = await self._runner.wave("troubled", jobs, WATCHED)
        except StoodStill:  # an agent may wait forever after a failure; the loop may not
            if self._runner.loop_watch.stuck is not None:
                raise
            troubled = None
        finally:
            requests.troubles.clear()
            requests.warned = warned
        if troubled is not None:
            add_warnings(troubled, crowd, requests.warn)

    async def _trace_memory(self) -> None:
        tracemalloc.start(growth.DEPTH)
        for _ in range(3):
            await self._sampled_wave("traced", self._jobs[:TRACED])
        for _ in range(CONFIRMING):
            # This may not be growth: a bounded cache replaces old entries, which were not traced, with traced ones.
            if growth.grows(self._samples, "memory") is not None:
                await self._sampled_wave("traced", self._jobs)

    async def _wave(
        self, name: str, jobs: Sequence[tuple[str, dict[str, Any]]], at_once: int, stepped: Stepped | None = None
    ) -> None:
        self._waves.append(await self._runner.wave(name, jobs, at_once, stepped))

    async def _sampled_wave(self, name: str, jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Run a wave of all these jobs at once, and count what it leaves behind."""
        await self._wave(name, jobs, len(jobs))
        self._samples.append(await self._sampler.sample(self._runner.episodes))

    async def _judge(
        self, crowds: Sequence[Wave], state: shared.State, changes: Sequence[shared.ObjectChange], uses: Uses
    ) -> tuple[list[Verdict], list[str]]:
        """Return all verdicts, and notes on what could not be judged."""
        runner, crowd, again = self._runner, crowds[3], crowds[4]
        verdicts, notes = judge(crowds, runner.origins, state)
        verdicts += judge_warnings(runner.requests.warned, crowd, min(WATCHED, len(self._jobs)))
        crossings = crossed_rows(crowd.episodes, [*crowd.requests, *again.requests])
        tested = False
        if self._source is not None and not any(v.kind in ("differs", "hangs", "fails") for v in verdicts):
            runner.say("elsewhere: a few episodes in two other processes")
            askers = [crossing.asker for crossing in crossings]
            elsewhere = await run_some_elsewhere(self._source, runner, crowd, askers)
            tested = bool(elsewhere.tried)
            if tested:
                crossings = [crossing for crossing in crossings if not also_elsewhere(crossing, crowd, elsewhere)]
            differing, not_judged = judge_elsewhere(crowd, elsewhere, runner.origins, state.sources)
            notes += not_judged
            verdicts += differing if not crossings else []
        verdicts += judge_rows(crossings, crowd, state, certain=tested)
        matters = any(verdict.kind in ("shared", "differs") for verdict in verdicts)
        verdicts += shared.judge_changes(
            changes,
            matters=matters,
            rewards_differ=any(verdict.of_rewards for verdict in verdicts),
            sources=state.sources,
            uses=uses,
        )
        verdicts += judge_process(self._process.changes)  # a changed working directory explains files that are shared
        verdicts += judge_written(runner.origins.written, matters=matters)
        verdicts += growth.judge_growth(self._samples)
        return verdicts + self._leftovers.verdicts(runner.episodes, runner.origins), notes

    def _report(self, verdicts: Sequence[Verdict], notes: list[str], alone_s: float | None) -> Report:
        verdicts = [*hanging(self._waves), *verdicts]
        return Report(
            agent=f"{type(self._agent).__module__}.{type(self._agent).__qualname__}",
            **self._asked,
            width=len(self._jobs),
            rows=len(self._rows),
            rows_used=min(self._prompts, len(self._rows)),
            waves=[wave_report(wave, alone_s) for wave in self._waves[1:5] or self._waves],
            failures=failures(episode for wave in self._waves for episode in wave.episodes),
            growth=self._samples,
            # The certain ones first, and causes before what differs because of them.
            verdicts=sorted(verdicts, key=lambda verdict: (not verdict.certain, verdict.kind == "differs")),
            notes=notes,
        )
