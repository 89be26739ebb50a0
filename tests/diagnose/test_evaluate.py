"""`clew eval` on a run's checkpoints and on a model: the numbers, the file, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from clew.cli.main import app
from clew.errors import ConfigError, DataError, ModelError, RolloutError
from clew.loop.trainer_process import learn_inline
from clew.models.loading import load_tokenizer
from clew.record import rows
from clew.record.run import RunDirectory
from clew.rollout.evaluation_summary import interval, pass_interval
from clew.rollout.long_prompts import count_tokens
from tests.diagnose.planted import configure


@pytest.fixture
def held_out(folder: Path, tmp_path: Path) -> str:
    path = tmp_path / "held_out.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i} + 2 ="}) for i in range(5)))
    return str(path)


def evaluated(*models: Path | str, **given: str) -> str:
    """Run the command with options (data, reward, to) and overrides (eval__n_samples), and return what it prints."""
    options = [f"--{name}={given.pop(name)}" for name in ("data", "reward", "to") if name in given]
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in given.items()]
    with redirect_stdout(io.StringIO()) as out:
        app(["eval", *map(str, models), *overrides, *options], standalone_mode=False)
    return out.getvalue()


def test_intervals_by_hand() -> None:
    """The published values of Wilson's interval: 5 of 10, 10 of 10, and 20 of 40."""
    assert pass_interval([1.0] * 5 + [0.0] * 5, 1) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert pass_interval([1.0] * 10, 8) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert pass_interval([0.5] * 10, 4) == pytest.approx((0.3520, 0.6480), abs=1e-4)
    assert pass_interval([1.0] * 5 + [0.0] * 5, 8) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert interval([0.0, 1.0, 2.0, 3.0]) == pytest.approx((1.5 - 1.2652, 1.5 + 1.2652), abs=1e-4)
    assert pass_interval([], 1) is None and interval([1.0]) is None


def test_checkpoints_and_a_model_are_compared_on_the_same_prompts(
    run: RunDirectory, folder: Path, held_out: str, tmp_path: Path
) -> None:
    (tmp_path / "lr=1e-5").symlink_to(folder / "model")
    models = ["runs/e/first", "runs/e/first/checkpoints/step-000000", "./lr=1e-5"]
    to = tmp_path / "episodes.parquet"
    shown = evaluated(
        *models,
        data=held_out,
        to=str(to),
        eval__n_samples="4",
        eval__temperature="1",
        eval__pass_above="0.3",
    )
    table = pq.read_table(to).to_pylist()
    assert len(table) == 3 * 5 * 4 and str(to) in shown
    for model in models:
        own = [row for row in table if row["model"] == model]
        assert [row["row"] for row in own[::4]] == [0, 1, 2, 3, 4]
        assert all(row["passed"] == (row["reward"] > 0.3) for row in own)
        [line] = [line for line in shown.splitlines() if line.startswith(f"{model} ")]
        cells = line.split()
        assert float(cells[1]) == pytest.approx(sum(row["passed"] for row in own) / 20, abs=6e-4)
        low, high = float(cells[2]), float(cells[4])
        assert 0 <= low <= float(cells[1]) <= high <= 1
    assert "best" in shown and "pass@4" in shown and "5 prompts, 4 samples each at temperature 1" in shown
    assert "reward is above 0.3" in shown


def test_a_run_of_preferences_can_be_evaluated(run: RunDirectory, held_out: str, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "preferences")
    values = yaml.safe_load((copy / "config.yaml").read_text())
    values["training"]["objective"], values["algorithm"]["kl_coef"] = "dpo", 0.1
    (copy / "config.yaml").write_text(yaml.safe_dump(values))
    assert "5 prompts" in evaluated(copy, data=held_out)


def test_a_prompt_too_long_for_one_model_is_left_out_for_all(run: RunDirectory, folder: Path, tmp_path: Path) -> None:
    path, to = tmp_path / "rows.jsonl", tmp_path / "episodes.parquet"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("123456 + 2 =", "1 + 2 =")))
    longer = shutil.copytree(folder / "model", tmp_path / "longer")
    values = json.loads((longer / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Prepend", "prepend": "01"}
    (longer / "tokenizer.json").write_text(json.dumps(values))
    [limit, _], lengths = (
        count_tokens(["123456 + 2 =", "1 + 2 ="], load_tokenizer(str(each))) for each in (folder / "model", longer)
    )
    assert lengths[0] > limit >= lengths[1]
    evaluated(run.path, longer, data=str(path), to=str(to), data__max_prompt_tokens=str(limit))
    assert [(each["model"], each["row"]) for each in pq.read_table(to).to_pylist()] == [
        (str(run.path), 1),
        (str(longer), 1),
    ]


def test_a_run_gives_the_numbers_of_its_own_evaluation(
    folder: Path, held_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configure(
        folder, f"root={tmp_path}/runs", f"eval.path={held_out}", "training.steps=2", "rollout.max_lag=0"
    )
    learn_inline(config, lambda step, summary: None)
    run = RunDirectory(config.run_path)
    assert (run.checkpoints / "best").resolve().name == f"step-{run.evals.best([0, 2], []):06d}"
    then = rows.read_table(run.evals.folder / "version-000002.parquet").to_pylist()
    to = tmp_path / "episodes.parquet"
    evaluated(run.path, to=str(to))
    now = pq.read_table(to).to_pylist()
    assert [(row["episode"], row["reward"]) for row in now] == [(row["episode_id"], row["reward"]) for row in then]


def test_a_checkpoint_that_is_named_from_its_own_folder_has_the_settings_of_its_run(
    run: RunDirectory, held_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.checkpoints)
    assert "5 prompts" in evaluated("step-000000", data=held_out)


def test_the_reward_is_that_of_the_first_run_that_names_one(run: RunDirectory, held_out: str, tmp_path: Path) -> None:
    """Evaluate `SFT GRPO`, as after `clew sft`, whose run names no reward."""
    without = tmp_path / "runs" / "e" / "sft"
    shutil.copytree(run.path, without)
    values = yaml.safe_load((without / "config.yaml").read_text())
    values["rollout"].pop("reward")
    values["eval"] = {"n_samples": 3}
    (without / "config.yaml").write_text(yaml.safe_dump(values))
    shown = evaluated(without, run.path, data=held_out)
    assert "5 prompts, 1 sample each" in shown
    with pytest.raises(ConfigError, match="Add --reward"):
        evaluated(without, data=held_out)


def test_prompts_that_do_not_pass_and_failed_episodes_are_named(
    run: RunDirectory, held_out: str, tmp_path: Path
) -> None:
    shown = evaluated(run.path, data=held_out, eval__pass_above="100")
    assert f"5 of 5 prompts did not pass with {run.path}:" in shown and "0/1" in shown and "3 + 2 =" in shown
    (tmp_path / "picky_rewards.py").write_text(
        "def no_threes(completion, data):\n"
        "    if '3' in data['prompt']:\n"
        "        raise ValueError('a three')\n"
        "    return 1.0\n"
    )
    shown = evaluated(run.path, data=held_out, reward="picky_rewards.no_threes")
    assert f"1 episode of {run.path} failed" in shown and "1 x " in shown and "ValueError: a three" in shown
    assert "did not pass" not in shown


def test_what_cannot_be_evaluated_is_refused(run: RunDirectory, folder: Path, held_out: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Add --data FILE"):
        evaluated(run.path)
    with pytest.raises(ConfigError, match="Add --reward"):
        evaluated(folder / "model", data=held_out)
    with pytest.raises(DataError, match="does not exist"):
        evaluated(run.path, data=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"there is no field 'eval\.samples'"):
        evaluated(run.path, data=held_out, eval__samples="3")
    with pytest.raises(RolloutError, match=r"All 5 episodes of .* failed, the first with"):
        evaluated(run.path, data=held_out, reward="tests.rollout.user_code.raises")
    with pytest.raises(ConfigError, match=r"Cannot write .*nowhere/episodes\.parquet"):
        evaluated(run.path, data=held_out, to=str(tmp_path / "nowhere" / "episodes.parquet"))
    with pytest.raises(ModelError, match=r"there is no checkpoint .*step-000077; there are step-000000, "):
        evaluated(run.checkpoints / "step-000077", data=held_out)
