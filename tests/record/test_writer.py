"""Run directory of another trainer: what `Writer` fills in and refuses, and that it continues after a restart."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clew.cli.record import bundle
from clew.errors import RecordError
from clew.loop.step_summary import summarize
from clew.record import Writer, rows
from clew.record.batch_digest import digest_batch, digest_rows
from clew.record.run import RunDirectory, open_run
from clew.record.weights import WeightRef
from clew.record.writer import complete
from clew.training.engine import TrainEngine
from clew.view.learning_curve import draw_learning_curve
from tests.models import tiny_model, tiny_tokenizer
from tests.record.test_rows import a_sequence
from tests.training.sequences import make_batch, make_config


def given(group: str = "g000000", **changes: Any) -> dict[str, Any]:
    """Return the columns that `Writer` needs, with these changes."""
    values = {
        "group_id": group,
        "input_ids": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0, 0, -0.5, -1.5],
        "reward": 1.0,
    }
    return {**values, **changes}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_what_is_not_known_is_filled_in(path: Path) -> None:
    with Writer(path) as writer:
        assert writer.step([given(), given()]) == 0
        assert (
            writer.step([given("g000001"), given("g000001"), given("mine")], metrics={"loss": 0.5, "none": None}) == 1
        )
    run = open_run(path)
    first, _, other = run.steps.read_data(1)
    assert (first.id, first.group_id, first.episode_id) == ("g000001.e0.s0", "g000001", "g000001.e0")
    assert other.id == "mine.e0.s0"
    assert first.versions.tolist() == [-1, -1, 1, 1] and first.admitted_version == 1
    assert first.turn_ids.tolist() == [-1, -1, 0, 0]
    assert first.temperatures.tolist() == [1, 1, 1, 1]
    assert first.rewards == {"reward": 1.0} and first.finish_reason == "" and first.error is None
    assert first.data == {} and first.interactions == [] and first.consumed_at is not None
    summary = run.steps.read(1)
    assert summary["groups"] == ["g000001", "mine"] and summary["versions"] == [1, 1]
    assert summary["metrics"] == {"loss": 0.5} and summary["plan"] == [] and summary["timings"] == {}
    assert summary["digests"] == {"data": digest_batch(digest_rows(run.steps.read_data(1)))}
    assert run.steps.read_stages(1).arrays == {}


def test_a_reward_need_not_be_the_sum_of_its_parts(path: Path) -> None:
    with Writer(path) as writer:
        writer.step([given(reward=0.7, rewards={"exact": 1.0, "short": 0.4})])
    [row] = open_run(path).steps.read_data(0)
    assert row.reward == 0.7 and row.rewards == {"exact": 1.0, "short": 0.4}


def test_lists_arrays_tensors_and_single_numbers(path: Path) -> None:
    tensors: dict[str, Any] = {
        "input_ids": torch.tensor([5, 6, 7, 8]),
        "loss_mask": torch.tensor([False, False, True, True]),
        "logprobs": torch.tensor([0, 0, -0.5, -1.5], dtype=torch.bfloat16, requires_grad=True),
        "reward": torch.tensor(1.0),
    }
    with Writer(path, {"lr": 1e-6, "dtype": torch.bfloat16}) as writer:
        writer.step(
            [given(), given(**tensors), given(versions=7, temperatures=0.5, logprobs=np.array([0, 0, -0.5, -1.5]))],
            stages={"advantages": [1.5, [0, 0, -1, -1], torch.tensor([0, 0, 2.0, 3.0], requires_grad=True)]},
        )
    run = open_run(path)
    plain, tensor, single = run.steps.read_data(0)
    for row in (tensor, single):
        for name in ("input_ids", "loss_mask", "logprobs", "turn_ids"):
            assert np.array_equal(getattr(row, name), getattr(plain, name)), name
            assert getattr(row, name).dtype == rows.ALIGNED[name]
    assert single.versions.tolist() == [-1, -1, 7, 7] and single.temperatures.tolist() == [1, 1, 0.5, 0.5]
    assert run.steps.read(0)["versions"] == [0, 7]
    advantages = [values.tolist() for values in run.steps.read_stages(0).arrays["advantages"].values()]
    assert advantages == [[0, 0, 1.5, 1.5], [0, 0, -1, -1], [0, 0, 2, 3]]
    assert run.config_path.read_text() == "lr: 1.0e-06\ndtype: torch.bfloat16\n"


def test_it_goes_on_where_a_killed_trainer_was(path: Path) -> None:
    with Writer(path, {"lr": 1}, trainer="mine") as writer:
        assert writer.new_groups(2) == ["g000000", "g000001"]
        writer.step([given("g000000"), given("g000001")])
        created = writer.run.facts()["created"]
    run = open_run(path)
    run.steps.write_data(1, rows.to_table([a_sequence("g000009.e0.s0")]))  # killed between data and JSON
    run.steps.index_path.write_text('{"step"')  # and in the middle of a line of the index
    with Writer(path, trainer="mine") as writer:
        assert writer.new_groups(1) == ["g000002"]
        assert writer.step([given("g000002")]) == 1
    assert [entry["groups"] for entry in run.steps.index()] == [["g000000", "g000001"], ["g000002"]]
    assert [row.group_id for row in run.steps.read_data(1)] == ["g000002"]
    assert run.facts()["created"] == created and run.facts()["trainer"] == "mine"
    assert run.config_path.read_text() == "lr: 1\n"


def test_a_step_has_the_keys_of_clews_own(path: Path, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    engine, batch = TrainEngine(make_config(tmp_path / "model")), make_batch(groups=2, samples=2)
    result = engine.train_step(batch)
    with Writer(path) as writer:
        writer.step(batch, stages=result.stages, metrics=result.metrics, timings=result.timings)
        own = summarize(writer.run, batch, digest_rows(batch), result, engine)
    summary = open_run(path).steps.read(0)
    assert summary.keys() == own.keys() | {"clew_format", "step", "chain", "timings"}
    same = ("groups", "versions", "metrics")
    assert {name: summary[name] for name in same} == {name: own[name] for name in same}
    assert summary["digests"]["data"] == own["digests"]["data"]
    stages = open_run(path).steps.read_stages(0).arrays
    assert stages.keys() == result.stages.keys()
    assert np.array_equal(stages["loss"][batch[3].id], result.stages["loss"][3])


def test_readers_of_a_run_read_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(path) as writer:
        for group in writer.new_groups(3):
            writer.step([given(group)], metrics={"reward": 0.5})
    file = path.parent / "small.zip"
    bundle(path, 1, stages_only=True, to=file)
    assert f"`clew replay {file} --stage data` checks it, `clew show {file}` shows" in capsys.readouterr().out
    draw_learning_curve(open_run(path))
    assert (path / "reports" / "learning_curve.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, r"sequence 1 has no logprobs; expected at least group_id, input_ids"),
        ({"prompt": "1+1="}, r"sequence 1 has 'prompt'; the columns are id, .* Put anything else into data"),
        ({"logprobs": [0, -1]}, r"sequence 1 \(g000000\.e1\.s0\): logprobs has the shape \[2\], input_ids 4 tokens"),
        ({"loss_mask": [1, 1, 0, 0]}, r"its first token is in loss_mask, .* was it shifted by one\?"),
        ({"reward": "high"}, r"reward is 'high'; expected a number"),
        ({"rewards": {"exact": [1]}}, r"reward 'exact' is \[1\]; expected a number"),
        ({"id": "g000000.e0.s0"}, r"2 sequences of one step have the ID 'g000000\.e0\.s0'"),
        ({"input_ids": ["a", 6, 7, 8]}, r"input_ids is \['a', 6, 7, 8\]; expected whole numbers of 32 bits"),
        ({"input_ids": [1.7, 6, 7, 8]}, r"input_ids is \[1\.7, 6, 7, 8\]; expected whole numbers of 32 bits"),
        ({"input_ids": [2**40, 6, 7, 8]}, r"input_ids is .*; expected whole numbers of 32 bits"),
        ({"input_ids": [[5, 6, 7, 8]]}, r"input_ids has the shape \[1, 4\]; expected one dimension"),
        ({"loss_mask": [0, 0, 1, 0.5]}, r"loss_mask is \[0, 0, 1, 0\.5\]; expected 0 or 1 for each token"),
        ({"versions": 0.5}, r"versions is 0\.5; expected whole numbers of 32 bits"),
        ({"logprobs": [None, None, -0.1, 0]}, r"logprobs is \[None, None, .*; expected numbers"),
        ({"logprobs": [[0], [0, 1], 0, 0]}, r"logprobs is .*; expected numbers"),
        (
            {"sampling_mask_counts": [0, 0, 1], "sampling_mask_ids": [7]},
            r"sequence 1 \(g000000\.e1\.s0\): the numbers in sampling_mask_counts are not one per token",
        ),
    ],
)
def test_a_sequence_that_cannot_be_meant_is_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    with Writer(path) as writer, pytest.raises(RecordError, match=message):
        writer.step([given(), given(**changes)])
    assert open_run(path).steps.count() == 0 and not open_run(path).steps.has_data(0)


def test_a_step_that_cannot_be_meant_is_refused(path: Path) -> None:
    with Writer(path) as writer:
        with pytest.raises(RecordError, match="step 0 has no sequences"):
            writer.step([])
        with pytest.raises(RecordError, match=r"stage 'loss' has 1 entries; expected one for each of 2 sequences"):
            writer.step([given(), given()], stages={"loss": [0.0]})
        with pytest.raises(RecordError, match=r"g000000\.e0\.s0: stage 'loss' has the shape \[3\], input_ids 4 tokens"):
            writer.step([given()], stages={"loss": [[0.0, 1.0, 2.0]]})
        shifted = a_sequence(length=3, loss_mask=np.array([True, True, False]))
        with pytest.raises(RecordError, match=r"g000001\.e0\.s0\): its first token is in loss_mask"):
            writer.step([shifted])
        with pytest.raises(RecordError, match="metric 'loss' is 'low'; expected a number"):
            writer.step([given()], metrics={"loss": "low"})
        assert writer.step([given()]) == 0


def test_one_writer_a_run_and_none_in_a_run_of_clew_train(path: Path, tmp_path: Path) -> None:
    with Writer(path):
        code = f"from clew.record import Writer; Writer({str(path)!r})"
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "another trainer (pid" in second.stderr
    own = RunDirectory(tmp_path / "own")
    own.announce_weights(WeightRef(version=0, path="weights", digest="00"))
    with pytest.raises(RecordError, match=r"own is a run of Clew, not of another trainer"):
        Writer(own.path)


def test_a_writer_that_could_not_begin_locks_nobody_out(path: Path) -> None:
    with pytest.raises(TypeError) as kept:  # keeps the error with its frames, as a notebook does
        Writer(path, {(1, 2): 3})  # pyright: ignore[reportArgumentType]
    with Writer(path, {"lr": 3}) as writer:
        assert writer.step([given()]) == 0
    assert kept.value


def test_rewards_of_a_sequence_become_plain_numbers(path: Path) -> None:
    [row] = complete([given()], version=0)
    with Writer(path) as writer:
        writer.step([replace(row, rewards={"right": np.float32(1)})])  # pyright: ignore[reportArgumentType]
    assert open_run(path).steps.read_data(0)[0].rewards == {"right": 1.0}


def test_a_run_of_clew_sft_which_announces_no_weights_is_left_as_it_is(path: Path) -> None:
    own = RunDirectory(path)
    own.describe(make_config(path / "model"))
    before = own.run_json.read_bytes(), own.config_path.read_bytes()
    with pytest.raises(RecordError, match=r"is a run of Clew, not of another trainer"):
        Writer(path, {"lr": 1}, trainer="mine")
    assert (own.run_json.read_bytes(), own.config_path.read_bytes()) == before


def test_it_needs_no_torch(path: Path) -> None:
    code = (
        "import sys, clew.record; assert not {'numpy', 'pyarrow', 'pydantic'} & sys.modules.keys()\n"
        f"with clew.record.Writer({str(path)!r}) as writer: writer.step([{given()!r}])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert open_run(path).steps.count() == 1


def test_what_no_reader_could_make_sense_of_is_refused(path: Path) -> None:
    refused: dict[str, tuple[Any, str]] = {
        "data": ([1, 2], r"\[1, 2\]; expected a dict"),
        "finish_reason": (3, "3; expected a str"),
        "interactions": ("hello", "'hello'; expected a list"),
    }
    with Writer(path) as writer:
        for name, (value, said) in refused.items():
            with pytest.raises(RecordError, match=f"sequence 0: {name} is {said}"):
                writer.step([given(**{name: value})])
        for name in ("id", "digest", "origin"):
            with pytest.raises(RecordError, match=f"Cannot name a stage '{name}'"):
                writer.step([given()], stages={name: [0.0]})
        assert writer.step([given(interactions=["hello"])], stages={"advantages": [[5, 5, 1, -1]]}) == 0
    assert writer.run.steps.read_stages(0).arrays["advantages"]["g000000.e0.s0"].tolist() == [0, 0, 1, -1]
