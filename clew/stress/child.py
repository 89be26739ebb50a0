"""Run a few episodes in another process, with another PYTHONHASHSEED.

Results differ there if they depend on the order of a set, on `hash()`, or on what earlier episodes left in the process.

The child reads its task as JSON from standard input and answers in JSON. It uses the parent's gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from clew.processes import PARENT_VARIABLE
from clew.stress.frames import Code
from clew.stress.steps import Episode, OpenEpisode, run_episode

START_S = 120.0
"""Seconds that the child may take to start, in addition to the time of its episodes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Recipe to create the agent in another process."""

    path: str
    """Dotted path of the agent's class."""
    arguments: dict[str, Any] = field(default_factory=dict)


async def run_elsewhere(
    source: Source, episodes: Sequence[Episode], open_episode: OpenEpisode, *, timeout_s: float, hash_seed: int
) -> str:
    """Run the episodes one after another in a new process, and set their rewards and errors.

    Args:
        source: Recipe to create the agent.
        episodes: Episodes to run; their `reward`, `error` and `at` are set.
        open_episode: Opens the gateway session of an episode.
        timeout_s: Maximum seconds per episode.
        hash_seed: PYTHONHASHSEED of the new process.

    Returns:
        The reason why the episodes could not be run; empty on success.
    """
    async with AsyncExitStack() as stack:
        jobs = []
        for episode in episodes:
            base_url, key, _ = await stack.enter_async_context(open_episode(episode.id))
            jobs.append({"id": episode.id, "data": episode.data, "base_url": base_url, "key": key})
        try:
            given = json.dumps(
                {"path": source.path, "arguments": source.arguments, "jobs": jobs, "timeout_s": timeout_s}
                | {"sys_path": sys.path}
            )
        except (TypeError, ValueError) as error:
            return f"the rows are not JSON: {error}"
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "clew.stress.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # so that what the agent starts there can be ended with it
                limit=2**26,
                env={**os.environ, "PYTHONHASHSEED": str(hash_seed), PARENT_VARIABLE: str(os.getpid())},
            )
            assert process.stdin is not None and process.stdout is not None
            limit = START_S + timeout_s * len(jobs)
            try:
                process.stdin.write(given.encode())
                process.stdin.close()
                # one line: processes that the agent started may keep the pipe open
                said = await asyncio.wait_for(process.stdout.readline(), limit)
            except TimeoutError:
                return f"it did not end within {limit:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            errors.seek(0)
            complaint = errors.read().decode(errors="replace").strip().splitlines()
    try:
        done = json.loads(said)
    except ValueError:
        return (complaint or ["it said nothing"])[-1]
    for episode in episodes:
        episode.reward, episode.error, episode.at = done[episode.id]
    return ""


async def _work(given: dict[str, Any]) -> dict[str, tuple[Any, str | None, str]]:
    from clew.rollout.agents import SharedClient, load_agent

    agent = load_agent(given["path"], given["arguments"])
    client, code, done = SharedClient(), Code(agent), {}
    for job in given["jobs"]:

        @asynccontextmanager
        async def open_episode(id: str, job: dict[str, Any] = job) -> AsyncIterator[tuple[str, str, Any]]:
            yield job["base_url"], job["key"], client

        episode = Episode(id=job["id"], data=job["data"])
        await run_episode(agent, episode, open_episode, timeout_s=given["timeout_s"], stepped=None, code=code)
        done[episode.id] = (episode.reward, episode.error, episode.at)
    return done


def main() -> None:
    """Run the child process."""
    from clew.processes import die_with_parent

    die_with_parent()
    given = json.loads(sys.stdin.buffer.read())
    sys.path[:] = given["sys_path"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the agent prints is no answer
    answers.write(json.dumps(asyncio.run(_work(given))) + "\n")
    answers.flush()
    os._exit(0)  # whatever the agent left running


if __name__ == "__main__":
    main()
