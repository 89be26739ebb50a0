"""Whole runs of models that see: what the agent showed is on record, and trained on, and replayed, as it was served."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from clew import config as configuration
from clew.config import Config
from clew.errors import RecordError, TrainingError
from clew.loop.replay import engine_at
from clew.loop.trainer_process import learn_from_record
from clew.record.bundle import write_bundle
from clew.record.media import UNUSED_S, media_name
from clew.record.run import RunDirectory
from clew.training.engine import TrainEngine
from clew.training.sequence_gradients import contributions
from tests.loop import runs
from tests.loop.runs import learn, replays
from tests.models import picture, seeing_model

FAMILIES = ("llava", pytest.param("paddleocr_vl", marks=pytest.mark.slow))


def configure(folder: Path, family: str, trial: str, **changes: object) -> Config:
    rows = [{"prompt": f"{i}?", "color": color} for i, color in enumerate(["red", "blue", "red", "white"] * 3)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sections = (
        "experiment: images\n"
        "rollout: {agent: tests.loop.agents.Looks, batch_groups: 2, n_samples: 3}\n"
        "sampling: {max_new_tokens: 8}\n"
        "training: {steps: 3, lr: 1e-3, micro_batch_tokens: 150}\n"
        "algorithm: {minibatches: 2, kl_coef: 0.01}\n"
        "checkpoint: {every_steps: 2}\n"
    )
    return runs.configure(folder, sections, trial, changes, model=family)


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp(request.param)
    seeing_model(folder / request.param, request.param)
    return learn(configure(folder, request.param, "first"))


def test_an_episode_is_one_sequence_with_the_images_that_were_shown(run: RunDirectory) -> None:
    for row in run.steps.read_data(0):
        assert row.images == [media_name(picture(row.data["color"], 24)), media_name(picture("green", 48))]
        assert [len(said["images"]) for said in row.interactions] == [1, 2]
        assert row.interactions[0]["prompt"][0]["content"][1] == {"type": "image", "image": row.images[0]}
    shown = {name for step in range(3) for row in run.steps.read_data(step) for name in row.images}
    assert {path.name for path in run.media.folder.iterdir()} == shown
    assert run.media.read(media_name(picture("green", 48))) == picture("green", 48)


def test_trainer_and_engine_see_the_same(run: RunDirectory) -> None:
    for step in range(3):
        assert run.steps.read(step)["metrics"]["behaviour_gap_max"] < 1e-4


def test_steps_replay_bit_for_bit(run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replays(run.path, None) and "compared bit for bit" in capsys.readouterr().out
    bundle = write_bundle(run, 2, stages_only=False, to=tmp_path / "step.clew.zip")
    assert replays(bundle, None) and "compared bit for bit" in capsys.readouterr().out


def test_blame_computes_with_the_images(run: RunDirectory) -> None:
    engine, batch, stages = engine_at(run, 2), run.steps.read_data(2), run.steps.read_stages(2).arrays
    parts = list(contributions(engine, engine.prepare(batch)))
    assert sorted(part.row for part in parts) == list(range(len(batch)))
    for part in parts:
        row = batch[part.row]
        np.testing.assert_allclose(part.logprobs_N, stages["logprobs"][row.id][row.loss_mask], atol=1e-5)


def test_a_killed_run_goes_on_with_the_same_weights(run: RunDirectory, tmp_path: Path) -> None:
    """Replay from the first checkpoint on, whose folder holds all that a model that sees needs."""
    root, family = run.path.parent.parent.parent, configuration.load(run.config_path).model.path.rpartition("/")[2]
    again = root / "runs" / "images" / "again"
    shutil.copytree(run.path, again)
    for folder in again.glob("checkpoints/step-*"):
        if folder.name != "step-000000":
            shutil.rmtree(folder)
    assert learn(configure(root, family, "again")).steps.index() == run.steps.index()
    assert (again / "checkpoints" / "step-000003" / "processor_config.json").exists()


def test_batches_of_another_run_bring_their_images(run: RunDirectory, tmp_path: Path) -> None:
    root, family = run.path.parent.parent.parent, configuration.load(run.config_path).model.path.rpartition("/")[2]
    recorded = {"debug.replay_rollout_data": True, "debug.path": run.path, "training.lr": 1e-4}
    config = configure(root, family, "recorded", **recorded)
    learn_from_record(config, lambda step, summary: None)
    new = RunDirectory(config.run_path)
    assert new.steps.count() == 3
    assert {path.name for path in new.media.folder.iterdir()} == {path.name for path in run.media.folder.iterdir()}


def test_an_image_that_is_gone_or_another_is_named(run: RunDirectory, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    green = copy / "media" / media_name(picture("green", 48))
    green.write_bytes(picture("red", 48))
    with pytest.raises(RecordError, match=rf"{green.name} has other content than when it was written"):
        replays(copy, "0")
    green.unlink()
    with pytest.raises(RecordError, match=rf"Cannot read .*{green.name}: it is missing"):
        replays(copy, "0")


def test_tokens_of_another_processor_are_refused(run: RunDirectory) -> None:
    engine = TrainEngine(configuration.load(run.config_path), media=run.media)
    row = run.steps.read_data(0)[0]
    row.input_ids[row.input_ids == engine.policy.vision.image_id] = 7  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(TrainingError, match=rf"{row.id}: Cannot match the images .* has image token .* 0 times"):
        engine.train_step([row])


def test_images_are_kept_as_long_as_anything_refers_to_them(run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "copy")
    copy = RunDirectory(tmp_path / "copy")
    unused, recent = copy.media.put(b"shown to nobody"), copy.media.put(b"shown just now")
    for path in copy.media.folder.iterdir():
        if path.name != recent:
            os.utime(path, (0, path.stat().st_mtime - 2 * UNUSED_S))
    copy.prune(2)
    names = {path.name for path in copy.media.folder.iterdir()}
    assert unused not in names and recent in names
    assert names - {recent} == {name for row in copy.steps.read_data(2) for name in row.images}
