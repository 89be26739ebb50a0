"""`clew eval`: evaluate models and checkpoints on held-out prompts, side by side, without training."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clew import config as configuration
from clew.config import Config
from clew.console import progress
from clew.data import load_rows
from clew.errors import ConfigError, DataError, RolloutError
from clew.inference.local import load_engine
from clew.models.loading import load_tokenizer
from clew.models.model_folder import check_folder
from clew.reading import read_json, read_yaml
from clew.record import rows
from clew.record.inbox import group_name
from clew.rollout.episode import Episode
from clew.rollout.evaluation_summary import group_id, interval, passed, summarize
from clew.rollout.given_rows import run_rows
from clew.rollout.long_prompts import leave_out_overlong

EPISODES = pa.schema(
    [
        ("model", pa.string()),
        ("row", pa.int64()),
        ("episode", pa.string()),
        ("reward", pa.float64()),
        ("passed", pa.bool_()),
        ("tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("error", pa.string()),
        ("answer", pa.string()),
        ("data", pa.string()),
    ]
)
"""Columns of an evaluation's episodes.

`row` is the index of the prompt's row in the data, from 0, and `data` is that row as JSON. `tokens` is the number of
generated tokens. `reward` is null if the episode failed.
"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One model's episodes on all prompts, and their summary."""

    name: str
    """The model or checkpoint, as the user gave it."""
    config: Config
    episodes: list[dict[str, Any]]
    """One dictionary per episode, with the columns of `EPISODES` as its keys."""
    summary: dict[str, Any]
    """Result of `clew.rollout.evaluation_summary.summarize`."""

    @cached_property
    def pass_rates(self) -> dict[int, float]:
        """Pass rate of each row (0 to 1), by row number.

        Failed episodes do not count. A row whose episodes all failed is left out.
        """
        by_row: dict[int, list[bool]] = {}
        for episode in self.episodes:
            if episode["error"] is None:
                by_row.setdefault(episode["row"], []).append(episode["passed"])
        return {row: float(np.mean(each)) for row, each in by_row.items()}


def evaluate(
    models: Sequence[str], *, data: str | None, reward: str | None, overrides: Sequence[str]
) -> list[Evaluation]:
    """Evaluate each model on the same prompts, with the same configuration (see `_settings`).

    A prompt that is too long for one of the models is left out for all of them.

    Args:
        models: Folders or hub names of models, checkpoints, or runs (their newest checkpoint).
        data: File or data set with the prompts; None: eval.path of the run.
        reward: Dotted path of the reward function; None: that of the run.
        overrides: Fields of the configuration, such as "eval.n_samples=4".

    Raises:
        ClewError: A model, the data or the reward is not named or cannot be loaded, no prompt is short enough for all
            models, or all episodes of a model failed.
    """
    for name in models:
        check_folder(str(_checkpoint_of(name)), "config.json", "model", "Name a model, a checkpoint or a run.", "MODEL")
    config = _settings(models, data, reward, overrides)
    path = config.eval.path or ""
    loaded = load_rows(path, split=config.data.split, columns=[config.data.prompt])
    rows_of = dict(enumerate(loaded))
    for name in models:  # keep the prompts that are short enough with every model's tokenizer
        tokenizer = load_tokenizer(str(_checkpoint_of(name)))
        # `leave_out_overlong` returns the same dictionaries, so their identities tell which rows it kept
        kept = set(map(id, leave_out_overlong(loaded, f"{path} for {name}", config, tokenizer)))
        rows_of = {number: row for number, row in rows_of.items() if id(row) in kept}
    if not rows_of:
        raise DataError(
            f"Cannot evaluate: no prompt of {path} is short enough for all models. Raise "
            f"data.max_prompt_tokens, or evaluate them one by one."
        )
    return [_evaluate(name, config, rows_of) for name in models]


def write_episodes(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Write a Parquet file with one row for each episode of each model; see `EPISODES`."""
    episodes = [episode for each in evaluations for episode in each.episodes]
    rows.write_table(path, pa.Table.from_pylist(episodes, schema=EPISODES))


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation with the highest pass@1. Ties go to the higher mean reward, then to the earlier model."""
    return max(evaluations, key=lambda each: (each.summary["pass@1"], each.summary["reward"]))


def behind(each: Evaluation, best: Evaluation) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the best model's pass rate minus that of `each`.

    The two models are compared prompt by prompt. This cancels out the difficulty of the prompts, so the difference is
    usually known more precisely than either mean (Miller 2024, arXiv 2411.00640, section 4.2).

    Returns:
        Lower and upper bound; None if fewer than two prompts have a pass rate for both models.
    """
    return interval([best.pass_rates[row] - rate for row, rate in each.pass_rates.items() if row in best.pass_rates])


def _checkpoint_of(name: str) -> Path:
    """Return the newest checkpoint of a run directory, and any other name unchanged, as a path."""
    path = Path(name)
    return path / "checkpoints" / "latest" if (path / "status").is_dir() else path


def _settings(models: Sequence[str], data: str | None, reward: str | None, overrides: Sequence[str]) -> Config:
    """Return the configuration that all models are evaluated with.

    It is based on the first run that names a reward, an agent or its own workflow (a run of `clew sft` does not). If
    there is no such run, it is based on the first run; without any run, on the defaults. The options of `clew eval`
    take precedence.

    Raises:
        ConfigError: No prompts or no reward are named, a reward is given although an agent gives its own, or a field is
            invalid.
    """
    configs = [_checkpoint_of(name).absolute().parent.parent / "config.yaml" for name in models]
    runs = [path for path in configs if (path.parent / "status").is_dir() and path.exists()]
    found = next((path for path in runs if _gives_rewards(read_yaml(path))), next(iter(runs), None))
    values: dict[str, Any] = {"experiment": "eval", "algorithm": {"advantages": "none"}}  # nothing is trained
    if found is not None:
        values = read_yaml(found)
    given = {
        "model": {"path": str(_checkpoint_of(models[0]))},
        "launch": {"mode": "local"},  # inline mode has no time limit for rewards
        "rollout": {"max_lag": 0} | ({} if reward is None else {"reward": reward}),
        "eval": {} if data is None else {"path": data},
        "training": {"objective": "sft"},  # that of a run of `clew sft` may be dpo, which has no held-out loss
    }
    for section, fields in given.items():
        values[section] = {**(values.get(section) or {}), **fields}
    values["data"] = {"path": "", **(values.get("data") or {})}
    config = configuration.parse(configuration.as_yaml(values), found or Path(models[0]), list(overrides))
    if not config.eval.path:
        raise ConfigError("Cannot evaluate: neither --data nor a run's eval.path names prompts. Add --data FILE.")
    rollout = config.rollout
    if reward is not None and rollout.agent is not None:
        raise ConfigError(
            f"Cannot use --reward {reward}: the agent {rollout.agent} gives its own rewards. Leave out --reward, or "
            f"evaluate without the agent, with rollout.agent=null."
        )
    if rollout.reward is None and rollout.agent is None and rollout.workflow.startswith("clew."):
        raise ConfigError(
            f"Cannot evaluate: {rollout.workflow} needs a reward, and neither --reward nor a run names one. Add "
            f"--reward my_rewards.FUNCTION, or name an agent, such as rollout.agent=my_agent.MyAgent."
        )
    return config


def _gives_rewards(values: dict[str, Any]) -> bool:
    """Return whether a run's configuration names a reward, an agent or a workflow of its own."""
    rollout = values.get("rollout") or {}
    own_workflow = not str(rollout.get("workflow", "clew.")).startswith("clew.")
    return bool(rollout.get("reward") or rollout.get("agent") or own_workflow)


def _evaluate(name: str, config: Config, data: Mapping[int, dict[str, Any]]) -> Evaluation:
    checkpoint = _checkpoint_of(name)
    manifest = checkpoint / "checkpoint.json"
    version = int(read_json(manifest, dict[str, Any])["version"]) if manifest.exists() else None
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(checkpoint)})})
    n_samples = config.eval.n_samples
    began = time.monotonic()
    with progress(f"evaluating {name}", total=len(data) * n_samples, unit="episodes") as advance:
        episodes = asyncio.run(
            run_rows(
                config,
                list(data.values()),
                lambda: load_engine(config),
                # A run gives its own evaluations these group IDs, from which the seeds derive. So a checkpoint gets the
                # same results here, unless another model's tokenizer left out a row: that renumbers the rows after it.
                name=group_name if version is None else lambda place: group_id(version, place),
                n_samples=n_samples,
                temperature=config.eval.temperature,
                done=advance,
            )
        )
    summary = summarize(
        episodes, n_samples=n_samples, pass_above=config.eval.pass_above, seconds=time.monotonic() - began
    )
    if not summary["episodes"]:
        error = next(episode.error for of_row in episodes for episode in of_row)
        count = "The only episode" if summary["failed"] == 1 else f"All {summary['failed']} episodes"
        raise RolloutError(f"{count} of {name} failed, the first with {error}")
    above = config.eval.pass_above
    found = [
        {
            "model": name,
            "row": number,
            "episode": episode.id,
            "reward": None if episode.error is not None else episode.reward,
            "passed": passed(episode, above),
            "tokens": episode.tokens,
            "finish_reason": episode.sequences[-1].finish_reason,
            "error": episode.error,
            "answer": _answer(episode),
            "data": json.dumps(row, ensure_ascii=False, default=str),
        }
        for (number, row), of_row in zip(data.items(), episodes, strict=True)
        for episode in of_row
    ]
    return Evaluation(name=name, config=config, episodes=found, summary=summary)


def _answer(episode: Episode) -> str:
    interactions = episode.sequences[-1].interactions
    return str(interactions[-1].get("completion", "")) if interactions else ""
