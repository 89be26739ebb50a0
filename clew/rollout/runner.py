"""The rollout loop: it admits groups, runs their episodes, files finished groups, and evaluates versions when due.

::

    data, in the order of the seed ──► group g000123 ──► n_samples episodes, side by side ──► inbox/g000123.arrows
                  ▲                                                     │
         admission, by what lies in the inbox                           └──► rejected/  (failed, or filtered out)

consumes  rows of the data set, published versions
produces  inbox/g*.arrows, rejected/*.parquet, evals/version-*
waits     for running groups (the workflow unblocks it), for the first weights and for admission (the trainer)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.config import Config
from clew.data import order
from clew.errors import RolloutError
from clew.gateway.episode_engine import Resources, resources
from clew.inference.protocol import Engine
from clew.models.vision import load_vision
from clew.record.inbox import group_name, group_number
from clew.record.rejected import FILTERED
from clew.record.run import RunDirectory
from clew.rollout.admission import may_start
from clew.rollout.episode import Episode, run_concurrently, run_episode
from clew.rollout.evaluation_summary import group_id as eval_group_id
from clew.rollout.evaluation_summary import summarize
from clew.rollout.failure_limit import FailureWatch
from clew.rollout.filter_limit import FilterWatch
from clew.rollout.reward_pool import RewardPool
from clew.rollout.setup import load_reward, load_workflow, refuse_impossible
from clew.waits import Reporter, current_waits, waiting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from clew.gateway.gateway_thread import GatewayThread
    from clew.rollout.agents import AgentWorkflow

log = logging.getLogger("clew.rollout")


POLL_S = 0.005
"""Seconds between two checks of whether the inbox's folder has changed (a check takes 2 microseconds)."""

LOOK_S = 0.25
"""Maximum seconds between two reads of the inbox, even if nothing has changed."""

STAMP_S = 0.05
"""Resolution of the folder's time stamp, in seconds: after a change this recent, the inbox is read once more."""

CLOSE_S = 1.0
"""Seconds that cancelled workflows have to end when rollout ends."""

RATE_S = 10.0
"""Seconds over which the tokens per second are averaged."""

COUNTS = ["groups_finished", "groups_rejected", "episodes", "episodes_failed", "episodes_branched", "episodes_running"]
"""Counts since the process began, as status and progress show them."""


class RolloutRunner:
    """Rollout of one run in one event loop. A process awaits `run`; inline, the trainer calls `advance` as it waits."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        rows: list[dict[str, Any]],
        eval_rows: list[dict[str, Any]],
        reporter: Reporter | None = None,
        gateway: GatewayThread | None = None,
    ) -> None:
        """Load the workflow or agent and the reward, and find where the run stopped.

        With a gateway, rollout.agent reaches the engine through it, and the engine is used only on the gateway's loop.
        """
        refuse_impossible(config, len(rows))
        self._config = config
        self._run = run
        self._rows = rows
        self._eval_rows = eval_rows
        self._reporter = reporter
        self._agent: AgentWorkflow | None = None
        if gateway is not None:
            from clew.rollout.agents import agent_workflow  # its packages are an extra, clew[agents]

            self._agent = agent_workflow(config, gateway)
        self._workflow = self._agent or load_workflow(config)
        self._reward = load_reward(config)
        self._resources = resources(
            config, engine, tokenizer, self._reward, vision=load_vision(tokenizer.name_or_path), media=run.media
        )

        settled = run.clean_after_rollout()
        self._next = next(number for number in itertools.count() if group_name(number) not in settled)
        """Number of the next group to start; groups that are settled already are skipped."""
        self._settled = {name for name in settled if group_number(name) > self._next}
        """Later groups that were settled before this process began."""
        self._waiting = 0
        """Number of groups in the inbox at the last look."""
        self._inbox_seen = 0
        """Time stamp of the inbox's folder at the last look."""
        self._version: int | None = None
        """The newest published version."""
        self._running: dict[str, int] = {}
        """Running groups: group ID to the version that was published when the group was admitted."""
        self._filed_running: dict[str, int] | None = None
        """Content of running.json, as last written; None before that."""
        self._evaluating: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        """Tasks of the groups and evaluations that are being made, in the order in which they started."""
        self._changed = asyncio.Event()
        self._failures = self._failure_watch(run.rejected)
        self._filter = FilterWatch(config.rollout.batch_groups, len(rows))
        self._counts = dict.fromkeys(COUNTS, 0)
        self._generated: deque[tuple[float, int]] = deque()
        """Finish time (monotonic) and number of generated tokens of each episode of the last RATE_S seconds."""

    async def run(self) -> None:
        """Roll out until the last version is published and evaluated.

        Raises:
            RolloutError: Too many episodes fail, or the filter rejects everything.
        """
        self._start_due_work()
        while not self._complete():
            what, unblocks = self._waits_for()
            with waiting(what, unblocks=unblocks, numbers=self._numbers):
                await self._something_changes()
            self._raise_failure()
            self._start_due_work()

    async def advance(self) -> bool:
        """Run until at least one group or evaluation is finished; return False if none runs and none may start."""
        # No timers and no polling: what happens, and in which order, follows from the seed and the record alone.
        self._start_due_work()
        if not self._tasks:
            return False
        await self._changed.wait()
        self._changed.clear()
        self._raise_failure()
        self._start_due_work()
        return True

    async def close(self) -> None:
        """Cancel everything that is running, and end the reward workers."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:  # a workflow that swallows the cancellation may run on; do not wait for it
            ended, _ = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            await asyncio.gather(*ended, return_exceptions=True)
        if self._agent is not None:
            await self._agent.close()
        if isinstance(self._reward, RewardPool):  # last: killing a worker during a call would record a failed episode
            self._reward.close()

    @property
    def facts(self) -> dict[str, Any]:
        """Counts for status and progress."""
        self._forget_generated()
        return {
            "version": self._version,
            "groups_running": len(self._running),
            "groups_waiting": self._waiting,
            **self._counts,
            "tokens_per_s": round(sum(tokens for _, tokens in self._generated) / RATE_S, 1),
        }

    def _forget_generated(self) -> None:
        since = time.monotonic() - RATE_S
        while self._generated and self._generated[0][0] < since:
            self._generated.popleft()

    # Admission -------------------------------------------------------------------------------------------------------

    def _start_due_work(self) -> None:
        """Start everything that may start now: first the evaluation, if one is due, then groups."""
        self._inbox_seen = self._inbox_time()
        # Look into the inbox first, then at the version: groups leave the inbox once the next version is published.
        self._waiting = len(self._run.inbox.names())
        self._version = self._run.inbox.published()
        if self._version is not None:
            self._start_evaluation(self._version)
            self._admit(self._version)
        if self._reporter is not None:
            self._reporter.set(doing=self._waits_for()[0], **self.facts)

    def _admit(self, version: int) -> None:
        names = [self._next_name() for _ in range(self._may_start(version))]
        self._running |= dict.fromkeys(names, version)
        while self._running != self._filed_running:  # see Inbox.set_running: the version may move while we write
            self._filed_running = dict(self._running)
            self._run.inbox.set_running(self._filed_running)
            moved_to = self._run.inbox.published()
            assert moved_to is not None
            self._running |= dict.fromkeys(names, moved_to)
        for name in names:
            self._start(self._make_group(name, self._running[name]))

    def _may_start(self, version: int) -> int:
        rollout = self._config.rollout
        return may_start(
            waiting=self._waiting,
            running=len(self._running),
            remaining=(self._config.training.steps - version) * rollout.batch_groups,
            max_lag=rollout.max_lag,
            batch_groups=rollout.batch_groups,
        )

    def _next_name(self) -> str:
        while (name := group_name(self._next)) in self._settled:
            self._next += 1
        self._next += 1
        return name

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(lambda _: self._changed.set())

    def _raise_failure(self) -> None:
        """Forget the tasks that are done; raise the exception of the first one that failed."""
        errors = [task.exception() for task in self._tasks if task.done()]
        self._tasks = [task for task in self._tasks if not task.done()]
        for error in errors:
            if error is not None:
                raise error

    # Groups ----------------------------------------------------------------------------------------------------------

    async def _make_group(self, name: str, version: int) -> None:
        """Run the episodes of one group, and file it in the inbox or in rejected/."""
        row = self._rows[order(len(self._rows), group_number(name), self._config.seed)]
        episodes = await self._episodes(self._resources, name, row, self._config.rollout.n_samples, version)
        self._file(name, episodes)
        self._running.pop(name)
        self._failures.add([episode.error for episode in episodes])

    async def _episodes(
        self,
        resources: Resources,
        group_id: str,
        row: dict[str, Any],
        n_samples: int,
        version: int,
        slots: asyncio.Semaphore | None = None,
    ) -> list[Episode]:
        admitted_at, inline = time.time(), self._config.launch.mode == "inline"

        async def episode(number: int) -> Episode:
            async with slots or nullcontext():
                self._counts["episodes_running"] += 1
                finished = await run_episode(
                    self._workflow,
                    resources,
                    episode_id=f"{group_id}.e{number}",
                    group_id=group_id,
                    data=row,
                    admitted_version=version,
                    admitted_at=admitted_at,
                    timeout_s=None if inline else self._config.rollout.episode_timeout_s,
                )
            self._counts["episodes_running"] -= 1
            self._counts["episodes"] += 1
            if finished.error is not None:
                if not self._counts["episodes_failed"]:
                    self._warn_of_failure(finished.id, finished.error)
                self._counts["episodes_failed"] += 1
            self._counts["episodes_branched"] += finished.branched
            self._generated.append((time.monotonic(), finished.tokens))
            self._forget_generated()
            return finished

        return await run_concurrently(episode(number) for number in range(n_samples))

    def _failure_watch(self, where: Path) -> FailureWatch:
        rollout = self._config.rollout
        return FailureWatch(rollout.max_failed_share, rollout.batch_groups, str(where))

    def _warn_of_failure(self, episode_id: str, error: str) -> None:
        log.warning(
            "episode %s failed: %s\nFurther failures are not shown. Failed episodes are kept in %s, and "
            "`clew show RUN` counts them. The run stops if more than rollout.max_failed_share=%g of the episodes fail.",
            episode_id,
            error.partition("\n")[0],
            self._run.evals.folder if episode_id.startswith("v") else self._run.rejected,  # v: see `eval_group_id`
            self._config.rollout.max_failed_share,
        )

    def _file(self, name: str, episodes: list[Episode]) -> None:
        """Put a group into the inbox, or into rejected/ if nothing can be learned from it."""
        scored = [episode for episode in episodes if episode.error is None]
        failed = [episode for episode in episodes if episode.error is not None]
        if len(scored) < (needed := min(2, len(episodes))):
            reason = f"{len(failed)} of {len(episodes)} episodes failed; a group needs {needed} with a reward"
            self._reject(name, episodes, reason)
            return
        if self._config.rollout.drop_equal_rewards:
            rewards = {sequence.reward for episode in scored for sequence in episode.sequences}
            self._filter.add(equal := rewards.pop() if len(rewards) == 1 else None)
            if equal is not None:
                self._reject(name, episodes, f"{FILTERED}all rewards equal ({equal:g})")
                return
        for episode in failed:  # before the group: once that is in the inbox, it is settled
            self._run.reject(episode.id, episode.sequences)
        self._run.inbox.put(name, [sequence for episode in scored for sequence in episode.sequences])
        self._counts["groups_finished"] += 1

    def _reject(self, name: str, episodes: list[Episode], reason: str) -> None:
        sequences = [sequence for episode in episodes for sequence in episode.sequences]
        rows = [replace(sequence, error=sequence.error or reason) for sequence in sequences]
        self._run.reject(name, rows)
        self._counts["groups_rejected"] += 1

    # Evaluation ------------------------------------------------------------------------------------------------------

    def _start_evaluation(self, version: int) -> None:
        due = version not in self._evaluating and self._config.evaluates(version) and not self._is_replaced(version)
        if due and self._run.evals.read(version) is None:
            self._evaluating.add(version)
            self._start(self._evaluate(version))

    def _is_replaced(self, version: int) -> bool:
        """Return whether later weights are announced: the trainer has given up the evaluation of `version`."""
        newest = self._run.newest_weights()
        return newest is not None and newest.version > version

    async def _evaluate(self, version: int) -> None:
        """Run all evaluation episodes at `version`. The trainer waits for them, unless their weights are lost."""
        began = time.monotonic()
        n_samples = self._config.eval.n_samples
        eval_resources = self._resources.at_temperature(self._config.eval.temperature)
        # More episodes at a time would wait for the engines, and the wait would count toward their time limits.
        slots = asyncio.Semaphore(self._config.inference.max_running * (len(self._run.inference_servers()) or 1))
        prompts = await run_concurrently(
            self._episodes(eval_resources, eval_group_id(version, number), row, n_samples, version, slots)
            for number, row in enumerate(self._eval_rows)
        )
        watch = self._failure_watch(self._run.evals.folder)  # its own watch, fed after all episodes have ended
        sequences = [sequence for episodes in prompts for episode in episodes for sequence in episode.sequences]
        for sequence in sequences:
            if others := set(sequence.versions[sequence.loss_mask].tolist()) - {version}:
                if self._is_replaced(version):
                    log.warning("the evaluation of version %d is left out: its weights were replaced", version)
                    self._evaluating.remove(version)
                    return
                raise RolloutError(
                    f"the evaluation of version {version} has tokens by version {min(others)} "
                    f"({sequence.id}): an inference server loaded other weights meanwhile."
                )
        try:
            for episodes in prompts:
                watch.add([episode.error for episode in episodes])
        except RolloutError:  # its message says where the episodes are; without a summary the evaluation is made again
            self._run.evals.write(version, sequences, None)
            raise
        seconds, pass_above = time.monotonic() - began, self._config.eval.pass_above
        summary = summarize(prompts, n_samples=n_samples, pass_above=pass_above, seconds=seconds)
        self._run.evals.write(version, sequences, summary)
        self._evaluating.remove(version)

    # Waits -----------------------------------------------------------------------------------------------------------

    def _complete(self) -> bool:
        return self._version is not None and self._version >= self._config.training.steps and not self._tasks

    def _waits_for(self) -> tuple[str, str]:
        """Return what the loop is waiting for, and who unblocks it."""
        evaluation = f"the evaluation of version {self._version}"
        if self._version is None:
            return "the first weights", "the trainer"
        if self._running and self._filter.explanation():
            return "a group that the filter does not reject", "other rewards"
        if self._running:
            return "running groups" + (f" and {evaluation}" if self._evaluating else ""), "the workflow"
        if self._evaluating:
            return evaluation, "the workflow"
        return "admission", "the trainer"

    def _numbers(self) -> str:
        admission = "open" if self._version is not None and self._may_start(self._version) else "closed"
        advice = self._filter.explanation()
        warning = f"the filter rejects everything: {advice} " if advice else ""
        return (
            f"{warning}admission {admission}: {self._waiting} waiting, {len(self._running)} running, "
            f"lag limit {self._config.rollout.max_lag} at version {self._version}; "
            f"{self._counts['groups_rejected']} rejected so far{self._where_episodes_are()}"
        )

    def _where_episodes_are(self) -> str:
        """Return how many requests wait for the model, and how many episodes for the reward or in the user's code."""
        running = self._counts["episodes_running"]
        if not running:
            return ""
        waits = [wait.what for wait in current_waits()]
        model = sum(what.startswith(("completion ", "inference server")) for what in waits)
        reward = sum(what.startswith(("reward ", "a free reward", "a reward worker")) for what in waits)
        own = max(0, running - model - reward)
        code = "the agent or its tools" if self._config.rollout.agent is not None else "the workflow's own code"
        return f"; {running} episodes: {model} requests wait for the model, {reward} for the reward, {own} in {code}"

    async def _something_changes(self) -> None:
        """Wait until a group or an evaluation is finished, or the inbox has changed."""
        looked_at = time.time()
        # Two changes within the resolution of the time stamp may have the same stamp, so look again after a change.
        recent = looked_at - self._inbox_seen / 1e9 <= STAMP_S
        look_again_at = looked_at + (STAMP_S if recent else LOOK_S)
        while not self._changed.is_set():
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                if self._inbox_time() != self._inbox_seen or time.time() > look_again_at:
                    break
        self._changed.clear()

    def _inbox_time(self) -> int:
        return self._run.inbox.folder.stat().st_mtime_ns
