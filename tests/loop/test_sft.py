"""`clew sft`, as a process that is killed, and its refusals."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from clew import config as configuration
from clew.diagnose.blame import blame
from clew.diagnose.diff import diff
from clew.diagnose.rerun import Options, rerun
from clew.errors import ConfigError, DataError, RecordError
from clew.loop.differences import DifferenceFound
from clew.loop.replay import engine_at, replay
from clew.loop.sft import sft
from clew.loop.trainer_process import learn
from clew.models.loading import load_tokenizer
from clew.record import chain
from clew.record.batch_digest import digest_batch, digest_rows
from clew.record.rows import to_table
from clew.record.run import RunDirectory
from clew.training.demonstrations import Demonstrations
from clew.training.optimizer import GradientError
from clew.view.show import show
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_config

PROGRAM = """
import sys
from clew import config
from clew.loop.sft import sft
from clew.view.show import show
sft(config.load(sys.argv[1], sys.argv[2:]))
"""


@pytest.fixture
def settings(tmp_path):
    """A configuration that learns to copy, as keywords of make_config."""
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model", scale=0.05)
    rows = [{"prompt": f"{i:02d}>", "completion": f"{i:02d}"} for i in range(50)]
    write_rows(tmp_path / "data.jsonl", rows)
    return {
        "model": tmp_path / "model",
        "root": str(tmp_path / "runs"),
        "data": {"path": str(tmp_path / "data.jsonl")},
        "training": {"steps": 30, "batch_size": 8, "lr": 1e-2, "warmup_steps": 3},
        "checkpoint": {"every_steps": 4},
        "launch": {"threads": 1},
    }


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def weights(config):
    return AutoModelForCausalLM.from_pretrained(config.run_path / "checkpoints" / "latest").state_dict()


def test_it_learns_and_says_where_the_model_is(settings, capsys):
    config = make_config(**settings)
    sft(config)
    said = capsys.readouterr().out
    last = float(said.split("step 30/30  loss ")[1].split()[0])
    assert last < 2.0 < np.log(100)
    assert f"The model: {config.run_path}/checkpoints/latest" in said
    assert (config.run_path / "checkpoints" / "latest").readlink().name == "step-000030"
    assert configuration.load(config.run_path / "config.yaml") == config
    sft(config)
    assert "Going on from" in capsys.readouterr().out


def test_batches_of_another_size_would_skip_or_repeat_rows(settings):
    settings["training"]["steps"] = 2
    sft(make_config(**settings))
    settings["training"] |= {"steps": 4, "batch_size": 2}
    with pytest.raises(ConfigError, match=r"with batches of another size: training\.batch_size 8 -> 2\."):
        sft(make_config(**settings))


@pytest.mark.slow
def test_the_held_out_loss_is_recorded_and_its_best_checkpoint_kept(settings, tmp_path, capsys):
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": f"{i:02d}>", "completion": f"{i:02d}"} for i in range(50, 60)])
    settings["eval"] = {"path": str(tmp_path / "held_out.jsonl"), "every_steps": 4}
    settings["training"] |= {"steps": 12}
    config = make_config(**settings)
    sft(config)
    run = RunDirectory(config.run_path)
    losses = {each["version"]: each["loss"] for each in run.evals.read_all()}
    assert list(losses) == [0, 4, 8, 12] and losses[12] < losses[0]
    said = capsys.readouterr().out
    assert f"held-out loss of version 12: {losses[12]:.4f} nats a token (10 rows)" in said
    best = min(losses, key=lambda version: losses[version])
    assert (run.checkpoints / "best").readlink().name == f"step-{best:06d}"
    other = f"  Best evaluation: {run.checkpoints}/best (step-{best:06d})" if best != 12 else ""
    assert f"12 steps are trained. The model: {run.checkpoints}/latest{other}\n" in said
    model = AutoModelForCausalLM.from_pretrained(run.checkpoints / "latest").double()
    tokenizer, total, count = load_tokenizer(str(settings["model"])), 0.0, 0
    for row in range(50, 60):  # as transformers computes it, row by row
        prompt = tokenizer(f"{row:02d}>")["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(f"{row:02d}", add_special_tokens=False)["input_ids"],
                             tokenizer.eos_token_id]])  # fmt: skip
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        total, count = total - float(logprobs.detach().sum()), count + len(logprobs)
    assert losses[12] == pytest.approx(total / count, rel=1e-5)
    show(run.path, console=Console(width=160))
    shown = capsys.readouterr().out
    assert "evaluation of" in shown and f"{losses[12]:.4f}" in shown


def test_held_out_rows_of_preferences_are_refused(settings):
    with pytest.raises(ValueError, match=r"training\.objective=dpo has no held-out loss"):
        make_config(**settings | {"eval": {"path": "x.jsonl"}, "training": {"objective": "dpo"}})


@pytest.mark.slow
def test_killed_anywhere_it_ends_in_the_same_weights(settings, tmp_path):
    whole = make_config(**settings)
    killed = make_config(**settings | {"root": str(tmp_path / "killed")})
    sft(whole)
    (tmp_path / "killed.yaml").write_text(configuration.dump(killed))
    checkpoints = killed.run_path / "checkpoints"
    kills = 0
    for already in (1, 3):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "killed.yaml")])
        while process.poll() is None and len(list(checkpoints.glob("step-*"))) < already:
            time.sleep(0.002)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 1
    sft(killed)
    one, two = weights(whole), weights(killed)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_second_trainer_is_refused(settings):
    config = make_config(**settings)
    with RunDirectory(config.run_path).hold("trainer"), pytest.raises(RecordError, match="another trainer"):
        sft(config)


def test_fewer_steps_than_were_done(settings):
    sft(make_config(**settings))
    fewer = settings | {"training": settings["training"] | {"steps": 10}}
    with pytest.raises(RecordError, match=r"has done 30 steps, but training\.steps is 10"):
        sft(make_config(**fewer))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([{"prompt": "1", "answer": "2"}], "row 1 has no column 'completion'; it has 'prompt', 'answer'"),
        ([{"prompt": "1", "completion": "2" * 300}], "row 1 has 302 tokens, 301 of them to train on"),
        ([{"prompt": "", "completion": ""}], "row 1 is empty: there is no token to predict"),
        ([{"prompt": 7, "completion": "2"}], "row 1: 'prompt' is int; expected text"),
        ([{"prompt": "1", "completion": 2}], "row 1: 'completion' is int; expected text"),
        (
            [{"prompt": "1", "completion": "2"}, {"prompt": [{"role": "user", "content": "1"}]}],
            "row 2: 'prompt': no message has the role assistant",
        ),
    ],
)
def test_bad_data_is_named_and_leaves_no_run_directory(settings, rows, message):
    config = make_config(**settings)
    write_rows(Path(config.data.path), rows)
    with pytest.raises(DataError, match=message):
        sft(config)
    assert not config.run_path.exists()


def test_tokens_of_text_and_of_chat(settings, tmp_path):
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    rows = [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": "2<eos>"},
        {"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"},
        {"prompt": [{"role": "user", "content": "1+1="}], "completion": [{"role": "assistant", "content": "2"}]},
    ]
    write_rows(tmp_path / "data.jsonl", rows)
    batch = Demonstrations(make_config(**settings), tokenizer, context=20).batch(0)
    seen = set()
    for each in batch:
        assert tokenizer.decode(each.input_ids[each.loss_mask]) == "2<eos>"
        seen.add((str(each.data), tokenizer.decode(each.input_ids[~each.loss_mask])))
    chat = "<|user|>1+1=<|assistant|>"
    assert seen == {(str(row), "1+1=" if isinstance(row["prompt"], str) else chat) for row in rows}


def test_every_row_comes_once_an_epoch(settings, tmp_path):
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    demonstrations = Demonstrations(make_config(**settings), tokenizer, context=None)
    batch = [each for step in range(25) for each in demonstrations.batch(step)]
    names = [each.data["prompt"] for each in batch]
    assert len({each.id for each in batch}) == len(batch)
    assert len(set(names[:50])) == len(set(names[50:100])) == 50
    assert names[:50] != names[50:100]


@pytest.fixture
def short(settings):
    """A configuration of seven steps with checkpoints at 0, 4 and 7."""
    return settings | {"training": settings["training"] | {"steps": 7}}


def test_each_step_is_on_record(short):
    config = make_config(**short)
    sft(config)
    run = RunDirectory(config.run_path)
    assert run.supervised and run.steps.count() == 7 and list(chain.breaks(run)) == []
    batch, said = run.steps.read_data(3), run.steps.read(3)
    assert said["groups"] == [f"g{index:06d}" for index in range(24, 32)] and said["versions"] == [-1, -1]
    assert said["digests"]["data"] == digest_batch(digest_rows(batch))
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    tokenizer = load_tokenizer(config.model.path)
    for row in batch:
        assert row.data in rows and math.isnan(row.reward)
        assert tokenizer.decode(row.input_ids) == f"{row.data['prompt']}{row.data['completion']}<eos>"
        assert row.loss_mask.tolist() == [False] * 3 + [True] * 3
    stages = run.steps.read_stages(3, batch)
    losses = np.concatenate([stages.arrays["loss"][row.id][row.loss_mask] for row in batch])
    assert said["metrics"]["loss"] == pytest.approx(losses.mean(), rel=1e-6)


@pytest.mark.parametrize("objective", ["sft", "dpo", "reward_model"])
def test_its_steps_are_replayed_bit_for_bit(short, tmp_path, objective):
    pairs = [{"prompt": f"{i:02d}>", "completion": f"{i:02d}", "rejected": f"{i}?"} for i in range(50)]
    write_rows(tmp_path / "data.jsonl", pairs)
    short["training"]["objective"] = objective
    config = make_config(**short)
    sft(config)
    run = RunDirectory(config.run_path)
    for first in (2, 5):
        engine = engine_at(run, first)
        again = list(replay(run, engine, 6))
        assert [each.step for each in again] == list(range(0 if first == 2 else 4, 7))
        assert all(each.tolerance.exact and each.differences == [] for each in again)


def test_a_changed_row_and_a_changed_setting_are_found(short):
    config = make_config(**short)
    sft(config)
    run = RunDirectory(config.run_path)
    batch = run.steps.read_data(1)
    batch[2].input_ids[4] += 1
    kept = run.steps.data_path(1).read_bytes()
    run.steps.write_data(1, to_table(batch))
    with pytest.raises(DifferenceFound, match=rf"step 1, data: {batch[2].id}"):
        list(replay(run, engine_at(run, 0), 6))
    run.steps.data_path(1).write_bytes(kept)
    said = json.loads(run.steps.json_path(0).read_text())
    said["config"]["training"]["lr"] *= 2
    run.steps.json_path(0).write_text(json.dumps(said))
    first = next(iter(replay(run, engine_at(run, 0), 6)))
    assert [each.stage for each in first.differences] == ["update"]


def test_the_commands_know_it(short, capsys):
    config = make_config(**short)
    sft(config)
    path = config.run_path
    other = make_config(**short | {"trial": "other", "training": short["training"] | {"lr": 2e-2}})
    sft(other)
    capsys.readouterr()
    assert rerun(path, Options(steps="3"))
    assert "step 3: every stage agrees with the record" in capsys.readouterr().out
    rerun(path, Options(steps="3", overrides=["training.lr=0.5"]))
    again = RunDirectory(path.with_name("0-replay-1"))
    assert again.supervised and again.steps.read(3)["config"]["training"]["lr"] == 0.5
    capsys.readouterr()
    diff(path, other.run_path, ignore=[], plot=None)
    assert "FIRST DIFFERENCE  step 0, update" in capsys.readouterr().out
    for what, shown in ((None, "7 committed of 7"), ("3", "g000024"), ("g000024", "consumed by step 3")):
        show(path, what, console=Console(width=160))
        said = capsys.readouterr().out
        assert shown in said and " nan" not in said and " -1" not in said
        if what is None:
            assert ["step", "groups", "tokens", "grad", "norm", "loss", "seconds"] in map(str.split, said.splitlines())
            assert not {"-", "reward", "inbox,", "judged:"} & set(said.split())
    with pytest.raises(RecordError, match="is a run of `clew sft`, and blame compares"):
        blame(path, 3, top=1, tokens=1, by=None)
    with pytest.raises(RecordError, match="is a run of `clew sft`: it has no rewards"):
        rerun(path, Options(steps="3", stages="advantages"))
    with pytest.raises(RecordError, match="where only --break update works"):
        rerun(path, Options(steps="3", stop="loss"))


@pytest.mark.parametrize("first", [True, False])
def test_a_failed_step_is_trained_again_on_its_demonstrations(settings, first):
    settings["training"] |= {"warmup_steps": 0, "lr": 1e-6, "spike_factor": 1.0001}
    config = make_config(**settings)
    if first:
        weights = load_file(f"{config.model.path}/model.safetensors")
        weights["model.norm.weight"][:] = math.inf
        save_file(weights, f"{config.model.path}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GradientError, match=r"not made\. Its rows are in steps/step-0000..\.parquet\. With training\."):
        sft(config)
    run = RunDirectory(config.run_path)
    failed = run.steps.count()
    assert (failed == 0) == first and run.steps.has_data(failed) and run.supervised
    with pytest.raises(GradientError, match="Its rows are in"):
        rerun(run.path, Options(steps=str(failed)))
    with pytest.raises(RecordError, match=rf"is a run of `clew sft`.* The rows are in .*step-{failed:06d}\.parquet"):
        blame(run.path, failed, top=1, tokens=1, by=None)


def test_old_batches_are_removed_as_configured(short):
    config = make_config(**short | {"record": {"keep_steps": 2}})
    sft(config)
    steps = RunDirectory(config.run_path).steps
    # Steps after the second newest checkpoint stay, as for `clew train`.
    assert [step for step in range(7) if steps.has_data(step)] == [4, 5, 6]
    assert steps.count() == 7


def test_other_settings_wait_for_a_checkpoint(short):
    config = make_config(**short)
    sft(config)
    shutil.rmtree(config.run_path / "checkpoints" / "step-000007")
    more = {"steps": 9, "schedule": "constant", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"steps 4 to 6 .* must be trained again after the last checkpoint"):
        sft(make_config(**short | {"training": short["training"] | more}))
    with pytest.raises(RecordError, match="holds a run of `clew sft`"):
        learn(config)
