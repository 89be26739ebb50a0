"""The live picture of `clew train` in narrow terminals: the numbers that matter are there, and no advice is cut off."""

from __future__ import annotations

import io
import logging
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from clew import console
from clew.record.run import RunDirectory
from clew.view.terminal import Progress, show_status
from tests.view.test_show import METRICS, commit, group

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


def test_a_long_command_says_what_it_does_after_two_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "SILENT_S", 0.05)
    assert list(console.tracked([1, 2], "adding", total=2, unit="numbers")) == [1, 2]
    assert capsys.readouterr() == ("", "")
    for _ in console.tracked([1], "adding", total=1, unit="numbers"):
        time.sleep(0.5)
    assert capsys.readouterr() == ("", "adding: 1 numbers\n")
