"""The stress itself: waves of episodes, and what each wave shows.

::

    warm        1 episode            imports and first uses; nothing is judged
    alone       a few, one by one    time, requests and answers of an episode on its own
    narrow      width / 4 at once    ─┐ throughput: does it grow with the width?
    crowd       width at once        ─┤ what blocks the loop; do answers cross over?
    again       the same             ─┘ the same seeds: the same results?
    confirm     the same, when episodes seem to wait for one another (a busy machine may seem so once, not always), or
                when the process's memory grows (caches and the allocator warm up, and then it stops)
    watched     a few at once: after each step, which of the objects that outlive an episode has changed
    read        the same, when several changed one: does an episode read what another has left there?
    traced      a few at once, three times: what memory the user's code holds
    elsewhere   a few, in two other processes with another PYTHONHASHSEED: the same results?

An episode that does not end by itself is stopped and reported. The timings are judged without it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from clew.stress import files, growth, process, shared
from clew.stress.busy import BusyWatch
from clew.stress.child import Source
from clew.stress.complaints import Complaints
from clew.stress.elsewhere import (
    also_elsewhere,
    judge_elsewhere,
    judge_foreign,
    rows_of_others,
    run_some_elsewhere,
)
from clew.stress.frames import Code
from clew.stress.judge import hanging, judge, waits_for_one_another
from clew.stress.origins import Origins
from clew.stress.report import Report, failures
from clew.stress.requests import Requests
from clew.stress.stage import TIMEOUT_S, Stage, StoodStill
from clew.stress.steps import Episode, OpenEpisode
from clew.stress.stuck import STUCK_S, StuckWatch
from clew.stress.uses import Uses
from clew.stress.verdict import Verdict
from clew.stress.watch import WATCHING, LoopWatch
from clew.stress.wave import Wave

ALONE = 3
"""Number of episodes that run alone, one after another."""

WATCHED = 8
"""Number of episodes at once in the wave that is examined after each step."""

TRACED = 4
"""Number of episodes at once in the waves whose memory is traced, which slows them down several times."""

CONFIRMING = 2
"""Largest number of further crowds that confirm a finding."""


async def stress(
    agent: Any,
    data: Sequence[dict[str, Any]],
    *,
    open_episode: OpenEpisode,
    requests: Requests,
    batch: int,
    group: int,
    dp: int = 1,
    timeout_s: float = TIMEOUT_S,
    stuck_s: float = STUCK_S,
    source: Source | None = None,
    sessions: Callable[[], int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run the agent as one rollout process of `dp` would: batch / dp prompts at once, each `group` times.

    Call this in the process's main event loop. The gateway must run in another thread.

    Args:
        agent: The agent to run.
        data: Rows of the data set.
        open_episode: Opens a session of the gateway for an episode's ID. The same ID comes again in later waves, and
            must get the same seeds.
        requests: Requests of the episodes, as the gateway notes them.
        batch: Number of prompts per training step.
        group: Number of episodes per prompt.
        dp: Number of rollout processes that share the batch.
        timeout_s: Maximum seconds of an episode, not counting the model and a busy processor.
        stuck_s: Seconds for which the loop may stand still, or nothing may move.
        source: Recipe to create the agent in another process. None: no other process is tried.
        sessions: Returns the number of sessions that the gateway holds open.
        say: Called with lines of progress.
    """
    prompts = -(-batch // dp)
    jobs = [(f"g{number:06d}.e{copy}", data[number % len(data)]) for copy in range(group) for number in range(prompts)]
    width = len(jobs)
    code = Code(agent)
    gc.collect()
    gc.freeze()  # a full collection of what was there before would hold up the loop
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    origins, busy = Origins(code), BusyWatch(WATCHING)
    sampler = growth.Sampler(code, origins, sessions)
    complaints = Complaints(code)
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
            rows=len(data),
            rows_used=min(prompts, len(data)),
            waves=[wave.report(alone_s) for wave in waves[1:5] or waves],
            failures=failures(episode for wave in waves for episode in wave.episodes),
            growth=samples,
            verdicts=sorted([*hanging(waves), *verdicts], key=_order),
            notes=notes,
        )

    stuck, process_state = StuckWatch(code, running, stuck_s), process.ProcessState(code)
    written = files.Files(code)
    try:
        async with stuck, process_state, written, origins, busy:
            async with LoopWatch(code) as loop_watch:
                stage = Stage(
                    agent=agent,
                    code=code,
                    open_episode=open_episode,
                    requests=requests,
                    timeout_s=timeout_s,
                    patience_s=stuck_s,
                    loop_watch=loop_watch,
                    stuck=stuck,
                    running=running,
                    origins=origins,
                    busy=busy,
                    say=say,
                )
                loop.set_exception_handler(complaints.hear)
                waves.append(await stage.wave("warm", jobs[:1], 1, process_state.stepped))
                waves.append(await stage.wave("alone", jobs[:ALONE], 1))
                some = sorted(random.Random(0).sample(range(width), max(1, width // 4)))
                crowds = (("narrow", [jobs[number] for number in some]), ("crowd", jobs), ("again", jobs))
                for name, chosen in crowds:
                    waves.append(await stage.wave(name, chosen, len(chosen)))
                    samples.append(await sampler.sample(stage.episodes))
                confirming: list[Wave] = []
                while len(confirming) < CONFIRMING and (
                    waits_for_one_another([*waves[:5], *confirming]) is not None
                    or growth.grows(samples, "resident") is not None
                ):
                    confirming.append(await stage.wave("confirm", jobs, width))
                    samples.append(await sampler.sample(stage.episodes))
                process_state.look()
                state = shared.State(agent, code)

                def stepped(episode: Episode) -> None:
                    state.stepped(episode)
                    process_state.stepped(episode)

                waves.append(await stage.wave("watched", jobs[:WATCHED], WATCHED, stepped))
                changes = list(state.changes)
                suspects = shared.suspects(changes)
                uses = Uses(suspects, code)

                def used(episode: Episode) -> None:
                    before = len(state.changes)
                    state.stepped(episode)
                    for change in state.changes[before:]:
                        if change.inside:
                            uses.wrote(change.variable, episode)

                if suspects:
                    with uses:
                        waves.append(await stage.wave("read", jobs[:WATCHED], WATCHED, used))
            tracemalloc.start(growth.DEPTH)
            for _ in range(3):
                waves.append(await stage.wave("traced", jobs[:TRACED], TRACED))
                samples.append(await sampler.sample(stage.episodes))
            for _ in range(
                CONFIRMING
            ):  # a bounded cache replaces what was there before the trace, which looks like growth
                if growth.grows(samples, "memory") is not None:
                    waves.append(await stage.wave("traced", jobs, width))
                    samples.append(await sampler.sample(stage.episodes))
        _, alone, _, crowd, again, *_ = waves
        verdicts, notes = judge(waves[:5], confirming, origins, state)
        foreign = rows_of_others(crowd, again)
        if source is not None and not any(verdict.kind in ("differs", "hangs", "fails") for verdict in verdicts):
            say("elsewhere: a few episodes in two other processes")
            tried, why_not = await run_some_elsewhere(
                source, crowd, requests, open_episode, [each.asker for each in foreign], timeout_s
            )
            foreign = [each for each in foreign if not also_elsewhere(each, tried)]
            otherwise = judge_elsewhere(crowd, tried, why_not, origins, state.sources, notes)
            verdicts += judge_foreign(foreign, state, crowd, certain=True) if foreign else otherwise
        else:
            verdicts += judge_foreign(foreign, state, crowd, certain=False)
    except StoodStill as end:
        waves.append(end.wave)
        what = "in which the event loop stood still" if stuck.verdict is not None else "of which no episode ended"
        found = [stuck.verdict] if stuck.verdict is not None else []
        return report(found, [f"all after the wave {end.wave.name!r}, {what}. Repair that first."])
    finally:
        tracemalloc.stop()
        loop.set_task_factory(factory)
        gc.unfreeze()
        for task in sampler.left_tasks():
            task.cancel()
    matters = any(verdict.kind in ("shared", "differs") for verdict in verdicts)
    verdicts += shared.verdicts(changes, matters=matters, sources=state.sources, uses=uses) + files.verdicts(
        written.opened, matters=matters
    )
    verdicts += growth.verdicts(samples)
    verdicts += process.verdicts(process_state.changes)
    verdicts += complaints.verdicts(stage.episodes, origins)
    return report(verdicts, notes, alone.mean_s)


def _order(verdict: Verdict) -> tuple[bool, bool]:
    """Return the sort key of a finding: the certain ones first, and causes before what differs because of them."""
    return not verdict.certain, verdict.kind == "differs"
