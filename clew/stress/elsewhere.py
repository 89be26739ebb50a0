"""Runs a few episodes again in other processes, with another PYTHONHASHSEED, and compares the results.

Results differ there if they depend on the order of a set, on `hash()`, or on what earlier episodes left in the process.

A child process (`python -m clew.stress.elsewhere`) reads lines of JSON from standard input: first the agent, then one
episode after another, and answers each episode with a line. It uses this process's gateway. It gets the next episode
when the last one's session is closed, as in training, so what that one left running gets no more answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from clew.processes import PARENT_VARIABLE, die_with_parent
from clew.stress import repeat
from clew.stress.agent_steps import Episode, OpenEpisode, run_episode
from clew.stress.crossings import Crossing, row_of
from clew.stress.frames import Code
from clew.stress.origins import Origins
from clew.stress.requests import Request
from clew.stress.variables import Sources
from clew.stress.verdict import Verdict
from clew.stress.waves import Wave, WaveRunner

EPISODES_EACH = 4
"""Number of episodes that each of the two other processes runs."""

START_S = 120.0
"""Seconds that a child may take to start, in addition to the time of its episodes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Recipe to create the agent in another process."""

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Elsewhere:
    """Results of the other processes: `tried` has the episodes of each that ran, and their requests."""

    tried: list[tuple[Sequence[Episode], list[Request]]] = field(default_factory=list)
    why_not: str = ""
    """Reason why a process could not be run; empty if all ran."""


async def run_some_elsewhere(source: Source, runner: WaveRunner, crowd: Wave, first: Sequence[str]) -> Elsewhere:
    """Run a few episodes of the crowd in two other processes. Each runs different rows, unless there is only one.

    Args:
        crowd: Wave to choose from. Episodes that failed in it are not run.
        first: IDs of the episodes to prefer.
    """
    sound = {episode.id: episode for episode in crowd.episodes if episode.error is None}
    wanted = [*(sound[id] for id in first if id in sound), *sound.values()]
    by_row = {row_of(episode.data): episode for episode in reversed(wanted)}
    chosen = sorted(by_row.values(), key=wanted.index)[: 2 * EPISODES_EACH]
    elsewhere = Elsewhere()
    for seed, half in enumerate((chosen[::2], chosen[1::2] or chosen[:1]), 1):
        episodes = [Episode(id=episode.id, data=episode.data) for episode in half]
        if not episodes:
            continue
        runner.requests.take()
        # The child cannot subtract the model's time, so each episode may also take as long as the slowest one did here.
        timeout_s = runner.timeout_s + max(episode.seconds for episode in half)
        elsewhere.why_not = await _run_child(source, episodes, runner.open_episode, timeout_s=timeout_s, hash_seed=seed)
        if elsewhere.why_not:
            break
        for episode in episodes:
            if episode.reward is None:
                episode.reward = dict(runner.requests.rewards.get(episode.id, {}))
        elsewhere.tried.append((episodes, runner.requests.take()))
    return elsewhere


async def _run_child(
    source: Source, episodes: Sequence[Episode], open_episode: OpenEpisode, *, timeout_s: float, hash_seed: int
) -> str:
    """Run episodes one after another in a new process, and set their `reward`, `error` and `at`.

    Returns:
        The reason why the episodes could not be run; empty on success.
    """
    agent = {"path": source.path, "arguments": source.arguments, "timeout_s": timeout_s, "sys_path": sys.path}
    try:
        json.dumps([agent, *(episode.data for episode in episodes)])
    except (TypeError, ValueError) as error:
        return f"the rows are not JSON: {error}"
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "clew.stress.elsewhere",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # so that what the agent starts there can be ended with it
            limit=2**26,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), PARENT_VARIABLE: str(os.getpid())},
        )
        assert process.stdin is not None and process.stdout is not None
        limit = START_S + timeout_s * len(episodes)
        try:
            async with asyncio.timeout(limit):
                process.stdin.write(f"{json.dumps(agent)}\n".encode())
                for episode in episodes:
                    async with open_episode(episode.id) as (base_url, key, _):
                        job = {"id": episode.id, "data": episode.data, "base_url": base_url, "key": key}
                        process.stdin.write(f"{json.dumps(job)}\n".encode())
                        # Do not read to the end: processes that the agent started may keep the pipe open.
                        answer = await process.stdout.readline()
                    if not answer:
                        await process.wait()
                        errors.seek(0)
                        complaint = errors.read().decode(errors="replace").strip().splitlines()
                        return (complaint or ["it printed nothing"])[-1]
                    episode.reward, episode.error, episode.at = json.loads(answer)
        except json.JSONDecodeError:
            return "it was killed while it wrote its answer"
        except TimeoutError:
            return f"it did not end within {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return ""


def judge_elsewhere(
    crowd: Wave, elsewhere: Elsewhere, origins: Origins, sources: Sources
) -> tuple[list[Verdict], list[str]]:
    """Return a verdict if episodes fail or differ from those in the crowd, and a note if a process could not run."""
    notes = []
    if elsewhere.why_not:
        notes.append(
            f"whether another process gives the same results: the agent could not be run in one ({elsewhere.why_not}). "
            f"Training starts it in processes of its own, so it must be importable by its name, with its arguments."
        )
    failed = [episode for episodes, _ in elsewhere.tried for episode in episodes if episode.error is not None]
    count = sum(len(episodes) for episodes, _ in elsewhere.tried)
    if failed:
        evidence = [f"{episode.id}: {episode.error}" for episode in failed[:3]]
        what = f"{len(failed)} of {count} episodes fail in another process, and not here"
        return [Verdict(kind="fails", what=what, where=failed[0].at, evidence=evidence)], notes
    differences = []
    for episodes, requests in elsewhere.tried:
        differences += repeat.differences(crowd.behaviour, repeat.behaviour_by_episode(episodes, requests))
    if not differences:
        return [], notes
    used = sources.lines_with_sets() if any(each.of != "count" for each in differences) else []
    drawn = [place for place, _ in origins.drawn.most_common(1)]
    advice = ["look for the clock, for chance, for the environment and for what earlier episodes left behind"]
    if used:
        advice = [
            f"sets and hash() are used at {', '.join(used[:4])}",
            "sort a set before its order matters; use hashlib instead of hash()",
        ]
    what = f"{len(differences)} of {count} episodes differ in another process, with another PYTHONHASHSEED"
    where = next(iter(used + drawn), crowd.asked_at(differences[0].episode))
    return [repeat.judge_differences("differs", what, differences, where, advice)], notes


def also_elsewhere(crossing: Crossing, crowd: Wave, elsewhere: Elsewhere) -> bool:
    """Return whether the asker uses the owner's text even in a process in which the owner had not run before it.

    Then the text comes from elsewhere, such as an example or the output of a tool, and is no sign of a fault. The
    result is also True if this could not be tested, because no process ran the asker, or the owner ran there first.
    """
    rows = {episode.id: row_of(episode.data) for episode in crowd.episodes}
    for episodes, requests in elsewhere.tried:
        for number, episode in enumerate(episodes):
            if rows[episode.id] == rows[crossing.asker]:
                before = {rows[earlier.id] for earlier in episodes[:number]}
                asked = [request.asked for request in requests if request.episode == episode.id]
                return rows[crossing.owner] in before or any(crossing.text in text for text in asked)
    return True


async def _work(orders: TextIO, answers: TextIO) -> None:
    from clew.rollout.agents import SharedClient, load_agent

    asked = json.loads(orders.readline())
    sys.path[:] = asked["sys_path"]
    agent = load_agent(asked["path"], asked["arguments"])
    client, code = SharedClient(), Code(agent)
    for line in orders:  # it blocks the event loop, so that nothing is asked before the last session is closed
        job = json.loads(line)
        episode = Episode(id=job["id"], data=job["data"])
        session = contextlib.nullcontext((job["base_url"], job["key"], client))
        await run_episode(
            agent, episode, lambda _, session=session: session, timeout_s=asked["timeout_s"], stepped=None, code=code
        )
        answers.write(f"{json.dumps([episode.reward, episode.error, episode.at])}\n")
        answers.flush()


def main() -> None:
    die_with_parent()
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the agent prints is not the answer
    asyncio.run(_work(orders, answers))


if __name__ == "__main__":
    main()
