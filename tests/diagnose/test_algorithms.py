"""Runs with the options of the field's algorithms, and with a user's own: recorded, resumed, replayed and blamed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clew import config as configuration
from clew.algorithms import PRESETS
from clew.cli.record import bundle
from clew.config import Config
from clew.diagnose.attribution import attribute_step
from clew.diagnose.blame import blame
from clew.diagnose.rerun import Options, rerun
from clew.loop.replay import engine_at
from clew.loop.trainer_process import learn_inline
from clew.record.bundle import opened, write_bundle
from clew.record.rows import Sequence
from clew.record.run import RunDirectory
from clew.training.custom import digest_of_file
from clew.training.sequence_gradients import contributions
from tests.diagnose.planted import REWARD, change_stage, configure, generated_at

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "my_algorithm" / "train.yaml"


@pytest.fixture(autouse=True)
def rewards(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "planted_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(tmp_path)


def decayed(sequences: list[Sequence]) -> list[np.ndarray]:
    """Return advantages that decay from token to token, as a user might."""
    return [(row.reward - 0.1) * 0.9 ** np.arange(len(row.input_ids))[::-1] for row in sequences]


REJECTION = ["algorithm.reject={by: ratio, over: token, low: 0.97, high: 1.03}", "algorithm.veto=0.9"]


def train(config: Config) -> RunDirectory:
    learn_inline(config, lambda step, summary: None)
    return RunDirectory(config.run_path)


def replays(run: RunDirectory, steps: str | None = None, stages: str | None = None) -> bool:
    return rerun(run.path, Options(steps=steps, stages=stages))


@pytest.mark.parametrize(
    "options",
    [
        *([f"algorithm.preset={preset}"] for preset in PRESETS),
        ["algorithm.importance=sequence_mask", "algorithm.dual_clip=3", "algorithm.kl_estimator=k2"],
        ["algorithm.entropy_coef=0.05"],
        REJECTION,
        ["algorithm.off_policy_delta=0.01", "algorithm.kl_times_ratio=true"],
        ["training.lora_rank=4"],
        [f"algorithm.advantages={__name__}.decayed"],
    ],
    ids=[*PRESETS, "others", "entropy", "rejection", "delta", "lora", "tokens"],
)
def test_each_algorithm_trains_and_replays(
    folder: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(configure(folder, f"root={tmp_path}", "training.steps=3", *options))
    assert replays(run) and "compared bit for bit" in capsys.readouterr().out
    assert replays(run, stages="data,rewards,advantages,loss")
    position = generated_at(run, 2, 1)
    name = change_stage(run, 2, "loss", 1, position, 0.01)
    assert not replays(run, "2", stages="advantages,loss")
    assert f"step 2, loss: {name}, token {position}" in capsys.readouterr().out
    engine = engine_at(run, 2)
    assert engine.version == 2
    parts = list(contributions(engine, engine.prepare(run.steps.read_data(2))))
    for update in {part.update for part in parts}:
        assert sum(part.share for part in parts if part.update == update) == pytest.approx(1, abs=1e-3)
    total = sum(float(part.losses_N.sum()) for part in parts) / sum(len(part.losses_N) for part in parts)
    assert total == pytest.approx(run.steps.read(2)["metrics"]["loss"], abs=1e-4)


def example(folder: Path, tmp_path: Path, *overrides: str) -> Config:
    return configuration.load(
        EXAMPLE,
        [
            f"root={tmp_path}",
            f"model.path={folder}/model",
            f"data.path={folder}/prompts.jsonl",
            "rollout.reward=planted_rewards.digits",
            "rollout.batch_groups=3",
            "rollout.n_samples=3",
            "training.steps=4",
            "training.lr=1e-3",
            "checkpoint.every_steps=2",
            "launch.mode=inline",
            "launch.threads=1",
            *overrides,
        ],
    )


def test_the_example_trains_records_resumes_and_replays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(example(folder, tmp_path))
    assert run.steps.read(0)["code"].keys() == {
        *(f"algorithm.{name}" for name in ("preset", "advantages", "loss")),
        "rollout.reward",
    }
    metrics = run.steps.read(3)["metrics"]
    assert 0 <= metrics["loss/tapered"] <= 1 and np.isfinite(metrics["loss"])
    for step in range(4):
        batch, stages = run.steps.read_data(step), run.steps.read_stages(step).arrays
        each = np.array([stages["advantages"][row.id][row.loss_mask][0] for row in batch])
        assert each.mean() == pytest.approx(0, abs=1e-5) and each.std() == pytest.approx(1, abs=1e-3)
    assert replays(run) and replays(run, stages="advantages,loss")
    assert "compared bit for bit" in capsys.readouterr().out
    bundle(run.path, 3, to=tmp_path / "bundle.clew.zip")
    said = capsys.readouterr().out
    assert "It holds no code: algorithm.loss=examples.my_algorithm.algorithm.loss must be importable there." in said
    assert "preset" not in said and "--trust examples.my_algorithm`" not in said, "a replay does not load it"
    copy = run.path.parent / "resumed"
    shutil.copytree(run.path, copy)
    for late in ("step-000002", "step-000004"):
        shutil.rmtree(copy / "checkpoints" / late)
    resumed = train(example(folder, tmp_path, "trial=resumed"))
    assert resumed.steps.index() == run.steps.index()


LOSS = """
def loss(logprobs_N, advantages_N):
    return -logprobs_N * advantages_N, {}
"""


def test_code_that_was_changed_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any):
    mine = tmp_path / "edited.py"
    mine.write_text(f"{LOSS}\n\ndef advantages(sequences):\n    return [each.reward for each in sequences]\n")
    options = ("algorithm.loss=edited.loss", "algorithm.advantages=edited.advantages")
    run = train(example(folder, tmp_path, *options, "training.steps=1"))
    assert replays(run)
    assert {"algorithm.loss", "algorithm.advantages", "rollout.reward"} < set(run.steps.read(0)["code"])

    def edit(was: str, now: str) -> None:
        mine.write_text(mine.read_text().replace(was, now))
        sys.modules.pop("edited")
        digest_of_file.cache_clear()  # as in another process

    edit("-logprobs_N", "-2 * logprobs_N")
    for stages in (None, "loss"):
        assert not replays(run, "0", stages)
        assert "the file of algorithm.loss was changed since" in capsys.readouterr().out
    edit("each.reward", "each.reward + 1")
    assert not replays(run, "0", "advantages")
    assert "the file of algorithm.advantages was changed since" in capsys.readouterr().out
    edit("def loss(", "def renamed(")  # which its advantages do without
    assert not replays(run, "0", "advantages")
    edit("def renamed(", "def loss(")
    train(example(folder, tmp_path, *options, "training.steps=2", "training.schedule=constant"))
    assert "the file of algorithm.loss has changed since step 0 was trained" in caplog.text
    sys.modules.pop("edited")


CHANCE = """
import random

def loss(logprobs_N, advantages_N):
    return -logprobs_N * advantages_N * (1 + 0.1 * random.random()), {}
"""


def test_a_loss_that_is_not_deterministic_is_suspected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "by_chance.py").write_text(CHANCE)
    run = train(example(folder, tmp_path, "algorithm.loss=by_chance.loss", "training.steps=1"))
    for stages in (None, "loss"):
        assert not replays(run, "0", stages)
        shown = capsys.readouterr().out
        assert "FIRST DIFFERENCE  step 0, loss: " in shown
        assert "algorithm.loss is not deterministic: computed twice here, it gave two results" in shown
        assert ("its inputs agree; " in shown) == (stages is None)
    sys.modules.pop("by_chance")


def test_random_numbers_of_torch_replay_but_for_a_stage_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = "(1 + torch.rand_like(logprobs_N))"
    (tmp_path / "drawn.py").write_text(
        CHANCE.replace("(1 + 0.1 * random.random())", drawing).replace("random\n", "torch\n")
    )
    run = train(example(folder, tmp_path, "algorithm.loss=drawn.loss", "training.steps=1"))
    assert replays(run)
    assert not replays(run, "0", "loss")
    assert "algorithm.loss draws random numbers (aten.rand_like.default), which have" in capsys.readouterr().out
    change_stage(run, 0, "loss", 0, generated_at(run, 0, 0), 0.1)
    assert not replays(run)
    assert "its inputs agree; the file of algorithm.loss is the same: the record of it was altered" in (
        capsys.readouterr().out
    )
    sys.modules.pop("drawn")


def test_what_was_rejected_is_replayed_and_blamed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(configure(folder, f"root={tmp_path}", "training.steps=4", *REJECTION))
    stages, metrics = run.steps.read_stages(3).arrays["rejected"], run.steps.read(3)["metrics"]
    assert 0 < metrics["rejected_share"] < 1 and metrics["lag_max"] == 1
    bundled = write_bundle(run, 3, stages_only=True, to=tmp_path / "x.stages.clew.zip")
    with opened(bundled) as (recorded, _):
        both = [(attribute_step(run, 3), False), (attribute_step(recorded, 3), True)]
    for found, only_recorded in both:
        assert bool(found.only_recorded) == only_recorded
        for part in found.sequences:
            why = stages[part.sequence.id][part.sequence.loss_mask]
            assert np.array_equal(part.tokens["rejected"], why) and part.shown["rejected"] == (why > 0).mean()
            assert not part.tokens["pull"][why > 0].any() and not part.tokens["loss"][why > 0].any()
    blame(run.path, 3, top=2, tokens=3, by=None)
    assert "rejected" in capsys.readouterr().out
    name = change_stage(run, 3, "rejected", 1, position := generated_at(run, 3, 1), 1)
    assert not replays(run, "3")
    assert f"step 3, rejected: {name}, token {position}: recorded " in capsys.readouterr().out
