"""`clew replay --reward`: run the workflow and the reward function again on the model's recorded answers."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception
from typing import Any

from clew import config as configuration
from clew import dotted
from clew.config import Config
from clew.data import LOCAL, load_rows
from clew.diagnose.causes import code_at
from clew.diagnose.recorded_model import RecordedModel, interactions_of, resources_of
from clew.diagnose.stages import select_rows
from clew.errors import ConfigError, DataError, EpisodeError
from clew.gateway.sequences import with_returns
from clew.printing import counted, print
from clew.record.rows import ENCODER, by_episode
from clew.record.run import RunDirectory, changes_in_words
from clew.record.steps import steps_in_words
from clew.rollout.episode import Workflow, was_cancelled
from clew.rollout.reward_function import by_name
from clew.rollout.reward_pool import RewardPool
from clew.rollout.setup import load_reward, load_workflow
from clew.training.custom import digest_of_file

DECIDES = re.compile(r"rollout\.(reward|workflow|reward_timeout_s)$|rollout\.workflow_kwargs\.|reward\.")
"""Matches the fields of the configuration that decide rewards."""
SHOWN = 20
"""Maximum number of episodes with a changed reward that are shown."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Episode whose reward now differs from the recorded one."""

    step: int
    episode_id: str
    recorded: dict[str, float]
    now: dict[str, float] | str
    """Rewards by name, or one line that says why the episode now has no reward."""
    traceback: str = ""
    """Traceback of the error that the user's code raised; empty if it raised none."""

    def __str__(self) -> str:
        now = self.now if isinstance(self.now, str) else _named(self.now)
        return f"step {self.step}, {self.episode_id}: recorded {_named(self.recorded)}, now {now}"


def compare_rewards(run: RunDirectory, steps: range, only: str | None) -> bool:
    """Print how the rewards of these steps differ from those that the reward function or workflow returns now.

    `only` is the ID of a group, an episode or a sequence to check alone.

    Returns:
        True if all rewards are as recorded.
    """
    config = configuration.load(run.config_path, ["launch.mode=local"])  # an inline reward would have no time limit
    found = asyncio.run(recompute_rewards(run, config, steps, only))
    for each in found[:SHOWN]:
        print(each)
    if more := found[SHOWN:]:
        print(f"… and {len(more)} more")
    if traces := [each.traceback.rstrip() for each in found if each.traceback]:
        print(f"traceback of the first error:\n{traces[0]}")
    result = f"the rewards of {counted(len(found), 'episode')} differ from" if found else "all rewards agree with"
    of = f" ({only})" if only else ""
    print(f"{steps_in_words(steps)}{of}: {result} what {config.rollout.reward or config.rollout.workflow} returns now.")
    changed = _changed_settings(run, min((each.step for each in found), default=0))
    if found and changed:
        print(f"The run has since changed settings that affect rewards: {changed}.")
    if found and not _changed_code(run, config, {each.step for each in found}):
        print(
            "The files of the reward and the workflow have not changed since these steps were recorded. So the rewards "
            "may depend on the time, on random numbers, on environment variables, or on an imported module."
        )
    return not found


def _changed_settings(run: RunDirectory, step: int) -> str:
    """Return the changes, in words, that a run made after a step to fields that decide rewards; "" without any."""
    later = [change["fields"] for change in run.facts().get("changes", []) if change["step"] > step]
    return changes_in_words({n: values for fields in later for n, values in fields.items() if DECIDES.match(n)})


def _changed_code(run: RunDirectory, config: Config, steps: Iterable[int]) -> bool:
    """Return whether the file of the workflow or of the reward function has changed since any of these steps."""
    named = {"rollout.reward": config.rollout.reward, "rollout.workflow": config.rollout.workflow}
    files = {field: dotted.file_of(path) for field, path in named.items() if path}
    now = {field: digest_of_file(str(file)) for field, file in files.items() if file}
    return any(code_at(run, step).get(field) != now.get(field) for step in steps for field in named)


def _named(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.9g}" for name, value in rewards.items())


async def recompute_rewards(
    run: RunDirectory, config: Config, steps: Iterable[int], only: str | None
) -> list[Disagreement]:
    """Return the episodes of these steps whose reward, computed again, differs from the recorded one.

    `only` is the ID of a group, an episode or a sequence to check alone.

    Raises:
        ConfigError: An agent made the episodes, or the workflow or the reward function cannot be imported.
        RecordError: A step cannot be read, or has nothing with the ID `only`.
    """
    if config.rollout.agent is not None:
        raise ConfigError(
            f"the episodes were made by the agent {config.rollout.agent}, which gives its own rewards: "
            f"`clew agent replay {run.path} --episode ID` runs it again on the recorded answers."
        )
    workflow, reward = load_workflow(config), load_reward(config)
    engine: Any = None  # never used: a RecordedModel that is not live answers from the record
    shared = resources_of(run, config, engine, reward)
    found: list[Disagreement] = []
    as_read = _rows_beyond_json(config.data.path)
    try:
        for step in steps:
            rows_of = by_episode(select_rows(run, step, run.steps.read_data(step), only))
            for episode_id, rows in rows_of.items():
                model = RecordedModel(shared, interactions_of(rows), episode_id, sampling=False)
                data = as_read.get(ENCODER.encode(rows[0].data), rows[0].data)
                now, trace = await _rewards_now(workflow, model, data)
                recorded = rows[0].rewards
                if isinstance(now, str) or not _same(recorded, now):
                    found.append(
                        Disagreement(step=step, episode_id=episode_id, recorded=recorded, now=now, traceback=trace)
                    )
    finally:
        if isinstance(reward, RewardPool):
            reward.close()
    return found


async def _rewards_now(workflow: Workflow, model: RecordedModel, data: Any) -> tuple[dict[str, float] | str, str]:
    """Run the workflow; return the rewards of the episode's first row, or an error in one line and its traceback."""
    try:
        rewards = by_name(await workflow.run_episode(model, deepcopy(data)))
        # A row records the return of its first turn, which may have a reward of its own.
        return next((parts for _, _, parts in with_returns(model, rewards)), rewards), ""
    except ConfigError:  # the other episodes would fail in the same way
        raise
    except EpisodeError as error:  # its message ends with the traceback from the reward's own process
        line, _, trace = str(error).partition("\n")
        return line, trace
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code
        if was_cancelled(error):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0], "".join(format_exception(error))


def _rows_beyond_json(path: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a data file that JSON cannot represent, such as rows with dates, by their recorded text.

    Return no rows if the data is not a file that can still be read: the reward then gets the values as recorded.
    """
    if Path(path).suffix.lower() not in LOCAL:
        return {}
    with suppress(DataError):
        return {text: row for row in load_rows(path) if json.loads(text := ENCODER.encode(row)) != row}
    return {}


def _same(recorded: dict[str, float], now: dict[str, float]) -> bool:
    return recorded.keys() == now.keys() and all(math.isclose(recorded[name], now[name], rel_tol=1e-9) for name in now)
