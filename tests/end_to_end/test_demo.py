"""`make demo`, `make tour` and the commands on the pages, as a newcomer types them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.project import ROOT
from tests.pages import PAGES, commands, files, missing
from tests.test_pages import BY_ANOTHER_TEST, RUN


def run(module: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the demo was run, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs" / "addition" / "mine").mkdir(parents=True)
    return folder, run("examples.addition.demo", folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_learns(demo: tuple[Path, str]) -> None:
    """The demo asserts what it should show: under 50 % before and over 95 % after."""
    folder, shown = demo
    assert "after 80 steps of GRPO" in shown and "next, try:" in shown
    assert "is there and complete" in run("examples.addition.demo", folder, "--unless-complete")
    assert (folder / "runs" / "addition" / "mine").is_dir(), "a run of the user's own must stay"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tour_finds_every_fault(demo: tuple[Path, str]) -> None:
    """The tour asserts that each fault is found by its command."""
    assert "Five faults, each found by one command" in run("examples.addition.tour", demo[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_pages(demo: tuple[Path, str]) -> None:
    """Type each command of the quickstart, the guides and the README in turn; compare what it prints with the page."""
    folder, _ = demo
    clew = [sys.executable, "-m", "clew"]
    wide = os.environ | {"COLUMNS": "160"}
    wrong = []
    for page in sorted(PAGES, key=lambda page: (page.name != "quickstart.md", page)):
        if not str(page.relative_to(ROOT)).startswith(RUN):
            continue
        for name, text in files(page).items():
            (folder / name).write_text(text)
        for command in commands(page):
            if command.marked or command.line in BY_ANOTHER_TEST:
                continue
            program, *arguments = command.words
            assert program == "clew", command
            ended = subprocess.run(
                [*clew, *arguments], cwd=folder, env=wide, capture_output=True, text=True, timeout=600
            )
            printed = ended.stdout + ended.stderr
            if (lines := missing(command.shown, printed)) or ended.returncode not in (0, 1, 2):
                wrong.append(f"{command.page}: $ {command.line}\nnot printed: {lines}\n{printed[-3000:]}")
            assert "Traceback" not in printed, printed
    assert not wrong, "\n\n".join(wrong)
    for name, text in files(ROOT / "docs" / "reference" / "python.md").items():
        (folder / name).write_text(text)
        ended = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0 and "agrees with the record" in ended.stdout, ended.stdout + ended.stderr
