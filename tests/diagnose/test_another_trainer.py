"""Blame and replay of a record that another trainer wrote."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clew.diagnose.attribution import attribute_step
from clew.diagnose.blame import blame
from clew.diagnose.diff import diff
from clew.diagnose.rerun import Options, rerun
from clew.errors import ClewError, ConfigError, RecordError
from clew.record import Writer, rows
from clew.record.run import RunDirectory


def blamed(run: RunDirectory, capsys: pytest.CaptureFixture[str], by: str | None = None) -> list[str]:
    blame(run.path, 0, top=3, tokens=2, by=by)
    return capsys.readouterr().out.splitlines()


def anothers(path: Path, **planted: dict[int, float]) -> RunDirectory:
    """A step of another trainer: a group of three, of four tokens each. planted: by column or stage, of which rows."""
    logprob = math.log(0.5)
    columns: dict[str, list[Any]] = {
        "reward": [1.0, 0.0, 0.0],
        "logprobs": [logprob] * 3,
        "advantages": [2.0, -1.0, -1.0],
        "current": [logprob] * 3,
        "loss": [math.nan if "metric" in planted else 0.5],
    }
    for name, changes in planted.items():
        for row, value in changes.items():
            columns[name][row] = value
    with Writer(path, trainer="mine") as writer:
        sequence = {"group_id": "g000000", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "data": {"q": "1+1"}}
        given = zip(columns["reward"], columns["logprobs"], strict=True)
        writer.step(
            [{**sequence, "reward": reward, "logprobs": logprobs} for reward, logprobs in given],
            stages={"advantages": columns["advantages"], "logprobs": columns["current"]},
            metrics={"loss": columns["loss"][0]},
        )
    return writer.run


def test_runs_without_a_common_metric_cannot_be_plotted(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Writer(tmp_path / name, trainer="mine") as writer:
            sequence = {
                "group_id": "g000000",
                "input_ids": [1, 2],
                "loss_mask": [0, 1],
                "reward": 1.0,
                "logprobs": -1.0,
            }
            writer.step([sequence])
    with pytest.raises(RecordError, match="Cannot plot: none of the metrics reward, loss, "):
        diff(tmp_path / "one", tmp_path / "two", ignore=[], plot=tmp_path / "drift.png")


def test_another_trainers_step_is_blamed_by_what_it_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = anothers(tmp_path / "run", current={1: math.log(0.75)})
    found = {part.sequence.id: part for part in attribute_step(run, 0).sequences}
    assert found["g000000.e0.s0"].measures["pull"] == pytest.approx(2 * (2 * 1 * 0.5) / 6)
    assert found["g000000.e1.s0"].measures["pull"] == pytest.approx(2 * (1 * 1.5 * 0.25) / 6)
    assert found["g000000.e1.s0"].measures["behaviour_k3"] == pytest.approx(2 * (1.5 - math.log(1.5) - 1) / 6)
    lines = blamed(run, capsys)
    assert lines[1].startswith("from the record alone: another trainer wrote it")
    assert lines[3].split() == ["g000000.e0.s0", "0.3333", "1", "2", "2", "0"]
    assert "  data        {'q': '1+1'}" in lines and "FIRST NOT FINITE" not in lines[-1]
    assert blamed(run, capsys, by="behaviour_k3")[3].startswith("g000000.e1.s0")
    for by, why in {
        "gradient": "training the step again",
        "loss": "no stage 'loss'",
        "kl": "no logprobs of a ref",
    }.items():
        with pytest.raises(ConfigError, match=f"--by {by}: .*{why}.*; another trainer"):
            blamed(run, capsys, by=by)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"reward": {1: math.nan}}, "the recorded reward of g000000.e1.s0: nan"),
        ({"logprobs": {1: -math.inf}}, "the recorded behaviour logprob of token 2 of g000000.e1.s0"),
        ({"current": {2: math.nan}}, "the recorded logprobs of token 2 of g000000.e2.s0 (2 tokens)"),
        ({"metric": {}}, "the metric loss (nan); all that is on record of the sequences is finite"),
    ],
)
def test_where_another_trainers_numbers_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planted: dict[str, dict[int, float]], said: str
) -> None:
    lines = blamed(anothers(tmp_path / "run", **planted), capsys)
    assert lines[-1] == f"FIRST NOT FINITE  {said}"
    if worst := [row for changes in planted.values() for row in changes]:
        assert lines[3].startswith(f"g000000.e{worst[0]}.s0")


def test_without_advantages_rewards_over_their_groups_mean_stand_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Writer(tmp_path / "run", trainer="mine") as writer:
        sequence = {"input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": math.log(0.5)}
        writer.step(
            [
                {"group_id": group, "reward": reward, **sequence}
                for group, reward in [("g000000", 5.0), ("g000000", 5.0), ("g000001", 1.0), ("g000001", 0.0)]
            ]
        )
    lines = blamed(writer.run, capsys)
    assert lines[1].endswith("it has no advantages, so each reward minus the mean of its group is used instead")
    assert lines[3].split() == ["g000001.e0.s0", "0.0625", "1", "0.5", "1", "0"]


def test_rows_of_every_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several an episode, ids like markup, interactions of any kind, a stage with a name of blame's own."""
    sequence = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": math.log(0.5), "group_id": "math[/easy]"}
    interactions = ["said", {"role": "user", "content": "hello"}, {"prompt": "1+1=", "completion": "2"}]
    with Writer(tmp_path / "run", trainer="mine") as writer:
        writer.step(
            [
                {**sequence, "episode_id": "one", "reward": 1.0, "interactions": interactions},
                {**sequence, "episode_id": "one", "reward": 0.5},
                {**sequence, "episode_id": "other", "id": "[red]other", "reward": 0.0},
            ],
            stages={"reference_logprobs": [math.log(0.25)] * 3, "advantage": [7.0] * 3},
        )
    lines = blamed(writer.run, capsys)
    assert [line.split()[0] for line in lines[3:6]] == ["one.s0", "[red]other", "one.s1"]
    assert [line.split()[3] for line in lines[3:6]] == ["0.625", "-0.375", "0.125"]  # means of episodes have a mean
    assert "  interaction 'said'" in lines and "  prompt      '1+1='" in lines
    by_kl = blamed(writer.run, capsys, by="kl")  # of the behaviour policy: no other logprobs are there
    assert "its kl is estimated by k3" in by_kl[1] and f"{0.5 + math.log(2) - 1:.3g} in all" in by_kl[0]


def test_interactions_that_are_no_objects_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sequence = {"group_id": "g0", "input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": -0.5, "reward": 1.0}
    for name, said in (("one", ["hello", "you"]), ("same", ["hello", "you"]), ("other", ["hello", {"role": "you"}])):
        with Writer(tmp_path / name, trainer="mine") as writer:
            writer.step([{**sequence, "interactions": said}])
    assert diff(tmp_path / "one", tmp_path / "same", ignore=[], plot=None)
    assert not diff(tmp_path / "one", tmp_path / "other", ignore=[], plot=None)
    assert 'data: g0.e0.s0, interaction 1: one "you", other ' in capsys.readouterr().out


def test_a_record_that_was_altered_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = anothers(tmp_path / "run")
    batch = [dataclasses.replace(row, rewards={"one": 2.0, "other": 3.0}) for row in run.steps.read_data(0)]
    with Writer(run.path, trainer="mine") as writer:
        writer.step(batch)  # its rewards need not add up
    blame(run.path, 1, top=1, tokens=1, by=None)
    assert not capsys.readouterr().err
    batch[1].logprobs[2] -= 1
    run.steps.write_data(1, rows.to_table(batch))
    blame(run.path, 1, top=1, tokens=1, by=None)
    assert f"{run.path} was altered: step 1, data: {batch[1].id}: recorded digest" in capsys.readouterr().err


def replayed(run: RunDirectory, stages: str | None, *overrides: str, **options: Any) -> bool:
    return rerun(run.path, Options(stages=stages, overrides=overrides, **options))


def test_what_it_computed_is_computed_again_where_the_user_says_how(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, stages = run.steps.read_data(2), run.steps.read_stages(2).arrays
    known = {name: [values[row.id].copy() for row in batch] for name, values in stages.items()}
    algorithm = ("algorithm.kl_coef=0.01", "algorithm.minibatches=2")

    def write(name: str, **stages: list[np.ndarray]) -> RunDirectory:
        with Writer(tmp_path / name, trainer="mine") as writer:
            writer.step(batch, stages=stages)
        return writer.run

    ours = write("ours", **known)
    assert replayed(ours, "data,advantages,loss", *algorithm)
    assert "advantages, loss follow from the recorded inputs, within 0.001 + 0.001 x" in capsys.readouterr().out
    assert not replayed(ours, "loss", "algorithm.kl_coef=1.0")
    assert not replayed(ours, "advantages", "algorithm.preset=dr_grpo", "sampling.max_new_tokens=10")
    capsys.readouterr()
    position = int(np.flatnonzero(batch[4].loss_mask)[1])
    known["advantages"][4][position] += 0.01
    altered = write("altered", **known)
    assert not replayed(altered, "advantages", *algorithm)
    assert f"FIRST DIFFERENCE  step 0, advantages: {batch[4].id}, token {position}: " in capsys.readouterr().out
    assert replayed(altered, "advantages", *algorithm, only=batch[0].id)
    without = write("without", advantages=known["advantages"], logprobs=known["logprobs"])
    for stages, overrides, said in (
        ("advantages", [], "how it was computed is not on record. Say it in Clew's words"),
        ("rewards", [], "may have weighted or clipped"),
        ("loss", algorithm, "has no stage 'proximal_logprobs': the loss cannot be computed again without it"),
        ("advantages", ["lr=1"], "lr=1: with --stage, key=value describes how another trainer"),
        ("advantages", ["algorithm.kl=1"], "override algorithm.kl=1: there is no field 'algorithm.kl'"),
        ("advantages", ["algorithm.kl_coef=1", "algorithm.kl_in=reward"], "has no stage 'reference_logprobs'"),
        (
            "loss",
            ["algorithm.loss_mean=sequence", "algorithm.minibatches=2"],
            "which sequences shared a mini-batch",
        ),
        ("loss", ["algorithm.preset=dr_grpo"], "Cannot derive algorithm.loss_constant: sampling.max_new_tokens"),
        ("advantages", ["algorithm.overlong_penalty=4096"], "is above sampling.max_new_tokens (256)"),
        (None, ["algorithm.kl_coef=1"], "another trainer wrote it, without what Clew needs"),
    ):
        with pytest.raises(ClewError) as told:
            replayed(without, stages, *overrides)
        assert said in str(told.value)
    with pytest.raises(ConfigError, match="--stage and key=value are different ways to replay"):
        replayed(run, "loss", *algorithm)
