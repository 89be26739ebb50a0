"""Rollout without a trainer: from the command line against a real server, and from Python."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import clew
from clew.inference.protocol import Completion, GenerateRequest
from clew.loop.trainer_process import learn_from_record
from clew.record.run import RunDirectory
from clew.rollout.given_rows import run_rows
from tests import forked
from tests.models import tiny_model, tiny_tokenizer
from tests.rollout.scripted import ROWS, Scripted, config_for


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "model", context=64)
    tiny_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.mark.parametrize(
    "made_by", [{"reward": "tests.rollout.user_code.exact"}, {"agent": "tests.rollout.user_agents.Turns"}]
)
def test_a_batch_from_python_has_the_rows_and_tensors_of_training(folder: Path, made_by: dict[str, Any]) -> None:
    batch = clew.rollout_batch(
        ROWS[:3], model=str(folder / "model"), n_samples=2, sampling={"max_new_tokens": 4}, **made_by
    )
    assert not batch.failed and [row.id for row in batch.rows][:2] == ["g000000.e0.s0", "g000000.e1.s0"]
    tensors = batch.to_tensors()
    assert {"input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards"} <= tensors.keys()
    longest = max(len(row.input_ids) for row in batch.rows)
    assert tensors["input_ids"].shape == (len(batch.rows), longest) and tensors["rewards"].dtype == torch.float64
    for place, row in enumerate(batch.rows):
        real = tensors["attention_mask"][place]
        assert tensors["input_ids"][place][real].tolist() == row.input_ids.tolist()
        assert tensors["logprobs"][place][real].tolist() == row.logprobs.tolist()
        assert row.loss_mask.any() and bool((tensors["loss_mask"][place].sum() == row.loss_mask.sum()).item())


def test_a_failed_episode_is_in_the_batch_with_its_error(folder: Path) -> None:
    async def notebook() -> clew.api.RolloutBatch:
        return await asyncio.to_thread(
            clew.rollout_batch,
            ROWS[:2],
            model=str(folder / "model"),
            agent="tests.rollout.user_agents.Once",
            workflow_kwargs={"give": "raise"},
            sampling={"max_new_tokens": 4},
        )

    batch = asyncio.run(notebook())
    assert not batch.rows and all("planted" in (row.error or "") for row in batch.failed)


def test_a_plain_reward_works_in_another_thread(folder: Path) -> None:
    work = asyncio.to_thread(
        clew.rollout_batch,
        ROWS[:2],
        model=str(folder / "model"),
        reward="tests.rollout.user_code.exact",
        n_samples=1,
        sampling={"max_new_tokens": 4},
    )
    batch = asyncio.run(work)
    assert len(batch.rows) == 2 and not batch.failed


class OneAtATime(Scripted):
    """Takes 0.2 s for each request, and makes the others wait."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Completion:
        async with self.free:
            await asyncio.sleep(0.2)
            return await super().generate(request)

    async def close(self) -> None: ...


def test_the_time_limit_of_an_episode_does_not_count_its_wait_for_the_engine(folder: Path) -> None:
    limits: dict[str, Any] = {"rollout": {"episode_timeout_s": 0.7, "reward": "tests.rollout.user_code.exact"}}
    config = config_for(folder, inference={"max_running": 1}, **limits)
    work = run_rows(config, ROWS[:5], OneAtATime, name=lambda place: f"g{place}", n_samples=1, temperature=1.0)
    assert [episode.error for [episode] in asyncio.run(work)] == [None] * 5


def write_config(folder: Path) -> Path:
    config = config_for(folder, data={"path": str(folder / "rows.jsonl")}, launch={"mode": "local"})
    path = folder / "config.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    return path


def test_rollout_alone_says_within_seconds_that_it_waits_for_a_server(folder: Path) -> None:
    with forked.clew("rollout", str(write_config(folder)), "--steps", "1", "--out", str(folder / "out")) as alone:
        line = alone.stdout.readline()
        assert "inference server" in line and str(folder) in line and "clew serve" in line
        alone.terminate()
    assert alone.returncode == 128 + signal.SIGTERM


def test_rollout_alone_makes_a_record_that_trains(folder: Path) -> None:
    yaml, out = write_config(folder), folder / "out"
    with forked.clew("serve", str(yaml)) as server:
        assert "launched at" in server.stdout.readline()
        told = [server.stdout.readline() for _ in range(4)]
        assert told[1].startswith("export OPENAI_BASE_URL=http://127.0.0.1:") and told[3].startswith("curl ")
        answered = subprocess.run(told[3], shell=True, capture_output=True, text=True, check=True)
        assert json.loads(answered.stdout)["object"] == "chat.completion"
        with forked.clew("rollout", str(yaml), "--steps", "3", "--out", str(out)) as alone:
            assert alone.wait(120) == 0
        server.terminate()
    run = RunDirectory(out)
    assert run.steps.count() == 3 and not run.inbox.names()
    assert len(run.steps.read_data(0)) == 6
    admitted = [row.admitted_version for step in range(3) for row in run.steps.read_data(step)]
    assert admitted.count(0) == 12, "only the groups of two batches start before the first batch is written"
    replayed = config_for(
        folder,
        training={"steps": 3},
        rollout={"reward": None},
        debug={"replay_rollout_data": True, "path": str(out)},
    ).model_copy(update={"trial": "replayed"})
    learn_from_record(replayed, lambda step, summary: None)
    assert RunDirectory(replayed.run_path).steps.count() == 3
