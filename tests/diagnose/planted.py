"""A run to plant faults in, and the planting."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from clew import config as configuration
from clew.config import Config
from clew.record import chain, rows
from clew.record.run import RunDirectory

REWARD = """
def digits(completion, data):
    return {"digits": sum(each.isdigit() for each in completion) / 8, "length": len(completion) / 100}
"""


LOSSES = """
import os, signal

def raising(logprobs_N, advantages_N):
    raise ValueError("odd")

def nan(logprobs_N, advantages_N):
    return logprobs_N * float("nan"), {}

def interrupting(logprobs_N, advantages_N):
    if os.path.exists("interrupt"):
        os.remove("interrupt")
        os.kill(os.getpid(), signal.SIGINT)
    return -advantages_N * logprobs_N, {}
"""


def configure(folder: Path, *overrides: str) -> Config:
    (folder / "config.yaml").write_text(
        f"experiment: e\ntrial: first\nroot: {folder}/runs\nmodel: {{path: {folder}/model}}\n"
        f"data: {{path: {folder}/prompts.jsonl}}\n"
        "rollout: {reward: planted_rewards.digits, batch_groups: 3, n_samples: 3, max_lag: 1}\n"
        "sampling: {max_new_tokens: 10}\n"
        "training: {steps: 6, lr: 1e-3, schedule: linear}\n"
        "algorithm: {minibatches: 2, kl_coef: 0.01}\n"
        "checkpoint: {every_steps: 2, keep: 5}\n"
        "launch: {threads: 1, mode: inline}\n"
    )
    return configuration.load(folder / "config.yaml", list(overrides))


def everything(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def change_stage(run: RunDirectory, step: int, stage: str, row: int, position: int, by: float) -> str:
    """Returns the ID of the sequence."""
    path = run.steps.stage_path(step, 0)
    table = rows.read_table(path)
    values = table.column(stage).to_pylist()
    values[row][position] += by
    place = table.schema.get_field_index(stage)
    rows.write_table(path, table.set_column(place, table.schema.field(stage), pa.array(values, pa.list_(pa.float32()))))
    return table.column("id")[row].as_py()


def generated_at(run: RunDirectory, step: int, row: int) -> int:
    """The position of the second generated token of a row."""
    return int(np.flatnonzero(run.steps.read_data(step)[row].loss_mask)[1])


def seal(run: RunDirectory) -> None:
    """Make the chain of commits fit again, as if the run had been recorded as it is now."""
    lines = []
    for step in range(run.steps.count()):
        path = run.steps.json_path(step)
        said = json.loads(path.read_text())
        for name in said.get("chain", {}):
            if (run.path / name).exists():
                said["chain"][name] = chain.digest((run.path / name).read_bytes())
        path.write_text(json.dumps(said))
        digest = chain.digest(path.read_bytes())
        lines.append(json.dumps({"step": step, **{key: said[key] for key in chain.INDEXED}, "json": digest}))
        following = run.checkpoints / f"step-{step + 1:06d}" / "checkpoint.json"
        if following.exists():
            said = {**json.loads(following.read_text()), "follows": digest}
            following.write_bytes(chain.sealed({key: said[key] for key in said if key != "seal"}))
    run.steps.index_path.write_text("".join(f"{line}\n" for line in lines))


def as_format_3(run: RunDirectory, before: int | None = None) -> None:
    """Make the steps before `before` (default: all) what a Clew without a chain of commits recorded."""
    lines = run.steps.index_path.read_text().splitlines()
    for step in range(run.steps.count() if before is None else before):
        path = run.steps.json_path(step)
        said = json.loads(path.read_text())
        path.write_text(json.dumps({key: each for key, each in said.items() if key != "chain"} | {"clew_format": 3}))
        for file in (run.steps.data_path(step), *run.steps.stage_paths(step)):
            table = rows.read_table(file)
            rows.write_table(file, table.replace_schema_metadata({"clew_format": "3"}))
        line = {key: each for key, each in json.loads(lines[step]).items() if key != "json"}
        lines[step] = json.dumps(line)
        for folder in (run.checkpoints / f"step-{version:06d}" for version in {step, step + 1}):
            if (path := folder / "checkpoint.json").exists():
                said = json.loads(path.read_text())
                path.write_text(json.dumps({key: each for key, each in said.items() if key not in ("follows", "seal")}))
    run.steps.index_path.write_text("".join(f"{line}\n" for line in lines))
