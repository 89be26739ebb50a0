"""The live picture of `clew train` in narrow terminals: the numbers that matter are there, and no advice is cut off."""

from __future__ import annotations

import io
import logging
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from clew import console
from clew.record.bundle import opened, write_bundle
from clew.record.run import RunDirectory
from clew.view.learning_curve import _draw_seconds, draw_curves
from clew.view.live_table import Progress, step_cells
from clew.view.status import read_statuses, show_status
from tests.training.sequences import make_config
from tests.view.test_show import METRICS, commit, group
from tests.view.test_show import shown as shown_record

ADVICE = "nothing to learn for 8 steps: " + " ".join(f"word{number}" for number in range(40)) + " the end of it"
SECONDS = "waiting 0.21  training 0.52  recording 0.03"
CELLS = ("0.125", "12.5", "0.50/1", "1.2e-07", "-", "0.31", "1,234", "12,345", SECONDS)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 30)])
def test_step_reward_and_length_are_always_there_and_advice_is_whole(tmp_path: Path, width: int, height: int) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.report("trainer") as reporter:
        reporter.set(doing="training", version=7, warning=ADVICE)
        reporter.write()
        console = Console(file=io.StringIO(), soft_wrap=True, width=width, height=height, record=True)
        progress = Progress(run, 100, console=console)
        progress._recent = [(str(step), *CELLS) for step in range(12)]
        console.print(progress._picture())
    shown = console.export_text()
    lines = shown.splitlines()
    assert len(lines) < height and max(map(len, lines)) <= width
    assert re.search(r"step +reward +length", shown) and re.search(r"11 +0\.125 +12\.5", shown)
    assert " ".join(ADVICE.split()) in " ".join(shown.split())
    assert ("recording 0.03" in shown) == (width == 120)


def test_a_line_of_a_step_has_what_was_rejected_only_if_anything_can_be(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    output = Console(file=io.StringIO(), soft_wrap=True, width=200, record=True)
    progress = Progress(run, 2, console=output)
    more = {"tokens_trained": 16.0, "tokens": 28.0}
    commit(run, 0, group("g000000"), metrics=METRICS | more)
    commit(run, 1, group("g000001"), metrics=METRICS | more | {"rejected_share": 0.4375})
    progress.refresh(final=True)
    without, with_it = output.export_text().splitlines()
    assert without.startswith("step 0/2  reward 0.250") and "rejected" not in without
    assert "  k3 0.0e+00  rejected 43.8%  grad norm 0.75  " in with_it


def test_status_lists_the_warnings(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    shown = Console(file=io.StringIO(), width=120, record=True)
    with run.report("rollout") as reporter:
        reporter.write()
        show_status(shown, run)
        assert "rollout" in (before := shown.export_text()) and "warning" not in before
        for number in (4, 5):
            logging.getLogger("clew.rollout").warning("a tool was slow: %d s", number)
        show_status(shown, run)
    assert "warning  rollout, 2 times: a tool was slow: 5 s\n" in shown.export_text()


TRAINER = """
import sys, time
from pathlib import Path
from clew.record.run import RunDirectory
from clew.waits import waiting
run = RunDirectory(Path(sys.argv[1]))
with run.hold("trainer"), run.report("trainer") as reporter, waiting("a batch", unblocks="rollout"):
    reporter.set(doing="training", version=2)
    reporter.write()
    print("training", flush=True)
    time.sleep(60)
"""


def status_of(run: RunDirectory) -> str:
    show_status(output := Console(file=io.StringIO(), width=120, record=True), run)
    return output.export_text()


def test_a_run_that_was_killed_has_ended_at_once_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.describe(make_config("a/model"), threads=2)
    go_on = "The run has ended at step {} of 20. Start it again with the same command to go on.\n"
    assert "has ended" not in shown_record(run), "no process has begun"
    command = [sys.executable, "-c", TRAINER, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "training\n"
        alive = status_of(run)
        assert "a batch" in alive and "ended" not in alive + shown_record(run)
        trainer.kill()
    killed = status_of(run)
    assert f"ended (pid {trainer.pid} is gone)" in " ".join(killed.split()) and "a batch" not in killed
    assert go_on.format(0) in killed and go_on.format(0) in shown_record(run)
    commit(run, 0, group("g000000"))
    assert go_on.format(1) in status_of(run)
    with run.hold("rollout"), run.report("rollout"):
        assert "The run has ended" not in status_of(run), "its rollout goes on"
    for step in range(1, 20):
        commit(run, step, group(f"g{step:06d}"))
    assert "The run has ended" not in status_of(run), "it is complete"


def test_a_replay_with_other_settings_is_complete_before_the_last_step_of_its_configuration(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.describe(make_config("a/model", debug={"replay_rollout_data": True, "path": "runs/other"}), threads=2)
    with run.report("trainer"):
        pass
    assert "The run has ended" not in status_of(run)


def test_status_has_the_line_of_an_error_that_says_what_is_wrong_below_the_table(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.describe(make_config("a/model"), threads=2)
    with pytest.raises(RuntimeError, match="CUDA"), run.report("trainer"):
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.\n")
    with pytest.raises(ValueError, match="Traceback"), run.report("rollout"):
        raise ValueError("Traceback (most recent call last):\n  File x, line 1\nKeyError: 'answer'\n")
    text = status_of(run)
    assert re.search(r"rollout +failed", text) and "\nrollout: KeyError: 'answer'\n" in text
    assert "\ntrainer: RuntimeError: CUDA error: out of memory\n" in text and "TORCH_USE" not in text
    (run.status / "trainer.json").write_text((run.status / "rollout.json").read_text().replace("rollout", "trainer"))
    assert "failed with KeyError: 'answer'. Start it again" in " ".join(shown_record(run).split())
    assert "Traceback" not in text


def test_a_long_command_says_what_it_does_after_two_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SILENT_S", 0.05)
    assert list(console.tracked([1, 2], "adding", total=2, unit="numbers")) == [1, 2]
    assert capsys.readouterr() == ("", "")
    for _ in console.tracked([1], "adding", total=1, unit="numbers"):
        time.sleep(0.5)
    assert capsys.readouterr() == ("", "adding: 1 number\n")


def test_what_cannot_be_read_is_said_once_and_ends_neither_the_run_nor_the_live_picture(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, soft_wrap=True, width=200, highlight=False)
    progress = Progress(run, 3, console=console)
    with pytest.raises(KeyError, match="of the block"), progress:
        run.steps.json_path(0).write_text("garbage")
        (run.evals.folder / "version-000000.json").write_text("garbage")
        progress.refresh(final=True)
        commit(run, 1, group("g000001"), metrics=METRICS | {"tokens_trained": 16.0})
        raise KeyError("of the block")
    said = output.getvalue()
    assert said.count("step-000000.json: expected JSON") == said.count("version-000000.json: expected JSON") == 1
    assert progress._recent[-1][0] == "1"
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is shown again"


def test_the_seconds_of_a_step_are_complete() -> None:
    timings = {"rollout": 1.0, "critic": 2.0, "publish": 0.25, "publish/load": 0.25}
    metrics = METRICS | {"tokens_trained": 16.0}
    assert step_cells({"step": 0, "metrics": metrics, "timings": timings})[-1] == (
        "waiting 1.00  publishing 0.50  other 2.00"
    )
    axis = Figure().subplots()
    _draw_seconds(axis, [{"step": step, "timings": timings} for step in range(3)])
    assert axis.dataLim.ymax == pytest.approx(3.5)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from now on."""
    figures, save = list[Figure](), Figure.savefig

    def saved(figure: Figure, *given: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def test_the_curves_show_a_single_step_and_where_a_metric_is_not_finite(tmp_path: Path, drawn: list[Figure]) -> None:
    run = RunDirectory(tmp_path / "run")
    commit(run, 0, group("g000000"), metrics=METRICS | {"clip_share": 0.25})
    draw_curves(run, tmp_path / "one.png")
    commit(run, 1, group("g000001"), metrics=METRICS | {"reward": math.nan})
    commit(run, 2, group("g000002"), metrics=METRICS | {"clip_share": 0.5})
    draw_curves(run, tmp_path / "three.png")
    one, three = ({axis.get_title().split()[0]: axis for axis in figure.axes} for figure in drawn)
    [dot] = one["reward"].lines
    assert dot.get_marker() == "." and one["seconds"].dataLim.bounds == (-0.5, 0.0, 1.0, 2.0)
    [reward], [clipped] = three["reward"].lines, three["clip"].lines
    assert np.isnan(reward.get_ydata()).tolist() == [False, True, False], "no line leads over the step with NaN"
    assert np.array(clipped.get_xdata()).tolist() == [0, 2], "a step without the metric is left out"


def test_the_title_of_the_curves_names_the_run_also_for_a_bundle(tmp_path: Path, drawn: list[Figure]) -> None:
    run = RunDirectory(tmp_path / "lr$x_$")  # which matplotlib would take for a formula
    commit(run, 0, group("g000000"))
    draw_curves(run, tmp_path / "one.png")
    run.describe(make_config("a/model"), threads=2)
    with opened(write_bundle(run, 0, stages_only=True, to=tmp_path / "step.clew")) as (bundle, _):
        draw_curves(bundle, tmp_path / "two.png")
    assert [figure.get_suptitle() for figure in drawn] == [f"{tmp_path.name} / lr$x_$", "test / step.clew"]


def test_several_servers_are_always_in_the_order_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may list a file that was just written first or last."""
    run = RunDirectory(tmp_path / "run")
    for name in ("server", "server-1", "server-2", "server-10", "rollout", "trainer"):
        with run.report(name):
            pass
    listed, glob = [True, False], Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: sorted(glob(path, pattern), reverse=listed.pop()))
    names = ["trainer", "rollout", "server", "server-1", "server-2", "server-10"]
    assert [[each["process"] for each in read_statuses(run)] for _ in range(2)] == [names, names]


def test_a_copy_of_an_evaluation_or_a_damaged_old_one_does_not_end_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    (run.evals.folder / "version-000000.json").write_text("garbage")
    output = Console(file=io.StringIO(), soft_wrap=True, width=200, record=True)
    progress = Progress(run, 2, console=output)
    for version in (8, 4):
        run.evals.write(version, [], {"pass@1": version / 10})
    (run.evals.folder / "version-000004 (copy).json").write_bytes(
        (run.evals.folder / "version-000004.json").read_bytes()
    )
    progress.refresh(final=True)
    shown = output.export_text()
    assert shown.index("version 4: pass@1 40.0%") < shown.index("version 8: pass@1 80.0%")
    progress.refresh(final=True)
    assert output.export_text() == "", "each is shown once"
