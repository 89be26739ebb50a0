"""Whole runs in this process."""

from __future__ import annotations

from pathlib import Path

from clew import config as configuration
from clew.config import Config
from clew.diagnose.rerun import Options, rerun
from clew.loop.trainer_process import learn_inline
from clew.record.run import RunDirectory


def configure(folder: Path, sections: str, trial: str, changes: dict[str, object], model: str = "model") -> Config:
    """Return the configuration of a trial, on folder/prompts.jsonl; `sections` is YAML."""
    (folder / "config.yaml").write_text(
        f"root: {folder}/runs\nmodel: {{path: {folder}/{model}}}\ndata: {{path: {folder}/prompts.jsonl}}\n"
        f"launch: {{threads: 1, mode: inline}}\n{sections}"
    )
    return configuration.load(folder / "config.yaml", [f"trial={trial}", *(f"{k}={v}" for k, v in changes.items())])


def learn(config: Config) -> RunDirectory:
    learn_inline(config, lambda step, summary: None)
    return RunDirectory(config.run_path)


def replays(target: Path, steps: str | None, stages: str | None = None) -> bool:
    return rerun(target, Options(steps=steps, stages=stages))
