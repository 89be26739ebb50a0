"""TensorBoard's files of a run that was restarted, read with TensorBoard's own reader."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clew.loop.tensorboard import Tensorboard
from clew.record.run import RunDirectory


def test_each_step_and_evaluation_is_shown_once_after_a_restart(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)

    def evaluate(version: int) -> None:
        run.evals.write(version, [], {"pass@1": version / 10})

    def add(board: Tensorboard, *steps: int) -> None:
        for step in steps:
            board.add(step, {"metrics": {"loss": float(step)}, "timings": {"train": 1.0}})

    for version in (0, 2):
        evaluate(version)
    killed = Tensorboard(run, first_step=0)
    add(killed, 0, 1, 2, 3)
    killed.close()
    restarted = Tensorboard(run, first_step=2)
    evaluate(1)
    add(restarted, 2, 3)
    evaluate(4)  # after the last step
    restarted.close()
    shown = EventAccumulator(str(run.reports / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("loss")] == [0, 1, 2, 3]
    assert sorted(event.step for event in shown.Scalars("eval/pass@1")) == [0, 1, 2, 4]
    assert set(shown.Tags()["scalars"]) == {"loss", "seconds/train", "eval/pass@1"}


def test_without_tensorboard_training_goes_on_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = RunDirectory(tmp_path)
    with caplog.at_level(logging.WARNING):
        board = Tensorboard(run, first_step=0)
        board.add(0, {"metrics": {"loss": 1.0}, "timings": {}})
        board.close()
    assert len(caplog.records) == 1 and not (run.reports / "tensorboard").exists()


def test_a_folder_that_cannot_be_written_stops_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory(tmp_path)
    run.reports.mkdir(exist_ok=True)
    (run.reports / "tensorboard").write_text("a file is in the way")
    board = Tensorboard(run, first_step=0)
    board.add(0, {"metrics": {"loss": 1.0}, "timings": {}})
    board.close()
    assert "Cannot write TensorBoard's files" in caplog.text
