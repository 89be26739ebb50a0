"""Two runs: the first place where they part, and what explains it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from clew.diagnose.diff import diff
from clew.diagnose.rerun import rerun
from clew.errors import ConfigError, RecordError
from clew.record import rows
from clew.record.bundle import write_bundle
from clew.record.run import RunDirectory
from clew.trainer.learn import learn_inline
from tests.diagnose.planted import change_stage, configure, everything, generated_at


@pytest.fixture
def other(run: RunDirectory) -> RunDirectory:
    shutil.copytree(run.path, run.path.parent / "second")
    return RunDirectory(run.path.parent / "second")


def told(capsys: pytest.CaptureFixture[str], a: Path, b: Path, ignore: str = "") -> str:
    """What `clew diff` says of two runs that part."""
    assert not diff(a, b, ignore=[ignore], plot=None)
    return capsys.readouterr().out


def test_a_run_and_its_copy_are_the_same(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = everything(run.path)
    assert diff(run.path, other.path, ignore=[], plot=tmp_path / "drift.png")
    shown = capsys.readouterr().out
    assert "first and second: steps 0 to 5 of both, compared bit for bit" in shown
    assert "every stage of every step agrees" in shown
    assert (tmp_path / "drift.png").read_bytes()[:4] == b"\x89PNG" and everything(run.path) == before
    bundle = write_bundle(run, 3, stages_only=False)
    assert diff(bundle, other.path, ignore=[], plot=None)
    assert "steps 2 to 3 of both" in capsys.readouterr().out


def test_an_altered_advantage(run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    position = generated_at(other, 4, 2)
    name = change_stage(other, 4, "advantages", 2, position, 0.5)
    path = other.steps.json_path(4)  # somebody who trained on it has other gradients, too
    text = path.read_text()
    digest = run.steps.read(4)["digests"]["gradients"][0]
    path.write_text(text.replace(digest, digest[::-1]))
    index = other.steps.index_path
    index.write_text(index.read_text().replace(digest, digest[::-1]))
    shown = told(capsys, run.path, other.path)
    assert f"FIRST DIFFERENCE  step 4, advantages: {name}, token {position}: first " in shown
    assert "what differs was altered, or is not recorded" in shown


@pytest.mark.parametrize("what", ["advantages", "metrics", "rows"])
def test_a_step_whose_digests_agree_is_opened_too(
    run: RunDirectory, other: RunDirectory, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "advantages":
        name = change_stage(other, 2, "advantages", 3, generated_at(other, 2, 3), 0.25)
        said = f"step 2, advantages: {name}, token "
    elif what == "metrics":
        path = other.steps.json_path(2)
        path.write_text(path.read_text().replace('"metrics": {"reward": ', '"metrics": {"reward": 1'))
        said = "step 2, metrics: reward: first 0."
    else:
        batch = other.steps.read_data(2)
        other.steps.write_data(2, rows.to_table([dataclasses.replace(batch[0], reward=9.0), *batch[1:]]))
        said = f"step 2, data: {batch[0].id}, reward: first "
    assert f"FIRST DIFFERENCE  {said}" in told(capsys, run.path, other.path)


def test_another_learning_rate(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"stages": None, "only": None, "stop": None, "reward": False, "device": None}
    assert rerun(run.path, "2:5", overrides=["training.lr=1e-4", "trial=slow"], **options)  # pyright: ignore
    capsys.readouterr()
    shown = told(capsys, run.path, run.path.parent / "slow")
    assert "FIRST DIFFERENCE  step 2, proximal_logprobs" not in shown
    assert "FIRST DIFFERENCE  step 2, logprobs" in shown or "FIRST DIFFERENCE  step 2, update" in shown
    assert "  training.lr: 0.001 → 0.0001" in shown
    for ignore in ("lr", "training.lr", "training"):
        shown = told(capsys, run.path, run.path.parent / "slow", ignore=ignore)
        assert "left out: training.lr\n" in shown and "0.001 → 0.0001" not in shown and "was altered" not in shown
    with pytest.raises(ConfigError, match="--ignore rl: no field of the configuration has this name"):
        diff(run.path, run.path.parent / "slow", ignore=["rl"], plot=None)


def test_another_seed(run: RunDirectory, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(folder, f"root={tmp_path}", "trial=seeded", "seed=2", "training.steps=2")
    learn_inline(config, lambda step, summary: None)
    shown = told(capsys, run.path, config.run_path)
    assert "FIRST DIFFERENCE  step 0, data: g0" in shown and "  seed: 1 → 2" in shown


def test_a_changed_token_of_the_data(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = other.steps.read_data(1)
    ids = batch[3].input_ids.copy()
    ids[2] += 1
    batch[3] = dataclasses.replace(batch[3], input_ids=ids)
    other.steps.write_data(1, rows.to_table(batch))
    path = other.steps.json_path(1)
    digest = run.steps.read(1)["digests"]["data"]
    path.write_text(path.read_text().replace(digest, "0" * 16))
    other.steps.index_path.write_text(other.steps.index_path.read_text().replace(digest, "0" * 16))
    shown = told(capsys, run.path, other.path)
    place = f"{batch[3].id}, input_ids, token 2: first {ids[2] - 1}, second {ids[2]}"
    assert f"FIRST DIFFERENCE  step 1, data: {place}" in shown


@pytest.mark.parametrize(("by", "threads", "same"), [(1e-6, 2, True), (0.1, 2, False), (1e-6, 1, False)])
def test_logprobs_of_weights_that_another_environment_computed(
    run: RunDirectory, other: RunDirectory, by: float, threads: int, same: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = other.steps.read_data(1)
    position = generated_at(other, 1, 0)
    logprobs = batch[0].logprobs.copy()
    logprobs[position] -= np.float32(by)
    batch[0] = dataclasses.replace(batch[0], logprobs=logprobs)
    other.steps.write_data(1, rows.to_table(batch))
    path = other.steps.json_path(1)
    digest = run.steps.read(1)["digests"]["data"]
    path.write_text(path.read_text().replace(digest, "0" * 16).replace('"threads": 1,', f'"threads": {threads},'))
    other.steps.index_path.write_text(other.steps.index_path.read_text().replace(digest, "0" * 16))
    assert diff(run.path, other.path, ignore=[], plot=None) is same
    shown = capsys.readouterr().out
    assert ("(threads: 1 → 2)" in shown) is (threads == 2)
    assert (f"FIRST DIFFERENCE  step 1, data: {batch[0].id}, logprobs, token {position}" in shown) is not same


def test_runs_without_a_step(run: RunDirectory, tmp_path: Path) -> None:
    empty = RunDirectory(tmp_path / "empty")
    with pytest.raises(RecordError, match="has no committed step to compare"):
        diff(run.path, empty.path, ignore=[], plot=None)
