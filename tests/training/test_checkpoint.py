"""Checkpoints: what comes back is what was there, bit for bit, or an error that says what was altered."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from clew.errors import ModelError, RecordError
from clew.record.files import remove_strays, write_json
from clew.record.run import RunDirectory
from clew.training import checkpoint
from clew.training.engine import TrainEngine
from clew.training.optimizer import MOMENTS
from tests.models import tiny_model, tiny_tokenizer
from tests.training.sequences import make_batch, make_config


def make_engine(folder, family="qwen2", *, tie=True, hidden=32, dtype="float32"):
    if not folder.exists():
        tiny_tokenizer(folder)
        tiny_model(folder, family, tie=tie, hidden=hidden)
    return TrainEngine(make_config(folder, dtype=dtype, algorithm={"minibatches": 2}))


def train(engine, seeds):
    return [engine.train_step(make_batch(seed=seed)).digests for seed in seeds]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_bit_for_bit(tmp_path, family, tie, dtype):
    engine = make_engine(tmp_path / "model", family, tie=tie, dtype=dtype)
    train(engine, range(3))
    checkpoint.save(engine, tmp_path / "step-000003")
    ahead = train(engine, range(3, 5))

    again = make_engine(tmp_path / "model", dtype=dtype)
    checkpoint.load(again, tmp_path / "step-000003")
    assert (again.version, again.optimizer.updates) == (3, 6)
    assert train(again, range(3, 5)) == ahead
    assert again.optimizer.lr == engine.optimizer.lr


def test_a_checkpoint_from_before_the_first_step(tmp_path):
    engine = make_engine(tmp_path / "model")
    checkpoint.save(engine, tmp_path / "step-000000")
    ahead = train(engine, range(2))
    checkpoint.load(engine, tmp_path / "step-000000")  # back in time, over moments that exist
    assert engine.version == 0 and train(engine, range(2)) == ahead


def test_transformers_reads_it(tmp_path):
    engine = make_engine(tmp_path / "model")
    train(engine, [0])
    checkpoint.save(engine, tmp_path / "step-000001")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step-000001")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step-000001")
    name = "model.embed_tokens.weight"
    assert torch.equal(model.get_parameter(name), engine.policy.model.get_parameter(name))
    assert tokenizer.decode(tokenizer("1+1=")["input_ids"]) == "1+1="


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/state.safetensors"])
@pytest.mark.parametrize("how", ["flip a bit", "truncate", "remove"])
def test_an_altered_file_is_found_and_the_engine_untouched(tmp_path, name, how):
    engine = make_engine(tmp_path / "model")
    train(engine, [0])
    checkpoint.save(engine, tmp_path / "step-000001")
    file = tmp_path / "step-000001" / name
    content = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
    elif how == "truncate":
        file.write_bytes(content[:-100])
    else:
        content[-50] ^= 1
        file.write_bytes(content)
    again = make_engine(tmp_path / "model")
    before = again.weights_digest()
    with pytest.raises(RecordError, match="step-000001 was altered"):
        checkpoint.load(again, tmp_path / "step-000001")
    again.restored(0)
    assert again.weights_digest() == before


@pytest.mark.parametrize(("dtype", "kinds"), [("float32", MOMENTS), ("bfloat16", ("master",))])
def test_tensors_that_were_removed_from_the_state_are_missed(tmp_path, dtype, kinds):
    engine = make_engine(tmp_path / "model", dtype=dtype)
    train(engine, [0])
    folder = tmp_path / "step-000001"
    checkpoint.save(engine, folder)
    removed = {f"model.norm.weight.{kind}" for kind in kinds}
    state = load_file(folder / checkpoint.STATE)
    save_file({name: state[name] for name in state.keys() - removed}, folder / checkpoint.STATE)
    for look in (lambda: checkpoint.check(folder, engine), lambda: checkpoint.load(engine, folder)):
        with pytest.raises(RecordError, match=rf"{min(removed)} is missing in trainer/state.safetensors"):
            look()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_an_altered_file_without_tensors_is_found(tmp_path, name):
    engine = make_engine(tmp_path / "model")
    folder = tmp_path / "step-000000"
    checkpoint.save(engine, folder)
    content = (folder / name).read_text()
    (folder / name).write_text(content + " ")
    for look in (lambda: checkpoint.check(folder, engine), lambda: checkpoint.load(engine, folder)):
        with pytest.raises(
            RecordError, match=rf"step-000000 was altered .*: {name} has the digest \w+; checkpoint.json says"
        ):
            look()
    (folder / name).write_text(content)
    (folder / "README.md").write_text("somebody's own")
    before = (folder / "checkpoint.json").stat().st_mtime_ns
    checkpoint.save(engine, folder)
    assert (folder / "checkpoint.json").stat().st_mtime_ns == before  # the same: left as it is
    checkpoint.load(engine, folder)
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(RecordError, match=r"added_tokens.json is not among the files that it was saved with"):
        checkpoint.load(engine, folder)
    (folder / "added_tokens.json").unlink()
    said = json.loads((folder / "checkpoint.json").read_text())
    for newer in ("files", "seal", "follows"):
        del said[newer]
    (folder / "checkpoint.json").write_text(json.dumps(said))
    (folder / name).write_text(content + " ")
    checkpoint.load(engine, folder)


@pytest.mark.parametrize(("number", "value"), [("updates", 9), ("recent_norms", [1.0] * 9), ("dtype", "bfloat16")])
def test_an_altered_checkpoint_json_is_found_by_whoever_reads_the_digests(tmp_path, number, value):
    engine = make_engine(tmp_path / "model")
    train(engine, [0])
    folder = tmp_path / "step-000001"
    checkpoint.save(engine, folder)
    said = json.loads((folder / "checkpoint.json").read_text()) | {number: value}
    (folder / "checkpoint.json").write_text(json.dumps(said))
    with pytest.raises(RecordError, match=r"step-000001 was altered .* the seal of checkpoint.json does not match"):
        checkpoint.digests_in(folder, engine)


def test_another_model_is_named_by_its_first_parameter(tmp_path):
    checkpoint.save(make_engine(tmp_path / "small"), tmp_path / "step-000000")
    wide = make_engine(tmp_path / "wide", hidden=64)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is \d+x32 in the checkpoint and \d+x64 in this"):
        checkpoint.load(wide, tmp_path / "step-000000")
    other = make_engine(tmp_path / "other", "gpt2")
    with pytest.raises(ModelError, match=r"transformer\.wte\.weight is absent in the checkpoint"):
        checkpoint.load(other, tmp_path / "step-000000")
    half = make_engine(tmp_path / "small", dtype="bfloat16")
    with pytest.raises(ModelError, match=r"model\.dtype=float32, this run has bfloat16"):
        checkpoint.load(half, tmp_path / "step-000000")


def test_a_newer_format_and_no_checkpoint(tmp_path):
    engine = make_engine(tmp_path / "model")
    with pytest.raises(RecordError, match="it is not a checkpoint"):
        checkpoint.load(engine, tmp_path / "step-000009")
    folder = tmp_path / "step-000000"
    checkpoint.save(engine, folder)
    said = json.loads((folder / "checkpoint.json").read_text()) | {"format": 99}
    (folder / "checkpoint.json").write_text(json.dumps(said))
    with pytest.raises(RecordError, match="format 99"):
        checkpoint.load(engine, folder)
    del said["dtype"], said["seal"]
    (folder / "checkpoint.json").write_text(json.dumps(said | {"format": 1}))
    with pytest.raises(RecordError, match="dtype"):
        checkpoint.load(engine, folder)


def test_pruning_keeps_the_first_and_the_last(tmp_path):
    engine = make_engine(tmp_path / "model")
    for version in range(5):
        engine.restored(version)
        checkpoint.save(engine, tmp_path / "checkpoints" / f"step-{version:06d}")
    run, two = RunDirectory(tmp_path), make_config("unused", checkpoint={"keep": 2}).checkpoint
    checkpoint.prune(run, two)
    assert run.checkpointed() == [0, 3, 4]
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-000004"
    assert run.checkpointed()[-1] == 4
    assert list((tmp_path / "checkpoints").glob(".*")) == []
    (tmp_path / "checkpoints" / ".step-000005.123").mkdir()  # what a killed process leaves
    assert run.checkpointed()[-1] == 4
    remove_strays(tmp_path / "checkpoints", "*")
    assert list((tmp_path / "checkpoints").glob(".*")) == []
    shutil.copytree(tmp_path / "checkpoints" / "step-000003", tmp_path / "checkpoints" / "step-000003-copy")
    checkpoint.prune(run, two)
    assert run.checkpointed() == [0, 3, 4]
    assert (tmp_path / "checkpoints" / "step-000003-copy").exists()


def test_what_is_due():
    config = make_config("unused", training={"steps": 25}, checkpoint={"every_steps": 10})
    assert [version for version in range(26) if checkpoint.is_due(version, config)] == [0, 10, 20, 25]


def test_the_best_evaluated_checkpoint_is_never_pruned(tmp_path):
    config = make_config("unused", checkpoint={"keep": 2})
    run = RunDirectory(tmp_path / "run")
    scores = {0: 0.1, 2: 0.5, 3: 0.9, 4: 0.7, 6: 0.7, 8: None, 10: 0.6}  # 3 was evaluated, but not saved
    for version in (0, 2, 4, 6, 8, 10):
        (run.checkpoints / f"step-{version:06d}").mkdir()
        write_json(run.checkpoints / f"step-{version:06d}" / "checkpoint.json", {})
    for version, score in scores.items():
        run.evals.write(version, [], {"pass@1": score, "reward": score})
    checkpoint.prune(run, config.checkpoint)
    assert run.checkpointed() == [0, 4, 8, 10]
    assert (run.checkpoints / "best").readlink() == Path("step-000004")
    checkpoint.point("latest", run.checkpoints / "step-000010")
    assert run.best_in_words() == f"  Best evaluation: {run.checkpoints}/best (step-000004)"
    run.evals.write(10, [], {"pass@1": 0.7, "reward": 0.8})
    checkpoint.prune(run, config.checkpoint)
    assert (run.checkpoints / "best").readlink() == Path("step-000010") and run.best_in_words() == ""
    assert run.checkpointed() == [0, 8, 10]


def test_keep_best_can_be_turned_off(tmp_path):
    config = make_config("unused", checkpoint={"keep": 1, "keep_best": False})
    run = RunDirectory(tmp_path / "run")
    for version in (0, 2, 4):
        (run.checkpoints / f"step-{version:06d}").mkdir()
        write_json(run.checkpoints / f"step-{version:06d}" / "checkpoint.json", {})
        run.evals.write(version, [], {"pass@1": 1.0 - version / 10, "reward": 0.0})
    checkpoint.prune(run, config.checkpoint)
    assert run.checkpointed() == [0, 4]
    assert not (run.checkpoints / "best").exists() and run.best_in_words() == ""
    checkpoint.point("best", run.checkpoints / "step-000002")  # of a run that had it on before
    checkpoint.prune(run, config.checkpoint)
    assert not (run.checkpoints / "best").is_symlink() and run.best_in_words() == ""


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_called_altered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer(tmp_path / "model")
    tiny_model(tmp_path / "model")
    engine = TrainEngine(make_config(tmp_path / "model"))
    checkpoint.save(engine, tmp_path / "step-000000")

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("Cannot allocate memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_memory)
    with pytest.raises(RecordError, match="Cannot read checkpoint") as found:
        checkpoint.load(engine, tmp_path / "step-000000")
    assert "emove" not in str(found.value)
