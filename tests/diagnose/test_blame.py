"""The sequence and the token that made a step what it was."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from clew.diagnose.attribution import attribute_step
from clew.diagnose.blame import blame
from clew.errors import ConfigError, RecordError, TrainingError
from clew.loop.replay import configure_as, engine_at, replay
from clew.loop.trainer_process import learn_inline
from clew.record import rows
from clew.record.bundle import opened, write_bundle
from clew.record.run import RunDirectory
from clew.training.sequence_gradients import contributions, critic_contributions, first_not_finite
from tests.diagnose.planted import configure


def shown(run: RunDirectory, step: int, capsys: pytest.CaptureFixture[str], by: str | None = None) -> list[str]:
    blame(run.path, step, top=3, tokens=2, by=by)
    return capsys.readouterr().out.splitlines()


def test_contributions_add_up_to_the_step(run: RunDirectory) -> None:
    engine, recorded = engine_at(run, 2), run.steps.read(2)
    configure_as(run, engine, recorded)
    batch = run.steps.read_data(2)
    parts = list(contributions(engine, engine.prepare(batch)))
    assert sorted(part.row for part in parts) == list(range(len(batch)))
    for update in (0, 1):
        assert math.isclose(sum(part.share for part in parts if part.update == update), 1.0, rel_tol=1e-4)
    stages = run.steps.read_stages(2).arrays
    for part in parts:
        row = batch[part.row]
        assert np.allclose(part.losses_N, stages["loss"][row.id][row.loss_mask], atol=1e-5)
    replayed = engine_at(run, 2)
    configure_as(run, replayed, recorded)
    replayed.train_step(batch)
    trained = engine.policy.model.named_parameters()
    for (name, ours), theirs in zip(trained, replayed.policy.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


def test_a_poisoned_sequence_comes_first(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    batch = run.steps.read_data(3)
    row = batch[1]
    length = 150  # a loop of one token, which grows more likely or less likely with one voice
    poisoned = dataclasses.replace(
        row,
        **{
            name: np.concatenate([getattr(row, name)[:-1], np.repeat(getattr(row, name)[-1:], length)])
            for name in rows.ALIGNED
        },
        reward=row.reward - 50,
    )
    batch[1] = poisoned
    run.steps.write_data(3, rows.to_table(batch))
    lines = shown(run, 3, capsys)
    assert lines[2].startswith(row.id) and any(
        line.startswith(f"{row.id}: the tokens with the most pull") for line in lines
    )
    assert any(line.strip().startswith("prompt") for line in lines)


def test_the_row_is_shown_where_a_workflow_named_no_prompt(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = [
        dataclasses.replace(row, interactions=[said | {"prompt": None} for said in row.interactions])
        for row in run.steps.read_data(3)
    ]
    run.steps.write_data(3, rows.to_table(batch))
    lines = [line.strip() for line in shown(run, 3, capsys)]
    assert not any(line.startswith("prompt") for line in lines)
    assert sum(line.startswith("data        {'prompt': ") for line in lines) == sum(
        line.startswith("completion") for line in lines
    )


def test_a_nan_is_traced_to_the_record(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    batch = run.steps.read_data(3)
    row = batch[4]
    position = int(np.flatnonzero(row.loss_mask)[1])
    logprobs = row.logprobs.copy()
    logprobs[position] = np.nan
    batch[4] = dataclasses.replace(row, logprobs=logprobs)
    run.steps.write_data(3, rows.to_table(batch))
    lines = shown(run, 3, capsys)
    assert lines[2].startswith(row.id)
    assert lines[-1] == f"FIRST NOT FINITE  the recorded behaviour logprob of token {position} of {row.id}"


def test_updates_after_one_that_was_left_out_are_blamed_as_they_were_made(run: RunDirectory) -> None:
    recorded, batch = run.steps.read(2), run.steps.read_data(2)
    skipping = recorded | {
        "config": recorded["config"] | {"training": recorded["config"]["training"] | {"on_bad_gradient": "skip"}}
    }
    (poisoned, *_), later = recorded["plan"][0][0], recorded["plan"][1]
    logprobs = batch[poisoned].logprobs.copy()
    logprobs[batch[poisoned].loss_mask] = np.nan
    batch[poisoned] = dataclasses.replace(batch[poisoned], logprobs=logprobs)
    blamed, stepped = engine_at(run, 2), engine_at(run, 2)
    for engine in (blamed, stepped):
        configure_as(run, engine, skipping)
    parts = list(contributions(blamed, blamed.prepare(batch)))
    assert [part.row for part in parts if part.first_not_finite] == [poisoned]
    assert sorted(part.row for part in parts if part.update == 1) == sorted(row for rows in later for row in rows)
    assert stepped.train_step(batch).metrics["updates_skipped"] == 1.0
    for ours, theirs in zip(blamed.policy.model.parameters(), stepped.policy.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_nan_is_traced_to_a_parameter_and_to_a_module(run: RunDirectory) -> None:
    engine = engine_at(run, 2)
    batch = run.steps.read_data(2)
    prepared = engine.prepare(batch)
    assert first_not_finite(engine, prepared, 0) is None
    layer = engine.policy.model.model.layers[1].mlp
    handle = layer.down_proj.register_forward_hook(lambda module, inputs, output: output * float("inf"))
    found = first_not_finite(engine, prepared, 0)
    assert found is not None and found.startswith("the output of model.layers.1.mlp.down_proj (Linear) at [0, 0, 0]")
    handle.remove()
    with torch.no_grad():
        layer.up_proj.weight[3, 1] = float("nan")
    found = first_not_finite(engine, prepared, 0)
    assert found is not None and found.startswith("the parameter model.layers.1.mlp.up_proj.weight at [3, 1] of")


def of_a_negative(logprobs_N: torch.Tensor, advantages_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of a logarithm is finite where there is none."""
    return advantages_N * (logprobs_N + logprobs_N.detach().abs().median()).log(), {}


def at_its_tip(logprobs_N: torch.Tensor, advantages_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    return (logprobs_N - logprobs_N.detach()).abs().sqrt() * advantages_N, {}


@pytest.mark.parametrize(("name", "what"), [("of_a_negative", "loss"), ("at_its_tip", "gradient of the loss")])
def test_a_loss_that_is_none_while_its_gradient_is_finite_and_the_reverse(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], name: str, what: str
) -> None:
    recorded = run.steps.read(3)
    recorded["config"]["algorithm"] |= {"loss": f"{__name__}.{name}", "kl_coef": 0.0}
    recorded["config"]["training"] |= {"on_bad_gradient": "skip"}
    run.steps.json_path(3).write_text(json.dumps(recorded))
    last = shown(run, 3, capsys)[-1]
    assert last.startswith(f"FIRST NOT FINITE  the {what} (algorithm.loss={__name__}.{name}; its logprobs are finite)")
    engine = engine_at(run, 3)
    for _ in replay(run, engine, 2):
        pass
    configure_as(run, engine, recorded)
    before = {key: each.detach().clone() for key, each in engine.policy.model.named_parameters()}
    parts = list(contributions(engine, engine.prepare(run.steps.read_data(3))))
    assert all(part.first_not_finite is None or what in part.first_not_finite for part in parts)
    assert all(torch.equal(before[key], each) for key, each in engine.policy.model.named_parameters())  # none was made


def test_what_the_critic_met_is_named(
    run: RunDirectory, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--by critic: this step has none"):
        shown(run, 0, capsys, by="critic")
    options = [f"root={tmp_path}", "trial=critic", "algorithm.advantages=gae", "training.steps=1"]
    config = configure(folder, *options)
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    engine, batch = engine_at(run, 0), run.steps.read_data(0)
    parts = list(critic_contributions(engine, engine.prepare(batch)))
    assert sorted(part.row for part in parts) == list(range(len(batch)))
    lines = shown(run, 0, capsys, by="critic")
    assert "loss  critic's gradient  critic's loss  reward" in lines[1] and "FIRST NOT FINITE" not in "".join(lines)
    gradients = [float(line.split()[4]) for line in lines[2:5]]
    assert gradients == sorted(gradients, reverse=True)
    losses = run.steps.read(0)["metrics"]["critic/loss"] * len(run.steps.read(0)["plan"])
    assert math.isclose(sum(part.loss for part in parts), losses, rel_tol=0.2)  # its mini-batches differ in length
    batch[4] = dataclasses.replace(batch[4], reward=1e30)
    run.steps.write_data(0, rows.to_table(batch))
    assert any(line.startswith("FIRST NOT FINITE  the critic's loss or gradient of ") for line in shown(run, 0, capsys))


def not_a_number(logprobs_N: torch.Tensor, advantages_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    return -logprobs_N * advantages_N * torch.where(torch.arange(len(logprobs_N)) == 2, math.nan, 1.0), {}


@pytest.mark.parametrize("column", ["reward", "temperatures"])
def test_what_is_not_finite_in_the_data_is_named_not_what_follows_from_it(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    batch = run.steps.read_data(3)
    row = batch[4]
    position = int(np.flatnonzero(row.loss_mask)[1])
    temperatures = row.temperatures.copy()
    temperatures[position] = 0
    batch[4], said = {
        "reward": (dataclasses.replace(row, reward=math.inf), f"the recorded reward of {row.id}: inf"),
        "temperatures": (
            dataclasses.replace(row, temperatures=temperatures),
            f"the recorded temperature of token {position} of {row.id}",
        ),
    }[column]
    run.steps.write_data(3, rows.to_table(batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blame(run.path, 3, top=1, tokens=1, by="gradient")
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"FIRST NOT FINITE  {said}"
    assert f"was altered: step 3, data: {row.id}: recorded digest" in err


def of_its_neighbours(logprobs_N: torch.Tensor, rows_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    [*rows_N.tolist()].index(1)  # the second row of its micro-batch
    return -logprobs_N, {}


def test_a_nan_is_traced_to_a_loss_of_the_users_own(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = run.steps.read(3)
    for name in ("not_a_number", "of_its_neighbours"):
        recorded["config"]["algorithm"] |= {"loss": f"{__name__}.{name}", "kl_coef": 0.0}
        run.steps.json_path(3).write_text(json.dumps(recorded))
        if name == "not_a_number":
            said = shown(run, 3, capsys)[-1]
            assert said.startswith(f"FIRST NOT FINITE  the loss (algorithm.loss={__name__}.not_a_number; its logprobs")
        else:
            with pytest.raises(TrainingError, match=r"is not in list\n.*blame` computes each sequence alone"):
                shown(run, 3, capsys)


def test_a_step_that_failed_is_blamed_too(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecordError, match=r"has no batch of step 0: it has committed no step\.$"):
        blame(RunDirectory(run.path / "nothing").path, 0, top=1, tokens=1, by="loss")
    run.steps.json_path(5).unlink()  # not committed: its batch is there
    run.steps.index_path.write_text("".join(run.steps.index_path.read_text().splitlines(keepends=True)[:5]))
    assert "step 5: 9 sequences" in shown(run, 5, capsys, by="loss")[0]
    with pytest.raises(RecordError, match="has no batch of step 6: it has committed steps 0 to 4, and begun step 5"):
        blame(run.path, 6, top=1, tokens=1, by="loss")
    with pytest.raises(ConfigError, match=r"--by size: expected gradient, loss, kl, .* or critic"):
        blame(run.path, 5, top=1, tokens=1, by="size")


def test_divergences_add_up_to_the_metrics_and_the_worst_comes_first(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, metrics = attribute_step(run, 2).sequences, run.steps.read(2)["metrics"]
    for name in ("kl", "behaviour_k3"):
        assert math.isclose(sum(part.measures[name] for part in parts), metrics[name], rel_tol=1e-3, abs_tol=1e-9)
    batch = run.steps.read_data(2)
    position = int(np.flatnonzero(batch[4].loss_mask)[1])
    batch[4].logprobs[position] -= 3
    run.steps.write_data(2, rows.to_table(batch))
    lines = shown(run, 2, capsys, by="behaviour_k3")
    title = next(
        place for place, line in enumerate(lines) if line.startswith(f"{batch[4].id}: the tokens with the most")
    )
    assert lines[2].startswith(batch[4].id) and lines[title + 2].split()[0] == str(position)
    assert "worst first by kl (" in shown(run, 2, capsys, by="kl")[0]
    recorded = run.steps.read(2)
    recorded["config"]["algorithm"]["kl_coef"] = 0.0
    run.steps.json_path(2).write_text(json.dumps(recorded))
    with pytest.raises(ConfigError, match="--by kl: this step has no logprobs of a reference model"):
        shown(run, 2, capsys, by="kl")


def test_without_a_checkpoint_the_record_says_what_it_can(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = {part.sequence.id: part for part in attribute_step(run, 2).sequences}
    path = write_bundle(run, 2, stages_only=True, to=tmp_path / "of-a-bug-report.stages.clew.zip")
    with opened(path) as (bundled, _):
        found = attribute_step(bundled, 2)
        assert found.only_recorded == "there is no checkpoint at or before step 2 (there: none)"
        for part in found.sequences:
            again = trained[part.sequence.id]
            for name in ("kl", "behaviour_k3"):
                assert math.isclose(part.measures[name], again.measures[name], rel_tol=1e-3, abs_tol=1e-8)
            for name in ("behaviour", "proximal", "current", "reference", "advantage", "loss", "lag"):
                assert np.allclose(part.tokens[name], again.tokens[name], atol=1e-5), name
    blame(path, 2, top=1, tokens=1, by="loss")
    assert "from the record alone: there is no checkpoint" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--by gradient: it is found by training the step again; there is no"):
        blame(path, 2, top=1, tokens=1, by="gradient")


def test_a_step_before_those_of_a_bundle_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    path = write_bundle(run, 3, stages_only=False, to=tmp_path / "later.clew.zip")
    with pytest.raises(RecordError, match=r"--step 1: the bundle .*later\.clew\.zip holds the steps 2 to 3\."):
        blame(path, 1, top=1, tokens=1, by="loss")


def test_an_altered_weight_is_found_on_the_way(run: RunDirectory) -> None:
    file = run.checkpoints / "step-000002" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RecordError, match=r"model\.norm\.weight"):
        blame(run.path, 3, top=1, tokens=1, by="loss")
