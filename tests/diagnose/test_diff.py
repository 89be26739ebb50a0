"""`clew diff`: where two runs first differ, and what explains the difference."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from clew.diagnose.diff import diff
from clew.diagnose.rerun import Options, rerun
from clew.errors import ConfigError, RecordError
from clew.loop.trainer_process import learn_inline
from clew.record import chain, rows
from clew.record.bundle import write_bundle
from clew.record.run import RunDirectory
from tests.diagnose.planted import change_stage, configure, everything, generated_at, seal


@pytest.fixture
def other(run: RunDirectory) -> RunDirectory:
    shutil.copytree(run.path, run.path.parent / "second")
    return RunDirectory(run.path.parent / "second")


def told(capsys: pytest.CaptureFixture[str], a: Path, b: Path, ignore: str = "") -> str:
    """Return what `clew diff` says about two runs that part."""
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
    assert diff(run.path, other.path, ignore=[], plot=tmp_path / "drift.txt")
    assert (tmp_path / "drift.png").read_bytes()[:4] == (tmp_path / "drift.txt").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(RecordError, match=r"Cannot write .*/run.json/drift.png"):
        diff(run.path, other.path, ignore=[], plot=run.path / "run.json" / "drift.png")
    capsys.readouterr()
    assert everything(run.path) == before
    bundle = write_bundle(run, 3, stages_only=False)
    assert diff(bundle, other.path, ignore=[], plot=None)
    assert "steps 2 to 3 of both" in capsys.readouterr().out


def test_plans_and_checkpoints_are_compared_too(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other.steps.json_path(2)
    said = json.loads(path.read_text())
    said["plan"][0] = said["plan"][0][::-1] if len(said["plan"][0]) > 1 else [said["plan"][0][0][::-1]]
    path.write_text(json.dumps(said))
    version = other.checkpointed()[-1]
    facts = other.checkpoints / f"step-{version:06d}" / "checkpoint.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"updates": 99}))
    seal(other)
    shown = told(capsys, run.path, other.path)
    assert "STILL DIFFERENT  step 2: the plan of micro-batches" in shown
    assert f"STILL DIFFERENT  checkpoints/step-{version:06d}: updates" in shown


def test_evaluations_and_code_that_changes_after_the_first_difference(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    change_stage(other, 0, "advantages", 0, generated_at(other, 0, 0), 0.5)
    for step in (3, 4):
        path = other.steps.json_path(step)
        said = json.loads(path.read_text())
        path.write_text(json.dumps(said | {"code": {"rollout.reward": "f" * 16}}))
    seal(other)
    for each, values in ((run, (0.25, 0.5)), (other, (0.25, 0.375))):
        for version, value in zip((0, 2), values, strict=True):
            each.evals.write(version, [], {"pass@1": value, "reward": value, "episodes": 8})
    shown = told(capsys, run.path, other.path)
    assert "FIRST DIFFERENCE  step 0, advantages" in shown
    [changed] = re.findall(r"changed later .*:\n(.*)\n", shown)
    assert changed.startswith("  rollout.reward: another file from step 3 on, ")
    cells = [line.split() for line in shown.partition("evaluation of version")[2].splitlines()]
    assert cells == [["pass@1", "reward"], ["0", "0.25", "0.25"], ["2", "0.5", "→", "0.375", "0.5", "→", "0.375"]]


def test_an_altered_advantage(run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    position = generated_at(other, 4, 2)
    name = change_stage(other, 4, "advantages", 2, position, 0.5)
    path = other.steps.json_path(4)  # training on the altered advantage gives other gradients, too
    text = path.read_text()
    digest = run.steps.read(4)["digests"]["gradients"][0]
    path.write_text(text.replace(digest, digest[::-1]))
    index = other.steps.index_path
    index.write_text(index.read_text().replace(digest, digest[::-1]))
    shown = told(capsys, run.path, other.path)
    assert f"FIRST DIFFERENCE  step 4, advantages: {name}, token {position}: first " in shown
    assert "what differs was altered, or is not recorded" in shown
    assert "this suggests: one sequence differs alone" in shown


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


def test_a_reward_whose_file_was_changed_is_named(
    run: RunDirectory, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder / "changed_rewards.py"
    changes = [f"root={tmp_path}", "rollout.reward=changed_rewards.reward", "training.steps=1"]
    source.write_text("def reward(completion, data):\n    return 0.5 * len(completion)\n")
    learn_inline(configure(folder, *changes, "trial=before"), lambda step, summary: None)
    source.write_text("def reward(completion, data):\n    return 0.25 * len(completion)\n")
    command = [sys.executable, "-c", LEARN, str(folder), *changes, "trial=after"]  # this process has loaded the first
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    experiment = run.path.parent.name
    shown = told(capsys, tmp_path / experiment / "before", tmp_path / experiment / "after")
    assert re.search(r"rollout\.reward: another file, [0-9a-f]{16} → [0-9a-f]{16}\n", shown)
    assert "the same: what differs was altered" not in shown


def test_prompts_that_are_repeated_and_answers_that_are_others(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run has two prompts for all of its groups, and other answers to its held-out prompts."""
    for step in range(6):
        batch = other.steps.read_data(step)
        data = [{"prompt": f"{int(row.group_id[1:]) % 2} + 1 ="} for row in batch]
        changed = [dataclasses.replace(row, data=each) for row, each in zip(batch, data, strict=True)]
        other.steps.write_data(step, rows.to_table(changed))
    groups = len({group for entry in run.steps.index() for group in entry["groups"]})
    shown = told(capsys, run.path, other.path)
    assert re.search(rf"rows of data: of {groups} groups, \d+ have other rows of data \(prompt in \d+\)\n", shown)
    counts = f"first has {groups} distinct ones in {groups} groups, second has 2 distinct ones in {groups} groups"
    assert f"rows of data: second repeats prompts more often: {counts}\n" in shown
    batch = run.steps.read_data(0)
    names = sorted({row.group_id for row in batch})[:2]
    for each in (run, other):
        held_out = [dataclasses.replace(row, data={"prompt": "?", "answer": "1"}) for row in batch]
        if each is other:
            held_out = [dataclasses.replace(row, data={**row.data, "answer": row.group_id}) for row in held_out]
        kept = [row for row in held_out if row.group_id in names]
        each.evals.write(6, kept, {"pass@1": 0.5, "reward": 0.5, "episodes": 8})
    line = "the held-out prompts of version 6: of 2 groups, 2 have other rows of data (answer in 2)"
    assert f"evaluations (first → second):\n  {line}\n" in told(capsys, run.path, other.path)
    shutil.rmtree(other.steps.folder)
    shutil.copytree(run.steps.folder, other.steps.folder)
    assert f"STILL DIFFERENT  {line}\n" in told(capsys, run.path, other.path)


def test_a_loss_times_a_factor_and_rewards_of_the_other_sign(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other.steps.stage_path(2, 0)
    table = rows.read_table(path)
    tripled = [[3 * value for value in values] for values in table.column("loss").to_pylist()]
    place = table.schema.get_field_index("loss")
    field = table.schema.field("loss")
    rows.write_table(path, table.set_column(place, field, pa.array(tripled, pa.list_(pa.float32()))))
    shown = told(capsys, run.path, other.path)
    assert "FIRST DIFFERENCE  step 2, loss: " in shown
    assert "this suggests: all numbers of loss in second are 3 times those in first\n" in shown
    batch = other.steps.read_data(1)
    signs = [-1 if place % 3 == 0 else 1 for place in range(len(batch))]
    flipped = [dataclasses.replace(row, reward=sign * row.reward) for row, sign in zip(batch, signs, strict=True)]
    other.steps.write_data(1, rows.to_table(flipped))
    kept = [sign for row, sign in zip(batch, signs, strict=True) if row.reward]
    shown = told(capsys, run.path, other.path)
    assert f"suggests: {kept.count(-1)} of {len(kept)} numbers of rewards have the opposite sign in second\n" in shown


def test_one_file_of_several_functions_is_listed_once(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    change_stage(other, 1, "advantages", 0, generated_at(other, 1, 0), 0.5)
    for each, digest in ((run, "a" * 16), (other, "b" * 16)):
        path = each.steps.json_path(1)
        said = json.loads(path.read_text())
        own = dict.fromkeys(("algorithm.preset", "algorithm.advantages", "algorithm.loss"), digest)
        path.write_text(json.dumps(said | {"code": {**said["code"], **own}}))
        seal(each)
    line = "algorithm.advantages, algorithm.loss, algorithm.preset: another file, "
    shown = told(capsys, run.path, other.path)
    assert f"  {line}{'a' * 16} → {'b' * 16}\n" in shown and shown.count("another file, ") == 1


@pytest.mark.parametrize("what", ["prompt", "longer prompt", "length"])
def test_other_tokens_of_a_prompt_and_a_longer_answer(
    run: RunDirectory, other: RunDirectory, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = other.steps.read_data(1)
    row, suggested = batch[3], "another chat template, or another tokenizer"
    if what == "prompt":
        ids = row.input_ids.copy()
        ids[1] += 1
        batch[3] = dataclasses.replace(row, input_ids=ids)
    elif what == "longer prompt":
        first = int(row.loss_mask.argmax())
        longer = {name: np.insert(getattr(row, name), first, getattr(row, name)[0]) for name in rows.ALIGNED}
        batch[3] = dataclasses.replace(row, **longer)
    else:
        suggested = "a token limit differs, or the token that ends an answer"
        batch[3] = dataclasses.replace(row, **{name: getattr(row, name)[:-1] for name in rows.ALIGNED})
    other.steps.write_data(1, rows.to_table(batch))
    assert f"{suggested}\n" in told(capsys, run.path, other.path)


def test_parameters_are_compared_by_name(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other run lists the last parameter first, as if it were not trained there."""
    facts = json.loads(other.run_json.read_text())
    *rest, last = facts["parameters"]
    other.run_json.write_text(json.dumps(facts | {"parameters": [last, *rest]}))

    def in_front(digests: str, instead: str = "") -> str:
        return (instead or digests[-16:]) + digests[:-16]

    for step in range(other.steps.count()):
        path = other.steps.json_path(step)
        said = json.loads(path.read_text())
        tensors = said["tensors"]
        tensors["weights"] = in_front(tensors["weights"])
        tensors["gradients"] = [in_front(each, "0" * 16 * (step == 3)) for each in tensors["gradients"]]
        path.write_text(json.dumps(said))
    seal(other)
    shown = told(capsys, run.path, other.path)
    assert re.search(rf"FIRST DIFFERENCE  step 3, gradients: {last}.*: first digest \w+, second no gradient\n", shown)


def test_another_first_model_and_other_code_are_named(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other.steps.json_path(5)
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"code": {**said["code"], "rollout.reward": "f" * 16}}))
    seal(other)
    assert diff(run.path, other.path, ignore=[], plot=None)
    assert re.search(r"but the code of step 5 differs .*:\n  rollout.reward: .* → f{16}\n", capsys.readouterr().out)
    change_stage(other, 1, "advantages", 0, generated_at(other, 1, 0), 0.5)
    path = other.checkpoints / "step-000000" / "checkpoint.json"
    said = json.loads(path.read_text())
    del said["seal"]
    name = next(iter(said["weights"]))
    said["weights"][name] = "0" * 16
    path.write_bytes(chain.sealed(said))
    seal(other)
    shown = told(capsys, run.path, other.path)
    assert f"  the first model: 1 of {len(said['weights'])} parameters differ, first {name}\n" in shown


LEARN = """
import sys
from pathlib import Path
from clew.loop.trainer_process import learn_inline
from tests.diagnose.planted import configure
learn_inline(configure(Path(sys.argv[1]), *sys.argv[2:]), lambda step, summary: None)
"""


def test_an_altered_tokenizer_is_named(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    name = change_stage(other, 1, "advantages", 0, generated_at(other, 1, 0), 0.5)
    path = other.checkpoints / "step-000000" / "checkpoint.json"
    said = json.loads(path.read_text())
    del said["seal"]
    said["files"]["tokenizer.json"] = "0" * 16
    path.write_bytes(chain.sealed(said))
    seal(other)
    shown = told(capsys, run.path, other.path)
    assert f"FIRST DIFFERENCE  step 1, advantages: {name}" in shown
    assert "  tokenizer.json: of the checkpoint before this step, " in shown


def test_a_setting_that_changed_in_the_middle_of_a_run_counts_from_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for trial, early, late in (("cooled", "1", "0.5"), ("cool", "0.5", "0.5")):
        for steps, temperature in (("1", early), ("2", late)):
            own = (f"root={tmp_path}", f"trial={trial}", f"sampling.temperature={temperature}")
            config = configure(folder, *own, f"training.steps={steps}", "training.schedule=constant")
            learn_inline(config, lambda step, summary: None)
        runs.append(config.run_path)
    assert "configuration (cooled → cool):\n  sampling.temperature: 1.0 → 0.5\n" in told(capsys, *runs)


def test_what_follows_from_the_configuration_comes_before_noise_of_sampling(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run generates 2 sequences at a time instead of 128, so its logprobs are rounded differently."""
    runs = []
    for trial, lr, running in (("a", "1e-3", 128), ("b", "2e-3", 2)):
        own = (f"root={tmp_path}", f"trial={trial}", f"training.lr={lr}", f"inference.max_running={running}")
        config = configure(folder, *own, "training.steps=2", "rollout.max_lag=0")
        learn_inline(config, lambda step, summary: None)
        runs.append(RunDirectory(config.run_path))
    first, second = (np.concatenate([row.logprobs for row in run.steps.read_data(0)]) for run in runs)
    assert first.shape == second.shape and not np.array_equal(first, second) and np.abs(first - second).max() < 1e-4
    shown = told(capsys, *(run.path for run in runs))
    assert "(how the engine rounds a logprob depends on which sequences it computes side by side)" in shown
    assert shown.index("  training.lr: 0.001 → 0.002") < shown.index("FIRST DIFFERENCE  step 0, logprobs: ")


def test_another_learning_rate(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert rerun(run.path, Options(steps="2:5", overrides=["training.lr=1e-4", "trial=slow"]))
    capsys.readouterr()
    shown = told(capsys, run.path, run.path.parent / "slow")
    assert "FIRST DIFFERENCE  step 2, proximal_logprobs" not in shown
    assert "FIRST DIFFERENCE  step 2, logprobs" in shown or "FIRST DIFFERENCE  step 2, update" in shown
    assert "  training.lr: 0.001 → 0.0001" in shown
    assert "agree and all sequences differ after it: the learning rate does, or another" in shown
    for ignore in ("lr", "training.lr", "training"):
        shown = told(capsys, run.path, run.path.parent / "slow", ignore=ignore)
        assert "left out: training.lr\n" in shown and "0.001 → 0.0001" not in shown and "was altered" not in shown
    with pytest.raises(ConfigError, match="--ignore rl: no field or section of the configuration has this name"):
        diff(run.path, run.path.parent / "slow", ignore=["rl"], plot=None)


def test_other_groups_by_chance_come_after_what_follows_from_the_configuration(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asynchronous runs: the second has a tenth of the learning rate and lacks the first group of step 0."""
    batch = other.steps.read_data(0)
    other.steps.write_data(0, rows.to_table([row for row in batch if row.group_id != batch[0].group_id]))
    for step in range(6):
        path = other.steps.json_path(step)
        said = json.loads(path.read_text())
        said["config"]["training"] |= {"lr": 1e-4, "betas": [0.9, 0.99]}
        said["metrics"]["lr"] /= 10
        path.write_text(json.dumps(said))
    shown = told(capsys, run.path, other.path)
    assert re.search(r"FIRST DIFFERENCE  step 0, metrics: lr: .* which follows from training\.lr\n", shown)
    chance = "the runs took different groups, as asynchronous runs do by chance (rollout.max_lag)"
    assert f"{chance}: step 0, data: {batch[0].id}" in shown
    changes = "'training.betas=[0.9, 0.99]' training.lr=0.0001"
    assert f"`clew replay {run.path} {changes} trial=NAME`" in shown, shown
    shown = told(capsys, run.path, other.path, ignore="training")
    assert f"FIRST DIFFERENCE  step 0, data: {batch[0].id}" in shown


def test_other_groups_are_no_chance_if_the_batches_are_configured_to_be_smaller(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = other.steps.read_data(0)
    other.steps.write_data(0, rows.to_table([row for row in batch if row.group_id != batch[0].group_id]))
    text = other.config_path.read_text()
    other.config_path.write_text(re.sub(r"batch_groups: \d+", "batch_groups: 1", text))
    shown = told(capsys, run.path, other.path)
    assert "rollout.batch_groups: " in shown
    assert f"FIRST DIFFERENCE  step 0, data: {batch[0].id}" in shown and "by chance" not in shown


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
    seal(other)
    assert diff(run.path, other.path, ignore=[], plot=None) is same
    shown = capsys.readouterr().out
    assert ("(threads: 1 → 2)" in shown) is (threads == 2)
    assert (f"FIRST DIFFERENCE  step 1, data: {batch[0].id}, logprobs, token {position}" in shown) is not same


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86 libraries")
def test_a_run_with_other_instruction_sets_differs_by_rounding(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(folder, f"root={tmp_path}", "training.steps=2")
    learn_inline(config, lambda step, summary: None)
    limits = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    elsewhere = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "clew", "train", str(folder / "config.yaml")]
    changes = [f"root={tmp_path}", "trial=limited", "training.steps=2"]
    subprocess.run([*command, *changes], env=elsewhere, check=True, capture_output=True)
    first, limited = config.run_path, RunDirectory(tmp_path / "e" / "limited")
    assert diff(first, limited.path, ignore=["trial"], plot=None)
    shown = capsys.readouterr().out
    assert "then within 0.001" in shown or "compared within 0.001" in shown
    assert "(variables " in shown and "MKL_CBWR=COMPATIBLE" in shown
    path = limited.steps.json_path(0)  # below, without its instruction sets: larger differences are still found
    said = json.loads(path.read_text())
    del said["environment"]["rounding"]
    path.write_text(json.dumps(said))
    seal(limited)
    assert diff(first, limited.path, ignore=["trial"], plot=None)
    assert "does not say which CPU instruction sets" in capsys.readouterr().out
    position = generated_at(limited, 1, 0)
    name = change_stage(limited, 1, "loss", 0, position, 0.5)
    assert f"step 1, loss: {name}, token {position}" in told(capsys, first, limited.path)


def test_runs_without_a_step(run: RunDirectory, tmp_path: Path) -> None:
    empty = RunDirectory(tmp_path / "empty")
    with pytest.raises(RecordError, match="it has no committed step"):
        diff(run.path, empty.path, ignore=[], plot=None)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("group_id", "g000999", '"g0.*", second "g000999"'),
        ("episode_id", "g000999.e0", '"g0.*", second "g000999.e0"'),
        ("rewards", {"digits": 9.0}, '{"digits": .*, second {"digits": 9.0}'),
        ("finish_reason", "abort", '"(stop|length)", second "abort"'),
        ("images", ["0123.png"], r"\[\], second \[\"0123.png\"\]"),
    ],
)
def test_what_a_sequence_says_besides_its_tokens(
    run: RunDirectory, other: RunDirectory, column: str, value: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = other.steps.read_data(1)
    batch[2] = dataclasses.replace(batch[2], **{column: value})
    other.steps.write_data(1, rows.to_table(batch))
    shown = told(capsys, run.path, other.path)
    assert re.search(rf"FIRST DIFFERENCE  step 1, data: {batch[2].id}, {column}: first {said}", shown)


def test_nan_on_both_sides_is_no_difference(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (run, other):
        batch = each.steps.read_data(1)
        batch[2] = dataclasses.replace(batch[2], logprobs=np.full_like(batch[2].logprobs, np.nan))
        each.steps.write_data(1, rows.to_table(batch))
    assert "every stage of every step agrees" in told(capsys, run.path, other.path), "only the files were altered"


def test_what_an_interaction_says_but_for_its_times(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = other.steps.read_data(1)

    def put(**changes: Any) -> None:
        said = [*batch[2].interactions[:-1], batch[2].interactions[-1] | changes]
        other.steps.write_data(1, rows.to_table([*batch[:2], dataclasses.replace(batch[2], interactions=said)]))

    batch = [dataclasses.replace(row, admitted_at=1.0, started_at=2.0, consumed_at=3.0) for row in batch[:3]]
    run.steps.write_data(1, rows.to_table(run.steps.read_data(1)[:3]))
    for each in (run, other):
        each.steps.json_path(1).write_text(
            re.sub(r'"plan": \[+.*?\]\]\]', '"plan": []', each.steps.json_path(1).read_text())
        )
    put(started_at=4.0, finished_at=5.0)
    for each in (run, other):
        seal(each)
    assert diff(run.path, other.path, ignore=[], plot=None)
    capsys.readouterr()
    put(output_tokens=3)
    assert "output_tokens of interaction 0: first 10, second 3\n" in told(capsys, run.path, other.path)
    put(completion="another")
    assert 'completion of interaction 0: first "' in told(capsys, run.path, other.path)
    put(judge=1)
    assert "the keys of interaction 0: first " in told(capsys, run.path, other.path)


def test_the_order_of_the_sequences(run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    batch = other.steps.read_data(1)
    batch[1], batch[3] = batch[3], batch[1]
    other.steps.write_data(1, rows.to_table(batch))
    said = f"the order of the sequences, number 1: first {batch[3].id}, second {batch[1].id}"
    assert f"FIRST DIFFERENCE  step 1, data: {said}" in told(capsys, run.path, other.path)


def test_what_is_not_there_is_not_said_to_agree(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    other.steps.data_path(2).unlink()
    other.steps.prune(before=1)
    run.steps.prune(before=1)
    assert diff(run.path, other.path, ignore=[], plot=None)
    shown = capsys.readouterr().out
    assert "only first has the sequences of step 2: digests and metrics are compared, not its stages\n" in shown
    assert "neither has the sequences of step 0: " in shown
    assert "everything that was compared agrees.\n" in shown and "every stage" not in shown
    path = other.steps.json_path(2)
    path.write_text(re.sub('"grad_norm": [^,]*', '"grad_norm": 7', path.read_text()))
    shown = told(capsys, run.path, other.path)
    assert "FIRST DIFFERENCE  step 2, metrics: grad_norm: first " in shown and "only first has" in shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grad_norm": 1e-4}, "everything that was compared agrees.\n"),
        ({"grad_norm": 0.5}, "FIRST DIFFERENCE  step 1, metrics: grad_norm: first "),
        ({"groups": ["g000003", "g000004", "g9"]}, "FIRST DIFFERENCE  step 1, data: g000005: first present, second"),
    ],
)
def test_digests_of_another_environment_are_no_difference_where_the_sequences_are_gone(
    run: RunDirectory, other: RunDirectory, changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other.steps.json_path(1)
    summary = json.loads(path.read_text())
    summary["environment"]["threads"] = 2
    summary["digests"] = dict.fromkeys(summary["digests"], "0" * 16)
    summary["metrics"]["grad_norm"] += changes.get("grad_norm", 0)
    summary["groups"] = changes.get("groups", summary["groups"])
    path.write_text(json.dumps(summary))
    seal(other)
    run.steps.data_path(1).unlink()
    assert diff(run.path, other.path, ignore=[], plot=None) is said.startswith("everything")
    shown = capsys.readouterr().out
    assert said in shown
    assert "only second has the sequences of step 1: only the groups, reward, loss and grad_norm are compared" in shown


def test_a_stage_file_that_is_missing_or_of_another_step(run: RunDirectory, other: RunDirectory) -> None:
    paths = [other.steps.stage_path(step, 0) for step in (1, 2)]
    paths[0].rename(other.path / "aside")
    with pytest.raises(RecordError, match=r"second/steps/step-000001/rank-0\.parquet: it is missing"):
        diff(run.path, other.path, ignore=[], plot=None)
    paths[1].rename(paths[0])
    (other.path / "aside").rename(paths[1])
    with pytest.raises(
        RecordError, match=r"step-000001\.parquet has the sequence g0.*, and .*rank-0\.parquet does not"
    ):
        diff(run.path, other.path, ignore=[], plot=None)


def test_a_configuration_that_changed_nothing_is_noted(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other.steps.json_path(3)
    path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    seal(other)
    assert diff(run.path, other.path, ignore=[], plot=None)
    shown = capsys.readouterr().out
    assert "every stage of every step agrees.\nbut the configuration of step 3 differs (first → second):\n" in shown
    assert "  training.lr: 0.001 → 0.002\n" in shown
    assert diff(run.path, other.path, ignore=["lr"], plot=None)
    assert "and yet" not in capsys.readouterr().out


def test_a_plan_of_other_sequences(run: RunDirectory, other: RunDirectory) -> None:
    path = other.steps.json_path(3)
    path.write_text(re.sub(r'"plan": \[+.*?\]\]\]', '"plan": [[[99]]]', path.read_text()))
    with pytest.raises(
        RecordError, match=r"step-000003\.json plans with more sequences than .*step-000003\.parquet has"
    ):
        diff(other.path, run.path, ignore=[], plot=None)
