"""`clew sft`, as a process that is killed, and its refusals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from clew import config as configuration
from clew.errors import DataError, RecordError
from clew.models.loading import load_tokenizer
from clew.record.run import RunDirectory
from clew.training import checkpoint
from clew.training.demonstrations import Demonstrations
from clew.training.sft import sft
from clew.view.show import show
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_config

PROGRAM = """
import sys
from clew import config
from clew.training.sft import sft
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


@pytest.mark.slow
def test_the_held_out_loss_is_recorded_and_its_best_checkpoint_kept(settings, tmp_path, capsys):
    write_rows(tmp_path / "held_out.jsonl", [{"prompt": f"{i:02d}>", "completion": f"{i:02d}"} for i in range(50, 60)])
    settings["eval"] = {"path": str(tmp_path / "held_out.jsonl"), "every_steps": 4}
    settings["training"] |= {"steps": 12}
    config = make_config(**settings)
    sft(config)
    run = RunDirectory(config.run_path)
    losses = {each["version"]: each["loss"] for each in run.read_evals()}
    assert list(losses) == [0, 4, 8, 12] and losses[12] < losses[0]
    said = capsys.readouterr().out
    assert f"held-out loss of version 12: {losses[12]:.4f} nats a token (10 rows)" in said
    best = min(losses, key=lambda version: losses[version])
    assert (run.checkpoints / "best").readlink().name == f"step-{best:06d}"
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
    with pytest.raises(RecordError, match=r"30 steps behind it, but training\.steps is 10"):
        sft(make_config(**fewer))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([{"prompt": "1", "answer": "2"}], "row 1 has no column 'completion'; it has 'prompt', 'answer'"),
        ([{"prompt": "1", "completion": "2" * 300}], "row 1 has 302 tokens, 301 of them to train on"),
        ([{"prompt": 7, "completion": "2"}], "row 1: 'prompt' is int; expected text"),
        ([{"prompt": "1", "completion": 2}], "row 1: 'completion' is int; expected text"),
    ],
)
def test_bad_data_is_named(settings, rows, message):
    config = make_config(**settings)
    write_rows(Path(config.data.path), rows)
    with pytest.raises(DataError, match=message):
        sft(config)
    assert checkpoint.saved(config.run_path / "checkpoints") == []


def test_tokens_of_text_and_of_chat(settings, tmp_path):
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    write_rows(
        tmp_path / "data.jsonl",
        [
            {"prompt": "1+1=", "completion": "2"},
            {"prompt": [{"role": "user", "content": "1+1="}], "completion": "2"},
            {"prompt": [{"role": "user", "content": "1+1="}], "completion": [{"role": "assistant", "content": "2"}]},
        ],
    )
    batch = Demonstrations(make_config(**settings), tokenizer, context=20).batch(0)
    seen = set()
    for row, ids, mask in zip(batch.ids, batch.split(batch.input_ids_S), batch.split(batch.loss_mask_S), strict=True):
        assert tokenizer.decode(ids[mask]) == "2<eos>"
        seen.add((row, tokenizer.decode(ids[~mask])))
    chat = "<|user|>1+1=<|assistant|>"
    assert seen == {("row 1", "1+1="), ("row 2", chat), ("row 3", chat)}


def test_every_row_comes_once_an_epoch(settings, tmp_path):
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    demonstrations = Demonstrations(make_config(**settings), tokenizer, context=None)
    names = [name for step in range(25) for name in demonstrations.batch(step).ids]
    assert len(set(names[:50])) == len(set(names[50:100])) == 50
    assert names[:50] != names[50:100]
