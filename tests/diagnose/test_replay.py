"""The time machine on runs with faults planted after the fact: the first difference named is the planted one."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import io
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from clew import config as configuration
from clew.algorithms.kl import ESTIMATORS
from clew.config import Config
from clew.diagnose import reward_replay
from clew.diagnose.blame import blame
from clew.diagnose.counterfactual import _configured
from clew.diagnose.diff import diff
from clew.diagnose.rerun import Options, rerun
from clew.errors import ClewError, ConfigError, Interrupted, ModelError, RecordError, TrainingError
from clew.gateway.episode_engine import resources
from clew.inference.protocol import RequestTooLong
from clew.loop.differences import differs
from clew.loop.loop import save_checkpoint
from clew.loop.replay import engine_at, replay
from clew.loop.trainer_process import learn_from_record, learn_inline
from clew.reading import flat
from clew.record import chain, rows
from clew.record.bundle import opened, write_bundle
from clew.record.run import RunDirectory
from clew.rollout.episode import run_episode
from clew.rollout.setup import load_reward, load_workflow
from clew.training import batch_metrics, checkpoint
from clew.training.custom import digest_of_file
from clew.training.engine import TrainEngine
from clew.training.sharded_digest import digest_tensors
from clew.view.show import show
from tests.diagnose.planted import REWARD, change_stage, configure, everything, generated_at, seal
from tests.gateway.chatml import chatml_tokenizer
from tests.gateway.spoken import Script, Spoken
from tests.models import tiny_model, tiny_tokenizer
from tests.rollout.scripted import config_for


def again(
    run: RunDirectory | Path, steps: str | None = None, overrides: list[str] | None = None, **options: Any
) -> bool:
    target = run.path if isinstance(run, RunDirectory) else run
    return rerun(target, Options(steps=steps, overrides=overrides or [], **options))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The line that names the first difference; after it there is nothing."""
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("FIRST DIFFERENCE")]
    assert "differ too" not in shown, shown
    return line


def change_summary(run: RunDirectory, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what step-N.json says, as if it had been committed so."""
    path = run.steps.json_path(step)
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))
    seal(run)


def test_a_copied_run_replays_bit_for_bit_without_its_model_and_is_left_as_it_is(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run.config_path.read_text()
    run.config_path.write_text(config.replace(str(configuration.load(run.config_path).model.path), "/nowhere/model"))
    before = everything(run.path)
    assert again(run) and again(run, "5") and again(run, "1:3")
    shown = capsys.readouterr().out
    assert "compared bit for bit" in shown and "steps 0 to 5: every stage agrees" in shown
    assert "from checkpoint 4" in shown and shown.count("step 2: agrees") == 2
    assert everything(run.path) == before


@pytest.mark.parametrize("stage", ["advantages", "proximal_logprobs", "reference_logprobs", "logprobs", "loss"])
def test_an_altered_stage_is_named_to_the_token(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    position = generated_at(run, 3, 4)
    name = change_stage(run, 3, stage, 4, position, 1e-4)
    assert not again(run, "3")
    assert told(capsys).startswith(f"FIRST DIFFERENCE  step 3, {stage}: {name}, token {position}: recorded ")


def test_stages_alone_need_no_model(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.checkpoints)
    assert again(run, stages="data,rewards,advantages,loss")
    shown = capsys.readouterr().out
    assert "not computed again: metrics (such as metrics.response_length), evaluation, timings, committed_at" in shown
    with pytest.raises(RecordError, match=r"no checkpoint at or before step 2 .*--stage advantages,loss` needs none"):
        again(run, "2")
    position = generated_at(run, 2, 1)
    name = change_stage(run, 2, "advantages", 1, position, 0.5)
    seal(run)
    capsys.readouterr()
    assert not again(run, "2", stages="advantages")
    assert f"step 2, advantages: {name}, token {position}" in told(capsys)
    assert again(run, "2", stages="advantages", only=run.steps.read_data(2)[-1].group_id)
    with pytest.raises(RecordError, match=r"step 2 .* has no g999\. It consumed g0"):
        again(run, "2", stages="advantages", only="g999")
    with pytest.raises(ConfigError, match="'logprobs' cannot be computed from recorded inputs alone"):
        again(run, "2", stages="logprobs")


def test_altered_data_is_named_by_its_sequence(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.steps.data_path(1)
    table = rows.read_table(path)
    rewards = table.column("reward").to_pylist()
    rewards[5] += 0.25
    place = table.schema.get_field_index("reward")
    rows.write_table(path, table.set_column(place, table.schema.field("reward"), pa.array(rewards)))
    assert not again(run, "1")
    assert f"step 1, data: {table.column('id')[5].as_py()}: recorded digest" in capsys.readouterr().out


def test_a_sequence_that_was_added_or_removed_is_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    batch = run.steps.read_data(1)
    added = dataclasses.replace(batch[0], id=batch[0].episode_id + ".s1")
    run.steps.write_data(1, rows.to_table([*batch, added]))
    assert not again(run, "1")
    assert f"step 1, data: {added.id}: recorded absent, here digest" in capsys.readouterr().out
    with pytest.raises(RecordError, match=rf"has the sequence {added.id}, and .* does not"):
        again(run, "1", stages="data,loss")
    run.steps.write_data(1, rows.to_table(batch[:-1]))
    assert not again(run, "1")
    assert f"step 1, data: {batch[-1].id}: recorded digest" in capsys.readouterr().out
    assert not again(run, "1", stages="data")
    assert f"step 1, data: {batch[-1].id}: recorded digest" in capsys.readouterr().out
    run.steps.write_data(1, rows.to_table([*batch, batch[0]]))
    with pytest.raises(RecordError, match=rf"was altered after it was written: it holds {batch[0].id} 2 times"):
        again(run, "1")
    run.steps.write_data(1, rows.to_table(batch))
    with pytest.raises(ConfigError, match="--reward and key=value are different ways to replay"):
        again(run, "1", ["training.lr=1"], reward=True)
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="torch finds no CUDA device"):
            again(run, "1", device="cuda")


def test_data_that_cannot_be_trained_on_is_named_before_it_is(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = run.steps.read_data(1)
    ids = batch[4].input_ids.copy()
    ids[0] = 10_000
    for changed in (dataclasses.replace(batch[4], reward=float("nan")), dataclasses.replace(batch[4], input_ids=ids)):
        run.steps.write_data(1, rows.to_table([*batch[:4], changed, *batch[5:]]))
        assert not again(run, "1")
        assert f"step 1, data: {batch[4].id}: recorded digest" in told(capsys)


def test_sequences_in_another_order_are_told(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    batch = run.steps.read_data(1)
    run.steps.write_data(1, rows.to_table([*batch[1:], batch[0]]))
    assert not again(run, "1")
    assert "step 1, data: the order of the sequences, number 0: recorded " in (line := told(capsys))
    assert f"({len(batch)} sequences are in other places)" in line


def test_the_numbers_of_a_checkpoint_are_held_against_the_training(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alter the seal, too: replay still notices."""
    path = run.checkpoints / "step-000006" / "checkpoint.json"
    said = json.loads(path.read_text())
    said["updates"] += 2
    del said["seal"]
    path.write_bytes(chain.sealed(said))
    assert not again(run)
    assert f"step 5, step-000006 (checkpoint.json): updates: recorded {said['updates']}, here 12" in told(capsys)


def test_a_stage_of_the_second_update_comes_after_the_loss_of_the_first(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = run.steps.read(3)["plan"]
    first, second = (next(row for micro in minibatch for row in micro) for minibatch in plan)
    name = change_stage(run, 3, "loss", first, generated_at(run, 3, first), 0.1)
    change_stage(run, 3, "logprobs", second, generated_at(run, 3, second), 0.1)
    assert not again(run, "3")
    shown = capsys.readouterr().out
    assert f"FIRST DIFFERENCE  step 3, loss: {name}, token" in shown
    assert "after it, these stages of the step differ too: logprobs\n" in shown


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("metrics", "loss", "step 1, metrics: loss: recorded 7, here "),
        ("metrics", "reward", "step 1, metrics: reward: recorded 7, here "),
        ("metrics", "stale_k3", "step 1, metrics: stale_k3: recorded 7, here "),
        ("digests", "data", "step 1, data: all, in their order: recorded 7, here "),
        ("digests", "weights", "step 1, digests of weights: of all: recorded 7, here "),
    ],
)
def test_what_a_step_said_of_itself_is_compared(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], section: str, key: str, said: str
) -> None:
    path = run.steps.json_path(1)
    summary = json.loads(path.read_text())
    summary[section][key] = 7
    path.write_text(json.dumps(summary))
    assert not again(run, "1")
    assert f"FIRST DIFFERENCE  {said}" in told(capsys)


def test_a_record_from_before_a_metric_and_an_option_agrees(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(run.steps.count()):
        path = run.steps.json_path(step)
        summary = json.loads(path.read_text())
        here = {name for name in ("mismatch_k3", "stale_k3") if summary["metrics"].pop(name, None) is not None}
        assert here == {"stale_k3" if summary["metrics"]["lag_max"] else "mismatch_k3"}
        for name in ("reject", "veto"):
            assert summary["config"]["algorithm"].pop(name) is None
        path.write_text(json.dumps(summary))
    seal(run)
    assert again(run) and "every stage agrees with the record" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["advantages", "loss", "logprobs"])
def test_a_stage_that_was_removed_is_named(run: RunDirectory, capsys: pytest.CaptureFixture[str], stage: str) -> None:
    path = run.steps.stage_path(1, 0)
    rows.write_table(path, rows.read_table(path).drop_columns([stage]))
    assert not again(run, "1")
    assert f"FIRST DIFFERENCE  step 1, {stage}: the stage: recorded absent" in told(capsys)
    with pytest.raises(RecordError, match=f"has no stage '{stage}': it was altered"):
        again(run, "1", stages="advantages,loss" if stage == "advantages" else "loss")


def test_a_checkpoint_of_another_version_is_refused(run: RunDirectory) -> None:
    shutil.rmtree(run.checkpoints / "step-000002")
    shutil.copytree(run.checkpoints / "step-000004", run.checkpoints / "step-000002")
    with pytest.raises(RecordError, match=r"step-000002 was altered .*: checkpoint.json says that it is of version 4"):
        again(run, "2")
    said = json.loads((run.checkpoints / "step-000004" / "checkpoint.json").read_text())
    (run.checkpoints / "step-000004" / "checkpoint.json").write_text(json.dumps({**said, "updates": 9}))
    with pytest.raises(RecordError, match=r"step-000004 was altered .*: the seal of checkpoint.json"):
        again(run, "4")
    (run.checkpoints / "step-000002" / "checkpoint.json").write_text("{}")
    with pytest.raises(RecordError, match=r"step-000002/checkpoint\.json: the field format is missing"):
        again(run, "2")


def test_the_reference_is_held_against_its_digests(run: RunDirectory) -> None:
    file = run.checkpoints / "step-000000" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= 1.01
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RecordError, match=r"step-000000 was altered .*: model.norm.weight \(weights\) has the digest"):
        again(run, "2")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no column", "there is no column 'logprobs'"),
        ("short", r"has \d+ logprobs and \d+ input_ids"),
        ("empty place", "g0.* has an empty place"),
        ("empty", "it holds no row"),
        ("no JSON", r"rewards of g0.* is no JSON: '\{a'"),
        ("no rewards", r"rewards of g0.* are no numbers by name: \[1\]"),
    ],
)
def test_rows_that_nobody_writes_are_told(run: RunDirectory, how: str, said: str) -> None:
    path = run.steps.data_path(1)
    table = rows.read_table(path)

    def put(name: str, values: list[Any]) -> pa.Table:
        field = table.schema.field(name)
        return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

    logprobs = table.column("logprobs").to_pylist()
    changed = {
        "no column": lambda: table.drop_columns(["logprobs"]),
        "short": lambda: put("logprobs", [logprobs[0][:-1], *logprobs[1:]]),
        "empty place": lambda: put("reward", [None, *table.column("reward").to_pylist()[1:]]),
        "empty": lambda: table.slice(0, 0),
        "no JSON": lambda: put("rewards", ["{a"] * table.num_rows),
        "no rewards": lambda: put("rewards", ["[1]"] * table.num_rows),
    }[how]()
    rows.write_table(path, changed)
    for stages in (None, "data"):
        with pytest.raises(RecordError, match=rf"step-000001\.parquet was altered after it was written: .*{said}"):
            again(run, "1", stages=stages)


@pytest.mark.parametrize("content", ["[]", "{}", '{"clew_format": 2}'])
def test_a_step_whose_json_says_too_little_is_told(run: RunDirectory, content: str) -> None:
    run.steps.json_path(1).write_text(content)
    with pytest.raises(RecordError, match=r"step-000001\.json: the (document is \[\]|field clew_format|field groups)"):
        again(run, "1")


def test_what_matches_nothing_is_no_success(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no nonsense\. It consumed g0"):
        again(run, "1", reward=True, only="nonsense")
    small = write_bundle(run, 3, stages_only=True, to=tmp_path / "small.zip")
    asked: list[dict[str, Any]] = [{"reward": True}, {"stop": "loss"}, {"overrides": ["training.lr=1"]}]
    asked += [{"device": "cpu"}, {"verify": False}, {"ranks": 2}]
    for options in asked:
        with pytest.raises(
            RecordError, match=r"small\.zip: it was written with --stages-only, so it lacks the weights"
        ):
            again(small, **options)
    with pytest.raises(ConfigError, match="--device tpu: expected cpu or cuda"):
        again(run, "1", device="tpu")
    with pytest.raises(ConfigError, match="--device cpu says where steps are trained, and --stage does not use it"):
        again(run, "1", stages="data", device="cpu")
    with pytest.raises(ConfigError, match=r"key=value does not use it.*Use model\.device=cpu in its place"):
        again(run, "1", ["training.lr=1"], device="cpu")


def test_a_counterfactual_of_nothing_says_so(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert again(run, "1", ["seed=7"])
    assert "no metric differs: seed=7 has no effect on these steps" in capsys.readouterr().out
    batch = run.steps.read_data(1)
    run.steps.write_data(1, rows.to_table([dataclasses.replace(batch[0], reward=9.0), *batch[1:]]))
    assert again(run, "1", ["training.lr=1e-5"])
    assert f"was altered: step 1, data: {batch[0].id}" in capsys.readouterr().err


def test_a_rank_whose_stages_are_missing_is_named(run: RunDirectory) -> None:
    path = run.steps.json_path(1)
    path.write_text(path.read_text().replace('"ranks": 1,', '"ranks": 2,'))
    for stages in (None, "data"):
        with pytest.raises(RecordError, match=r"rank-1\.parquet: it is missing"):
            again(run, "1", stages=stages)
    with pytest.raises(RecordError, match=r"rank-1\.parquet: it is missing"):
        write_bundle(run, 1, stages_only=True)


@pytest.mark.parametrize("file", ["model.safetensors", "trainer/state.safetensors"])
@pytest.mark.parametrize("concealed", [False, True])
def test_a_nudged_tensor_of_a_checkpoint_is_named(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], file: str, concealed: bool
) -> None:
    folder = run.checkpoints / "step-000002"
    kind = "weights" if file == "model.safetensors" else "state"
    tensors = load_file(folder / file)
    name = "model.layers.1.mlp.up_proj.weight" + ("" if kind == "weights" else ".exp_avg_sq")
    tensors[name].view(-1)[7] += 1e-6
    save_file(tensors, folder / file, metadata={"format": "pt"})
    with pytest.raises(RecordError, match=rf"step-000002 was altered .*: {name} \({kind}\) has the digest"):
        again(run, "3")
    assert not again(run, "1")  # from the checkpoint before
    assert f"step 1, step-000002 ({kind}): {name}: recorded digest" in told(capsys)
    if concealed:  # by somebody who knows about digests: then the step itself tells
        said = json.loads((folder / "checkpoint.json").read_text())
        del said["seal"]
        said[kind][name] = f"{digest_tensors([(name, tensors[name])])[name]:016x}"
        (folder / "checkpoint.json").write_bytes(chain.sealed(said))
        if kind == "weights":
            with pytest.raises(RecordError, match=rf"step-000002 is not what step 1 left: {name}: digest"):
                again(run, "2")
        else:  # the first of the step's two updates moves what the second one sees
            assert not again(run, "2")
            assert "FIRST DIFFERENCE  step 2, logprobs: " in capsys.readouterr().out


def test_a_checkpoint_of_another_model(run: RunDirectory, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_tokenizer(other)
    tiny_model(other, "gpt2")
    config = configuration.load(run.config_path)
    engine = TrainEngine(config.model_copy(update={"model": config.model.model_copy(update={"path": str(other)})}))
    checkpoint.save(engine, run.checkpoints / "step-000000")
    with pytest.raises(ModelError, match=r"step-000000 does not match .*: .* exists in only one of them"):
        again(run, "1")


def test_another_package_is_said_and_compared_within_a_tolerance(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.steps.json_path(4)
    said = json.loads(path.read_text())
    said["environment"]["packages"]["torch"] = "2.11.0"
    path.write_text(json.dumps(said))
    seal(run)
    assert again(run, "4")
    shown = capsys.readouterr().out
    assert "compared within 0.001 + 0.001 x |recorded|: torch 2.11.0 recorded, " in shown


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86 libraries")
def test_other_instruction_sets_are_no_difference_beyond_rounding(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One package rounds a sum differently, depending on the instruction sets that a variable allows."""
    limits = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    command = [sys.executable, "-m", "clew", "replay", str(run.path), "--steps"]
    elsewhere = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "0:5"], env=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared within 0.001" in done.stdout and "this is within rounding, and variables " in done.stdout
    assert "MKL_CBWR=COMPATIBLE" in done.stdout
    # What is more than rounding is told there, too.
    position = generated_at(run, 3, 4)
    name = change_stage(run, 3, "loss", 4, position, 0.5)
    done = subprocess.run([*command, "3:4"], env=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"FIRST DIFFERENCE  step 3, loss: {name}, token {position}" in done.stdout
    # Here everything else agrees bit for bit, which shows that nothing was rounded otherwise.
    assert not again(run, "3")
    assert f"step 3, loss: {name}, token {position}" in told(capsys)


def test_a_record_of_older_formulas_is_compared_within_rounding_where_it_differs(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """k3 was exp(x) - x - 1 before, in the loss and in metrics, and the record did not name its formulas."""

    def older(logprobs: Any, other: Any, *_: Any) -> Any:
        return (other - logprobs).exp() - (other - logprobs) - 1

    def older_metric(logprobs: Any, other: Any, estimator: str) -> Any:
        apart = logprobs.astype(np.float64) - other
        return np.exp(-apart) + apart - 1

    config = configure(
        folder, f"root={tmp_path}", "training.steps=3", "checkpoint.every_steps=9", "algorithm.kl_coef=1"
    )
    with monkeypatch.context() as before:
        before.setitem(ESTIMATORS, "k3", older)
        before.setattr(batch_metrics, "divergences", older_metric)
        learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert not again(run), "what a record of today would be called"
    assert "FIRST DIFFERENCE  step " in capsys.readouterr().out
    for step in range(3):
        change_summary(run, step, lambda said: said["environment"].pop("rounding"))
    assert again(run)
    assert "this is within rounding, and the record does not say which CPU instruction sets" in capsys.readouterr().out
    shutil.rmtree(run.checkpoints / "step-000003")
    learn_inline(config, lambda step, summary: None)  # it goes on within the tolerance
    assert "step 0: compared within 0.001 + 0.001 x |recorded|, not bit for bit: " in caplog.text
    shutil.rmtree(run.checkpoints / "step-000003")
    change_summary(run, 1, lambda said: said["metrics"].update(grad_norm=9.0))
    with pytest.raises(TrainingError, match="step 1, trained again from the record, differs: step 1, gradients: norm"):
        learn_inline(config, lambda step, summary: None)


def test_a_reward_function_with_a_new_bug(run: RunDirectory, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert again(run, "0:2", reward=True)
    module = folder / "planted_rewards.py"
    try:
        module.write_text(REWARD.replace("each.isdigit()", "each in '01234567'"))
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        digest_of_file.cache_clear()  # it keeps the digest of the code that was loaded first
        assert not again(run, "0:2", reward=True)
        *lines, last = capsys.readouterr().out.strip().splitlines()[1:]
        wrong = {row.episode_id for step in (0, 1) for row in run.steps.read_data(step) if disagrees(row)}
        assert wrong and {line.split(": recorded")[0].split(", ")[1] for line in lines} == wrong
        assert f"{len(wrong)} episodes differ from what planted_rewards.digits returns now" in last
        now = digest_of_file(str(module))
        change_summary(run, 1, lambda said: said["code"].update({"rollout.reward": now}))
        assert not again(run, "1", reward=True)
        assert "So the rewards may depend on the time, on random numbers," in capsys.readouterr().out
        module.write_text(REWARD.replace("len(completion) / 100", "1 / 0"))
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        assert not again(run, "1", reward=True)
        shown = capsys.readouterr().out
        assert shown.count("now reward planted_rewards.digits raised ZeroDivisionError: division by zero\n") == 9
        assert shown.count("Traceback") == 1 and "traceback of the first error:\nTraceback" in shown
    finally:
        module.write_text(REWARD)
    run.config_path.write_text(run.config_path.read_text().replace("planted_rewards.digits", "gone_rewards.digits"))
    with pytest.raises(ConfigError, match="gone_rewards"):
        again(run, "0", reward=True)


def test_rewards_of_rows_that_json_cannot_hold(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    days = {"prompt": [f"{i} + 1 =" for i in range(5)], "day": [datetime.date(2026, 1, 1 + i) for i in range(5)]}
    pq.write_table(pa.table({**days, "price": [Decimal(i) / 4 for i in range(5)]}), tmp_path / "rows.parquet")
    (tmp_path / "dated_rewards.py").write_text(
        "def of(completion, data):\n    return data['day'].day + float(data['price'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["training.steps=1", f"data.path={tmp_path}/rows.parquet", "rollout.reward=dated_rewards.of"]
    config = configure(folder, f"root={tmp_path}", *own)
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert again(run, reward=True)
    used = run.steps.read_data(0)[0].data
    shown = io.StringIO()
    show(run.path, prompt=used["prompt"].split()[0], console=Console(file=shown, width=200))
    assert used["day"] in shown.getvalue() and "1 trained on" in shown.getvalue()
    (tmp_path / "rows.parquet").unlink()
    capsys.readouterr()
    assert not again(run, reward=True)
    assert "AttributeError: 'str' object has no attribute 'day'" in capsys.readouterr().out


def retried(folder: Path, script: Script, **reward: Any) -> tuple[Config, RunDirectory]:
    """Record one episode of MultiTurnRetry, in which the model says what the script tells it."""
    workflow = "clew.rollout.workflows.MultiTurnRetry"
    config = config_for(folder, rollout={"workflow": workflow}, reward=reward, sampling={"max_new_tokens": 3})
    tiny_model(folder / "model", context=16)
    tokenizer = chatml_tokenizer(folder / "model")
    engine: Any = Spoken(tokenizer, script)
    shared = resources(config, engine, tokenizer, load_reward(config), vision=None)
    rolled = run_episode(
        load_workflow(config),
        shared,
        episode_id="g000000.e0",
        group_id="g000000",
        data={"prompt": "1+1=", "answer": "2"},
        admitted_version=0,
        admitted_at=0.0,
        timeout_s=None,
    )
    run = RunDirectory(config.run_path)
    run.steps.write_data(0, rows.to_table(asyncio.run(rolled).sequences))
    return config, run


def test_returns_of_turns_are_computed_again_as_they_were_recorded(tmp_path: Path) -> None:
    config, run = retried(tmp_path, lambda prompt: "2" if "again" in prompt else "3", turn_discount=0.5)
    [row] = run.steps.read_data(0)
    assert len(row.interactions) == 2 and row.rewards == {"reward": 0.5}
    assert asyncio.run(reward_replay.recompute_rewards(run, config, [0], None)) == []


def test_a_turn_that_did_not_fit_into_the_context_is_refused_again(tmp_path: Path) -> None:
    def refuses(prompt: str) -> str:
        if "again" in prompt:
            raise RequestTooLong("the prompt fills the context.")
        return "3"

    config, run = retried(tmp_path, refuses)
    [row] = run.steps.read_data(0)
    assert len(row.interactions) == 1 and row.error is None
    assert asyncio.run(reward_replay.recompute_rewards(run, config, [0], None)) == []


def test_only_finds_the_step_that_trained_on_an_id(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    row = run.steps.read_data(3)[0]
    assert again(run, stages="advantages", only=row.group_id) and again(run, reward=True, only=row.episode_id)
    shown = capsys.readouterr().out
    assert f"({row.group_id})" in shown and shown.count("step 3") == 2 and "step 0" not in shown
    with pytest.raises(RecordError, match=r"Cannot find g999: steps 0 to 5 of .* did not train on it"):
        again(run, stages="advantages", only="g999")


def test_a_counterfactual_elsewhere_names_what_may_be_rounding(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads(run.steps.json_path(1).read_text())
    recorded["environment"]["threads"] = 99
    recorded["metrics"]["loss"] += 1e-5
    run.steps.json_path(1).write_text(json.dumps(recorded))
    assert again(run, "1", ["seed=7", "trial=elsewhere"])
    assert "loss: equal within 0.001 + 0.001 x |recorded|. The record is of other" in capsys.readouterr().out
    assert again(run, "1", ["training.lr=4e-4", "trial=slow"])
    assert not [line for line in capsys.readouterr().out.splitlines() if "equal within" in line and "lr" in line]


def disagrees(row: rows.Sequence) -> bool:
    text = "".join(said["completion"] for said in row.interactions)
    return any(digit in text for digit in "89")


def test_a_counterfactual_shares_the_past_and_differs_from_there(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(run.path)
    assert again(run, "3:5", ["training.lr=1e-4", "trial=slow"])
    assert everything(run.path) == before
    new = RunDirectory(run.path.parent / "slow")
    ours, theirs = run.steps.index(), new.steps.index()
    assert theirs[:3] == ours[:3] and len(theirs) == 5
    assert theirs[3]["groups"] == ours[3]["groups"] and theirs[3]["digests"]["data"] == ours[3]["digests"]["data"]
    assert theirs[3]["digests"]["gradients"][0] == ours[3]["digests"]["gradients"][0]
    assert theirs[3]["digests"]["weights"] != ours[3]["digests"]["weights"]
    said = capsys.readouterr().out
    assert "recorded → here" in said and said.endswith(f"\n→ clew show {new.path} 4\n")
    assert again(run, "3:5", ["training.micro_batch_tokens=64"])  # a free trial name
    assert again(RunDirectory(run.path.parent / "first-replay-1"), "4")
    with pytest.raises(RecordError, match="slow already exists, and this command did not leave it unfinished"):
        again(run, "3", ["training.lr=1e-4", "trial=slow"])
    with pytest.raises(ConfigError, match=r"no field 'training.lrr'; did you mean 'training.lr'"):
        again(run, "3", ["training.lrr=1e-4"])


@pytest.mark.parametrize("within", ["", "runs/e", "runs/e/first"])
def test_a_counterfactual_lies_beside_its_run_wherever_it_is_started(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    here = run.path.parents[2] / within
    monkeypatch.chdir(here)
    assert again(run.path.relative_to(here), "4", ["training.lr=1e-4"])
    assert RunDirectory(run.path.parent / "first-replay-1").steps.count() == 5


def test_a_counterfactual_of_a_copied_run_lies_in_the_folder_of_the_copy(run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    assert again(tmp_path / "copy", "4", ["training.lr=1e-4"])
    assert RunDirectory(tmp_path / "e" / "first-replay-1").steps.count() == 5


def test_a_counterfactual_of_a_run_whose_names_look_like_something_else(run: RunDirectory, tmp_path: Path) -> None:
    there = tmp_path / "a: b #é😀" / "007" / "first"
    shutil.copytree(run.path, there)
    config = there / "config.yaml"
    config.write_text(config.read_text().replace("experiment: e\n", "experiment: '007'\n"))
    assert again(there, "4", ["training.lr=1e-4"])
    assert RunDirectory(there.with_name("first-replay-1")).steps.count() == 5


def test_a_counterfactual_of_a_run_on_several_devices_needs_none_of_them(run: RunDirectory, tmp_path: Path) -> None:
    there = tmp_path / "e" / "devices"
    shutil.copytree(run.path, there)
    settings = yaml.safe_load((there / "config.yaml").read_text())
    settings["launch"] |= {"devices": "d2", "ranks": 2, "mode": "local"}
    (there / "config.yaml").write_text(yaml.safe_dump(settings))
    assert _configured(RunDirectory(there), 4, ["training.lr=1e-4"], tmp_path).launch.devices is None


def test_a_refused_counterfactual_leaves_nothing(run: RunDirectory) -> None:
    runs = list(run.path.parent.iterdir())
    with pytest.raises(ConfigError, match="there is no module 'nosuch'"):
        again(run, "3", ["algorithm.loss=nosuch.thing"])
    with pytest.raises(ModelError, match=r"was trained with model\.dtype=float32, this run has float64"):
        again(run, "3", ["model.dtype=float64"])
    with pytest.raises(ConfigError, match=r"model\.path=another: the model cannot be changed, because step 3"):
        again(run, "3", ["model.path=another"])
    with pytest.raises(
        ConfigError, match=r"minibatches=1: each step before step 3 has 2 updates, and .*=linear counts"
    ):
        again(run, "3", ["algorithm.minibatches=1", "training.schedule=linear"])
    with pytest.raises(TrainingError, match=r"planted_losses\.raising raised ValueError .*odd"):
        again(run, "3", ["algorithm.loss=planted_losses.raising", "trial=retried"])
    assert list(run.path.parent.iterdir()) == runs
    assert again(run, "3", ["training.lr=1e-4", "trial=retried"])


def test_a_counterfactual_whose_gradient_is_none_can_be_blamed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingError, match=r"`clew blame RUN --step 3` finds the cause"):
        again(run, "3", ["algorithm.loss=planted_losses.nan", "trial=nan"])
    new = run.path.parent / "nan"
    blame(new, 3, top=1, tokens=1, by="gradient")
    assert "NOT FINITE  the loss (algorithm.loss=planted_losses.nan" in capsys.readouterr().out
    console = Console(file=io.StringIO(), width=200)
    show(new, console=console)
    show(new, RunDirectory(new).steps.read_data(3)[0].group_id, console=console)
    with pytest.raises(RecordError, match=r"nan already exists, .* Choose another trial=NAME, or remove it"):
        again(run, "3", ["training.lr=1e-4", "trial=nan"])


def test_an_interrupted_counterfactual_goes_on_with_the_same_command(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replay a bundle, too, which is unpacked elsewhere each time."""
    bundle = write_bundle(run, 5, stages_only=False, to=tmp_path / "whole.zip")
    change = "algorithm.loss=planted_losses.interrupting"
    for source, steps, trial in ((run.path, "3:6", "stopped"), (bundle, "4:6", "unpacked")):
        (tmp_path / "interrupt").touch()
        with pytest.raises(Interrupted, match=rf"The same command with trial={trial} goes on with .*{trial}\."):
            again(source, steps, [change, f"trial={trial}", f"root={tmp_path}/runs"], trust=["planted_losses"])
        new = RunDirectory(run.path.parent / trial)
        before = new.steps.index()
        assert len(before) == int(steps[0]) + 1
        with pytest.raises(RecordError, match="this command did not leave it unfinished"):
            again(source, steps, ["training.lr=1e-4", f"trial={trial}", f"root={tmp_path}/runs"])
        assert again(source, steps, [change, f"trial={trial}", f"root={tmp_path}/runs"], trust=["planted_losses"])
        assert new.steps.count() == 6 and new.steps.index()[: len(before)] == before


def test_a_counterfactual_of_a_bundle_begins_with_what_it_holds(run: RunDirectory, tmp_path: Path) -> None:
    """The bundle has no step 0 and 1, but a line of the index for each."""
    bundle = write_bundle(run, 3, stages_only=False, to=tmp_path / "new" / "folder" / "whole.zip")
    assert again(bundle, "3", ["training.lr=1e-4", "trial=other", f"root={tmp_path}/runs"])
    new = RunDirectory(run.path.parent / "other")
    assert new.steps.index()[:3] == run.steps.index()[:3] and new.steps.count() == 4
    assert new.steps.read(0)["metrics"] == {} and new.steps.read(2)["metrics"] == run.steps.read(2)["metrics"]
    assert again(new, "3") and not diff(new.path, run.path, ignore=[], plot=None)
    with pytest.raises(RecordError, match=r"are gone: .*/new/folder/whole\.zip/steps/step-000000\.parquet is missing"):
        show(bundle, run.steps.read(0)["groups"][0], console=Console(file=io.StringIO()))
    with pytest.raises(FileNotFoundError), opened(bundle):  # of another file
        (tmp_path / "nowhere").read_text()


DRAWN = """
import torch

def loss(logprobs_N, advantages_N):
    return -logprobs_N * advantages_N * (1 + torch.rand_like(logprobs_N)), {}
"""
CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "kl off": ([], ["algorithm.kl_coef=0"]),
    "kl on": (["algorithm.kl_coef=0"], []),
    "kl on with adapters": (["training.lora_rank=4", "algorithm.kl_coef=0"], ["training.lora_rank=4"]),
    "critic off": (["algorithm.advantages=gae"], []),
    "seed": (["algorithm.loss=drawn.loss"], ["algorithm.loss=drawn.loss", "seed=9"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_run_changed_when_it_went_on_is_replayed_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    monkeypatch.syspath_prepend(tmp_path)
    before, after = CHANGES[change]
    options = [f"root={tmp_path}", "training.schedule=constant"]
    learn_inline(configure(folder, *options, *before, "training.steps=2"), lambda step, summary: None)
    config = configure(folder, *options, *after, "training.steps=3")
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert again(run) and again(run, "2") and again(run, "1")
    blame(run.path, 1, top=1, tokens=1, by="gradient")
    sys.modules.pop("drawn", None)


def test_a_counterfactual_changes_only_what_it_names_although_the_run_went_on_with_other_settings(
    folder: Path, tmp_path: Path
) -> None:
    options = [f"root={tmp_path}", "training.schedule=constant"]
    learn_inline(configure(folder, *options, "training.steps=2"), lambda step, summary: None)
    later = ["training.steps=3", "training.lr=1e-4", "algorithm.loss_mean=sequence", "seed=9"]
    later += ["rollout.drop_equal_rewards=true", "sampling.top_p=0.9"]
    config = configure(folder, *options, *later)
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert again(run, "1", ["algorithm.clip_high=0.3", "trial=clip"])
    then, now = (flat(RunDirectory(tmp_path / "e" / trial).steps.read(1)["config"]) for trial in ("first", "clip"))
    assert {name for name in {**then, **now} if then.get(name) != now.get(name)} == {"algorithm.clip_high"}
    settings = configuration.load(tmp_path / "e" / "clip" / "config.yaml")
    assert (settings.rollout.drop_equal_rewards, settings.sampling.top_p) == (False, 1.0)


def test_a_counterfactual_of_the_first_step_begins_with_the_runs_own_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    config = configure(folder, f"root={tmp_path}", "training.steps=2", f"model.path={tmp_path / 'model'}")
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    shutil.rmtree(tmp_path / "model")
    assert again(run, "0", ["algorithm.minibatches=1", "trial=one"])
    assert again(run, "0", ["training.lora_rank=2", "trial=adapters"])
    assert again(run, "0:2", ["training.lr=1e-4", "trial=slow"])
    new = RunDirectory(run.path.parent / "slow")
    ours, theirs = (each.steps.read(0)["digests"] for each in (run, new))
    assert theirs["data"] == ours["data"] and theirs["gradients"][0] == ours["gradients"][0]
    assert theirs["weights"] != ours["weights"]
    assert new.checkpointed() == [0, 2]


def test_where_weights_lie_in_their_file_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """A product of a matrix and a single vector, as of the value head, or of a micro-batch with one trained token, may
    end in other digits where the matrix is aligned otherwise."""
    shutil.copytree(folder / "model", tmp_path / "longer")
    weights = load_file(folder / "model" / "model.safetensors")
    save_file(weights, tmp_path / "longer" / "model.safetensors", metadata={"format": "pt", "padding": "x" * 37})
    options = [f"root={tmp_path}", "training.steps=3", f"model.path={tmp_path / 'longer'}"]
    critic = ["algorithm.advantages=gae", f"algorithm.critic={folder / 'model'}"]
    single = ["sampling.max_new_tokens=1", "training.micro_batch_tokens=1"]
    for trial, more in (("critic", critic), ("single", single)):
        config = configure(folder, *options, *more, f"trial={trial}")
        learn_inline(config, lambda step, summary: None)
        assert again(RunDirectory(config.run_path))


def test_a_filter_is_applied_to_recorded_batches(run: RunDirectory) -> None:
    path = run.steps.data_path(0)
    table = rows.read_table(path)
    group = table.column("group_id")[0].as_py()
    rewards = [1.0 if row["group_id"] == group else row["reward"] for row in table.to_pylist()]
    place = table.schema.get_field_index("reward")
    rows.write_table(path, table.set_column(place, table.schema.field("reward"), pa.array(rewards)))
    assert again(run, "0", ["rollout.drop_equal_rewards=true", "trial=filtered"])
    new = RunDirectory(run.path.parent / "filtered")
    assert set(run.steps.read(0)["groups"]) - set(new.steps.read(0)["groups"]) == {group}


def test_a_bundle_replays_alone(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(".e-first-step-000003.clew.zip").write_bytes(b"half")  # as SIGKILL leaves it
    whole = write_bundle(run, 3, stages_only=False)
    assert write_bundle(run, 3, stages_only=True).name == "e-first-step-000003.stages.clew.zip"
    assert not list(Path().glob(".*.zip"))
    small = write_bundle(run, 3, stages_only=True, to=tmp_path / "small.zip")
    assert whole.name == "e-first-step-000003.clew.zip" and small.stat().st_size < whole.stat().st_size / 10
    shutil.rmtree(run.path)
    assert again(whole) and again(small)
    shown = capsys.readouterr().out
    assert "from checkpoint 2" in shown and "step 3: every stage agrees" in shown and "has no weights" in shown
    whole.write_bytes(whole.read_bytes()[:-500])
    with pytest.raises(RecordError, match="neither a run directory nor a bundle"):
        again(whole)
    with pytest.raises(RecordError, match="does not exist"):
        again(tmp_path / "nothing.zip")


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("advantages", {"batch", "plan"}),
        ("loss", {"batch", "plan", "logprobs_N", "advantages_N", "reference_N"}),
        ("backward", {"batch", "loss"}),
        ("update", {"batch", "gradients"}),
    ],
)
def test_a_debugger_stops_with_the_inputs_of_the_stage_in_scope(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str, names: set[str]
) -> None:
    scopes: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: scopes.append(sys._getframe(1).f_globals))
    assert again(run, "3:5", stop=stage)
    plans = [run.steps.read(step)["plan"] for step in (3, 4)]
    micro_batches = [sum(map(len, plan)) for plan in plans]
    stops = {"advantages": [1, 1], "update": [2, 2]}.get(stage, micro_batches)
    assert [scope["step"] for scope in scopes] == [3] * stops[0] + [4] * stops[1] and len(scopes) > 1
    for scope in scopes:
        assert names | {"engine", "model"} <= scope.keys()
        if stage == "loss":
            ours = [scope["batch"][row] for row in dict.fromkeys(scope["batch_rows_N"].tolist())]
            behaviour_N = np.concatenate([row.logprobs[row.loss_mask] for row in ours])
            np.testing.assert_array_equal(behaviour_N, scope["behaviour_N"].numpy())
    assert ("in update 1 (token i is of batch[batch_rows_N[i]])" in capsys.readouterr().err) == (
        stage in ("loss", "backward")
    )
    with pytest.raises(ConfigError, match="--break never: expected one of advantages"):
        again(run, "3", stop="never")


def test_a_step_that_was_not_committed_is_trained_with_what_the_run_has_now(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = run.steps.read(5)["metrics"]["loss"]
    run.steps.json_path(5).unlink()
    run.steps.index_path.write_text("".join(run.steps.index_path.read_text().splitlines(keepends=True)[:5]))
    stopped: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(sys._getframe(1).f_globals))
    assert again(run, "5") and again(run, "5", stop="advantages")
    shown = capsys.readouterr().out
    assert f"step 5: loss {loss:.6g}, " in shown and [scope["step"] for scope in stopped] == [5]
    with pytest.raises(RecordError, match=r"step 5 of .* it was begun but never committed"):
        again(run, "5", stages="loss")
    assert again(run, "5", ["training.lr=1e-4"])
    assert "\n   5  - → " in capsys.readouterr().out


def test_what_differs_is_no_obstacle_where_nothing_is_compared(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = run.steps.read_data(2)
    run.steps.write_data(2, rows.to_table([dataclasses.replace(batch[0], reward=9.0), *batch[1:]]))
    change_stage(run, 3, "loss", 0, generated_at(run, 3, 0), 0.1)
    assert again(run, "3", verify=False)
    assert "step 3: trained. loss " in (shown := capsys.readouterr().out) and "step 3: nothing was compared." in shown
    assert not again(run, "3")
    for stages in ("loss", ""):
        with pytest.raises(ConfigError, match="--no-verify trains again without comparing, and --stage does not"):
            again(run, "3", verify=False, stages=stages)


def test_steps_without_sequences_are_left_out(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.steps.prune(before=2)
    assert again(run)
    assert "from step 2 on: the record no longer has everything that earlier steps need" in capsys.readouterr().out
    with pytest.raises(RecordError, match=r"sequences of step 0 are gone: .* the next that has its own is step 2\."):
        again(run, "1")


def test_all_steps_begin_at_a_checkpoint_if_the_sequences_before_it_are_gone(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.steps.prune(before=1)
    assert again(run)
    assert "from step 2 on: " in capsys.readouterr().out
    assert again(run, stages="data")
    assert "from step 1 on: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "value", "told_by_replay", "told_by_stages"),
    [
        ("tensors.gradients", [], "step 2, gradients: model.embed_tokens.weight, update 0: recorded absent", ""),
        ("groups", ["g1"], "step 2, groups: of all: recorded ['g1'], here ['g000006'", ""),
        ("metrics.more", 1.0, "step 2, metrics: more: recorded 1, here absent", ""),
        (
            "plan",
            [[[0]]],
            "step 2, plan: of all: recorded [[[0]]], here ",
            "does not have each of the step's 9 sequences exactly once",
        ),
        ("config.algorithm.nonsense", 3, "config.algorithm.nonsense: 3 (this Clew has no such field)", "no such field"),
        (
            "config.algorithm.advantages",
            "gae",
            "has no critic (trainer/critic), which algorithm.advantages=gae needs",
            "no stage 'values'",
        ),
        (
            "config.algorithm.kl_coef",
            0.0,
            "step 2, reference_logprobs: the stage: recorded present, here absent",
            "loss",
        ),
    ],
)
def test_what_a_steps_json_says_is_compared_and_told(
    run: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    path: str,
    value: Any,
    told_by_replay: str,
    told_by_stages: str,
) -> None:
    said = run.steps.read(2)
    *sections, last = path.split(".")
    place: Any = said
    for name in sections:
        place = place[name]
    place[last] = value
    run.steps.json_path(2).write_text(json.dumps(said))
    seal(run)
    for stages, expected in ((None, told_by_replay), ("advantages,loss", told_by_stages)):
        try:
            agrees = again(run, "2", stages=stages)
        except ClewError as error:
            agrees, shown = False, str(error)
        else:
            shown = capsys.readouterr().out
        assert agrees == (not expected) and expected in shown, shown


@pytest.mark.parametrize(
    ("column", "value"),
    [("group_id", "g000999"), ("finish_reason", "abort"), ("interactions", []), ("data", {"prompt": "other"})],
)
def test_where_a_sequence_comes_from_is_held_against_the_record(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], column: str, value: Any
) -> None:
    batch = run.steps.read_data(2)
    batch[4] = dataclasses.replace(batch[4], **{column: value})
    run.steps.write_data(2, rows.to_table(batch))
    for stages in (None, "data", "data,rewards,advantages,loss"):
        assert not again(run, "2", stages=stages)
        assert told(capsys).startswith(f"FIRST DIFFERENCE  step 2, data: {batch[4].id}, its group, episode, turns, ")


def test_what_cannot_be_read_is_said(run: RunDirectory) -> None:
    path = run.steps.data_path(2)
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=r"step-000002\.parquet cannot be read .* truncated or altered"):
            again(run, "3")
    path.unlink()
    with pytest.raises(RecordError, match=r"step-000002\.parquet is missing"):
        again(run, "2")
    for steps in ("7", "4:3", "x"):
        with pytest.raises(ClewError, match="--steps"):
            again(run, steps)
    path.write_bytes(whole)
    said = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps(said | {"clew_format": 99}))
    with pytest.raises(RecordError, match="format 99"):
        again(run, "2")


@pytest.mark.parametrize("form", ["parquet", "pt"])
def test_dumped_batches_train_another_run_alike(folder: Path, original: Path, tmp_path: Path, form: str) -> None:
    dumped = tmp_path / "dump"
    options = [f"root={tmp_path}", "training.steps=3", "training.schedule=constant"]
    dumping = configure(folder, *options, *dumping_to(dumped, form))
    learn_inline(dumping, lambda step, summary: None)
    files = {path.name: path.read_bytes() for path in dumped.iterdir()}
    assert sorted(files) == [f"step-{step:06d}.{form}" for step in range(3)]
    (dumped / f"step-000001.{form}").unlink()  # as where there was no space left for it
    (dumped / f"step-000002.{form}").unlink()
    learn_inline(dumping, lambda step, summary: None)
    assert {path.name: path.read_bytes() for path in dumped.iterdir()} == files
    other = [*options, "trial=other", "seed=2"]
    for _ in range(2):  # from its start, and with as many steps
        with pytest.raises(RecordError, match=r"dump has a batch of step 2 that is not of .*/other: another run was"):
            learn_inline(configure(folder, *other, *dumping_to(dumped, form)), lambda *_: None)
        learn_inline(configure(folder, *other), lambda *_: None)
    assert {path.name: path.read_bytes() for path in dumped.iterdir()} == files
    replaying = configure(folder, *options, "trial=again", "debug.replay_rollout_data=true", f"debug.path={dumped}")
    learn_from_record(replaying, lambda step, summary: None)
    first, second = RunDirectory(dumping.run_path), RunDirectory(replaying.run_path)
    assert [entry["digests"] for entry in first.steps.index()] == [entry["digests"] for entry in second.steps.index()]
    more = configure(folder, *options, "training.steps=5", "trial=again", *replaying_from(dumped))
    with pytest.raises(RecordError, match=r"has no batch of step 3 \(it has steps 0 to 2\)"):
        learn_from_record(more, lambda step, summary: None)
    assert second.checkpointed()[-1] == 3


def test_a_run_on_other_batches_is_refused(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(run.status)
    before = everything(run.path)
    run.status.mkdir()
    shutil.copytree(run.path, tmp_path / "source")
    options = [f"root={tmp_path}/runs", "training.schedule=constant"]
    live = configure(folder, *options, *replaying_from(tmp_path / "source"))
    with pytest.raises(
        RecordError, match=r"Cannot continue .*runs/e/first .*it was trained on what its own rollout makes"
    ):
        learn_from_record(live, lambda *_: None)
    with pytest.raises(RecordError, match=r"debug\.path=.*/nowhere does not exist: expected a folder of batches"):
        learn_from_record(configure(folder, *options, *replaying_from(tmp_path / "nowhere")), lambda *_: None)
    shutil.rmtree(run.status)
    assert everything(run.path) == before
    replayed = [*options, "trial=replayed", "training.steps=2"]
    learn_from_record(configure(folder, *replayed, *replaying_from(tmp_path / "source")), lambda *_: None)
    with pytest.raises(RecordError, match=r"it was trained on the batches in .*/source \(debug\.replay_rollout_data\)"):
        learn_inline(configure(folder, *replayed, "training.steps=3"), lambda *_: None)
    steps = RunDirectory(tmp_path / "source").steps
    for step in (1, 2):  # what it was trained on before, and what comes after
        steps.data_path(step).write_bytes(steps.data_path(3).read_bytes())
    with pytest.raises(
        RecordError, match=r"step 1 of .*/replayed was trained on another batch than debug\.path=.*/sour"
    ):
        learn_from_record(configure(folder, *replayed, *replaying_from(tmp_path / "source")), lambda *_: None)
    assert RunDirectory(tmp_path / "runs" / "e" / "replayed").steps.count() == 2


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_on_recorded_batches_keeps_its_model(run: RunDirectory, folder: Path, tmp_path: Path, steps: int) -> None:
    shutil.copytree(folder / "model", tmp_path / "another")
    replaying = [f"root={tmp_path}/runs", "trial=replayed", "training.schedule=constant", *replaying_from(run.path)]
    learn_from_record(configure(folder, *replaying), lambda *_: None, until=steps)
    with pytest.raises(ConfigError, match=r"with another model: model\.path .* A run keeps its model"):
        learn_from_record(configure(folder, *replaying, f"model.path={tmp_path}/another"), lambda *_: None)


def dumping_to(path: Path, form: str) -> list[str]:
    return ["debug.dump_rollout_data=true", f"debug.path={path}", f"debug.format={form}"]


def replaying_from(path: Path) -> list[str]:
    return ["debug.replay_rollout_data=true", f"debug.path={path}"]


def test_training_goes_on_from_a_later_step_of_another_run(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    """Step 3 has no checkpoint of its own: step 2's is replayed up to it. It ends, and is started again."""
    shutil.rmtree(run.inbox.folder)
    before = everything(run.path)
    replaying = configure(folder, f"root={tmp_path}", "trial=later", *replaying_from(run.path), "debug.first_step=3")
    learn_from_record(replaying, lambda step, summary: None, until=4)
    learn_from_record(replaying, lambda step, summary: None)
    new = RunDirectory(replaying.run_path)
    assert [entry["digests"] for entry in new.steps.index()] == [entry["digests"] for entry in run.steps.index()]
    assert not new.steps.has_data(2) and new.steps.has_data(3)
    assert everything(run.path) == before and not run.inbox.folder.exists()


def test_a_beginning_from_a_later_step_that_was_killed_begins_again(
    run: RunDirectory, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End it before its own first checkpoint. The same command goes on; one with an earlier step is refused."""
    replaying = [f"root={tmp_path}", "trial=later", *replaying_from(run.path)]
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("clew.loop.branch.save_checkpoint", interrupted)
        learn_from_record(configure(folder, *replaying, "debug.first_step=3"), lambda step, summary: None)
    new = RunDirectory(tmp_path / "e" / "later")
    assert new.steps.count() == 3 and new.checkpointed() == [0]
    with pytest.raises(RecordError, match="has steps or checkpoints already"):
        learn_from_record(configure(folder, *replaying, "debug.first_step=2"), lambda step, summary: None)
    learn_from_record(configure(folder, *replaying, "debug.first_step=3"), lambda step, summary: None)
    assert [entry["digests"] for entry in new.steps.index()] == [entry["digests"] for entry in run.steps.index()]


def test_a_checkpoint_after_steps_that_agreed_within_a_tolerance_is_not_called_altered(run: RunDirectory) -> None:
    """Resume on other ranks or a GPU trains recorded steps again, and may save what it then has."""
    engine = engine_at(run, 4)
    with torch.no_grad():
        next(parameter for _, parameter in engine.trained_parameters()).view(-1)[0] += 1e-6
    engine.restored(engine.version, engine.recent_norms)  # its digests are computed anew
    for drifted in (True, False):
        shutil.rmtree(run.checkpoint(4))
        engine.drifted = drifted
        save_checkpoint(run, engine)
        if drifted:
            assert engine_at(run, 4).drifted
            assert not any(done.differences for done in replay(run, engine_at(run, 2), 3))
        else:
            with pytest.raises(RecordError, match="step-000004 is not what step 3 left"):
                engine_at(run, 4)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_later_step_needs_a_run_directory(folder: Path, original: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    shutil.copytree(original / "steps", copies)
    with pytest.raises(RecordError, match=r"debug.first_step=3 begins with .* is no run directory"):
        replaying = configure(folder, f"root={tmp_path}", *replaying_from(copies), "debug.first_step=3")
        learn_from_record(replaying, lambda step, summary: None)
    with pytest.raises(ConfigError, match=r"debug.first_step needs debug.replay_rollout_data=true"):
        configure(folder, "debug.first_step=3")


def test_dump_and_replay_exclude_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"dump_rollout_data and debug\.replay_rollout_data are both set"):
        configure(folder, "debug.dump_rollout_data=true", "debug.replay_rollout_data=true", "debug.path=x")
    with pytest.raises(ConfigError, match=r"debug\.path is missing"):
        configure(folder, "debug.dump_rollout_data=true")


def test_a_named_pipe_in_the_place_of_a_checkpoints_tensors_is_told(run: RunDirectory) -> None:
    for step in (0, 2):  # the one that replay begins at, and one that it compares
        path = run.checkpoints / f"step-{step:06d}" / "trainer" / "state.safetensors"
        path.rename(run.path / "aside")
        os.mkfifo(path)
        with pytest.raises(RecordError, match=rf"step-{step:06d} was altered .*: trainer/state.safetensors is no file"):
            again(run, "0:3")
        path.unlink()
        (run.path / "aside").rename(path)


@pytest.mark.parametrize(("now", "same"), [(1e-9, True), (5e-9, False), (0.0, False)])
def test_small_rewards_are_compared_too(now: float, same: bool) -> None:
    assert reward_replay._same({"reward": 1e-9}, {"reward": now}) == same


def test_two_metrics_that_are_not_numbers_agree() -> None:
    assert not differs(math.nan, math.nan)
    assert differs(math.nan, 1.0) and differs(None, 1.0)
