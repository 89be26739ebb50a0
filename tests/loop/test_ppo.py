"""PPO in whole runs: with one episode a group it learns, goes on bit for bit, and replays from another place."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from clew import config as configuration
from clew.config import Config
from clew.diagnose.blame import blame
from clew.diagnose.causes import configuration_changes
from clew.diagnose.counterfactual import counterfactual
from clew.record.bundle import write_bundle
from clew.record.run import RunDirectory
from tests.diagnose.planted import change_stage, generated_at, seal
from tests.loop import runs
from tests.loop.runs import learn, replays
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    tiny_tokenizer(folder / "model")
    tiny_model(folder / "model", scale=0.1)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i} + 1 ="}) for i in range(64)))
    return folder


def configure(folder: Path, trial: str, **changes: object) -> Config:
    sections = (
        "experiment: ppo\n"
        "rollout: {reward: bench.rewards.digits, batch_groups: 32, n_samples: 1}\n"
        "sampling: {max_new_tokens: 8}\n"
        "training: {steps: 24, lr: 3e-3}\n"
        "algorithm: {preset: ppo, minibatches: 2}\n"
        "checkpoint: {every_steps: 10, keep: 5}\n"
    )
    return runs.configure(folder, sections, trial, changes)


@pytest.fixture(scope="module")
def first(folder: Path) -> RunDirectory:
    return learn(configure(folder, "first"))


def test_policy_and_critic_learn(first: RunDirectory) -> None:
    metrics = [first.steps.read(step)["metrics"] for step in range(24)]
    rewards = [each["reward"] for each in metrics]
    assert np.mean(rewards[-4:]) > 2 * np.mean(rewards[:4]), rewards
    assert metrics[0]["critic/value"] == 0
    assert np.mean([each["critic/explained_variance"] for each in metrics[-8:]]) > 0.2
    assert set(first.steps.read_stages(0).arrays) >= {"values", "returns", "advantages", "reference_logprobs"}


def test_resumed_from_a_checkpoint_it_takes_the_same_steps(folder: Path, first: RunDirectory) -> None:
    copy = folder / "runs" / "ppo" / "resumed"
    shutil.copytree(first.path, copy)
    for late in ("step-000020", "step-000024"):
        shutil.rmtree(copy / "checkpoints" / late)
    resumed = learn(configure(folder, "resumed"))
    assert resumed.steps.index() == first.steps.index()
    for name in ("trainer/critic/model.safetensors", "trainer/state.safetensors", "model.safetensors"):
        last = Path("checkpoints") / "step-000024" / name
        assert (first.path / last).read_bytes() == (resumed.path / last).read_bytes()


def test_a_bundle_replays_without_the_models_that_the_run_began_with(
    folder: Path, first: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = first.path / "checkpoints" / "step-000010" / "trainer" / "critic"
    run = learn(configure(folder, "critic", **{"training.steps": 2, "algorithm.critic": critic}))
    assert run.steps.read(0)["metrics"]["critic/value"] != 0
    bundle = write_bundle(run, 1, stages_only=False, to=tmp_path / "step.clew.zip")
    shutil.move(critic, tmp_path / "critic")
    try:
        assert replays(bundle, None) and "compared bit for bit" in capsys.readouterr().out
    finally:
        shutil.move(tmp_path / "critic", critic)


def test_a_counterfactual_needs_no_more_than_the_run(folder: Path, first: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(first.path / "checkpoints" / "step-000010" / "trainer" / "critic", tmp_path / "critic")
    small = {"training.steps": 3, "rollout.batch_groups": 4}
    run = learn(configure(folder, "beside", **small, **{"algorithm.critic": tmp_path / "critic"}))
    shutil.rmtree(tmp_path / "critic")
    change = ["algorithm.clip_high=0.3", "trial=beside-clip"]
    counterfactual(run, range(1, 2), change, from_bundle=False)
    counterfactual(run, range(1, 3), change, from_bundle=False)  # goes on with it
    new = RunDirectory(run.path.with_name("beside-clip"))
    assert new.steps.count() == 3 and replays(new.path, "2")
    assert set(configuration_changes((run, new), 1)) == {"algorithm.clip_high"}


def test_a_user_s_copy_of_gae_makes_the_same_run_with_a_critic_of_its_own(
    folder: Path, first: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    own = learn(configure(folder, "own", **{"algorithm.preset": "tests.loop.own_gae"}))
    assert configuration.load(own.config_path).algorithm.advantages == "tests.loop.own_gae.advantages"
    for step in range(24):
        ours, ppos = own.steps.read(step), first.steps.read(step)
        assert ours["digests"] == ppos["digests"] and ours["tensors"] == ppos["tensors"]
        ours["metrics"].pop("advantage_reward_correlation", None)  # which Clew's own have no need of
        assert ours["metrics"] == ppos["metrics"]
        then, now = (run.steps.read_stages(step).arrays for run in (first, own))
        assert set(then) == set(now) >= {"values", "returns"}
    for name in ("trainer/critic/model.safetensors", "trainer/state.safetensors", "model.safetensors"):
        last = Path("checkpoints") / "step-000024" / name
        assert (first.path / last).read_bytes() == (own.path / last).read_bytes()
    assert replays(own.path, "20:23") and "compared bit for bit" in capsys.readouterr().out
    assert replays(own.path, "21", "advantages")
    blame(own.path, 3, top=3, tokens=3, by="critic")
    assert "critic's gradient" in capsys.readouterr().out


def test_values_of_last_states_are_on_record_and_replay(
    folder: Path, first: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"algorithm.bootstrap_truncated": True, "training.steps": 8, "algorithm.minibatches": 1}
    run = learn(configure(folder, "bootstrap", **changes))
    stages, batch = run.steps.read_stages(7).arrays, run.steps.read_data(7)
    cut = [row for row in batch if row.finish_reason == "length"]
    assert cut and run.steps.read(7)["metrics"]["truncated_share"] == len(cut) / len(batch)
    for row in batch:
        after, returns, kl = (stages[name][row.id] for name in ("bootstrap_values", "returns", "reference_logprobs"))
        assert bool(after.any()) == (row.finish_reason == "length") and not after[:-1].any()
        penalty = 0.02 * (row.logprobs[-1] - kl[-1])
        assert math.isclose(returns[-1], row.reward - penalty + after[-1], abs_tol=1e-5) or not row.loss_mask[-1]
    assert "bootstrap_values" not in first.steps.read_stages(7).arrays
    assert replays(run.path, None) and "compared bit for bit" in capsys.readouterr().out
    assert replays(run.path, "7", "advantages")
    changed = change_stage(run, 7, "bootstrap_values", 0, generated_at(run, 7, 0), 0.25)
    assert not replays(run.path, "7")
    assert f"FIRST DIFFERENCE  step 7, bootstrap_values: {changed}, token" in capsys.readouterr().out
    assert not replays(run.path, "7", "advantages")


@pytest.mark.parametrize("stage", ["values", "returns", "advantages"])
def test_an_altered_stage_is_named_to_the_token(
    first: RunDirectory, tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(Path(shutil.copytree(first.path, tmp_path / "runs" / "ppo" / "first")))
    position = generated_at(run, 21, 3)
    name = change_stage(run, 21, stage, 3, position, 0.25)
    assert not replays(run.path, "21")
    assert f"FIRST DIFFERENCE  step 21, {stage}: {name}, token {position}: recorded" in capsys.readouterr().out
    seal(run)  # otherwise the chain of commits is what is broken
    if stage != "advantages":  # which follow from the recorded values
        assert replays(run.path, "21", "advantages") == (stage == "returns")
