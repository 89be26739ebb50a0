"""Warnings of all processes are kept in the run, shown on stderr by who supervises it, and listed with their number."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from clew.record.run import RunDirectory
from clew.record.run_warnings import read_warnings, warnings_in_words
from clew.view.live_table import Progress
from clew.view.show import show

log = logging.getLogger("clew.rollout")


def test_warnings_are_kept_while_a_process_reports_and_listed_with_their_number(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.report("rollout") as reporter:
        log.warning("the tool %s", "fell over")
        for version in (3, 5):
            reporter.set(version=version)
            log.warning("episode g%06d.e0 failed", version)
        log.info("not a warning")
        logging.getLogger("clew.waits").warning("waiting 20 s")
    log.warning("after the end")
    with run.warnings_path.open("ab") as file:
        file.write(b"[" * 100_000 + b"\n{}\n\xff\n" + b'{"time": 1, "process": "half')
    warnings, offset = read_warnings(run.warnings_path)
    assert [(each.process, each.step) for each in warnings] == [("rollout", None), ("rollout", 3), ("rollout", 5)]
    assert warnings_in_words(warnings) == [
        "rollout: the tool fell over",
        "rollout, steps 3 to 5, 2 times: episode g000005.e0 failed",
    ]
    assert read_warnings(run.warnings_path, offset)[0] == []
    shown = Console(width=100, file=io.StringIO(), record=True)
    show(run.path, console=shown)
    assert "rollout, steps 3 to 5, 2 times: episode g000005.e0 failed" in shown.export_text()


def test_the_step_of_a_warning_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.report("trainer") as reporter, Progress(run, 20):
        reporter.set(version=10)
        log.warning("step 9: all advantages are zero")
    assert capsys.readouterr().err == "warning (trainer, step 9): all advantages are zero\n"
    assert warnings_in_words(read_warnings(run.warnings_path)[0]) == ["trainer, step 9: all advantages are zero"]


def test_the_supervisor_shows_new_warnings_on_stderr_also_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.report("trainer"):
        log.warning("of an earlier start")
        with Progress(run, 5):
            log.warning("the reward said \x1b[2J [/foo]")
    said = capsys.readouterr()
    assert said.err == "warning (trainer): the reward said \\x1b[2J [/foo]\n" and "warning" not in said.out


def test_warnings_of_other_processes_are_shown_without_a_live_picture_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`clew.train` has none. If this process is the only one, its log shows them."""
    run = RunDirectory(tmp_path / "run")
    for warnings, shown in ((True, "warning (trainer): a tool was slow\n"), (False, "")):
        with run.report("trainer"), Progress(run, 5, live=False, warnings=warnings):
            log.warning("a tool was slow")
        assert capsys.readouterr().err == shown
