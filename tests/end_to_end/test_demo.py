"""`make demo` and `make tour`, as a newcomer types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.project import ROOT


def run(module: str, folder: Path) -> str:
    ended = subprocess.run([sys.executable, "-m", module], cwd=folder, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_demo_learns_and_the_tour_finds_every_fault(tmp_path: Path) -> None:
    """Both assert what they should show: under 50 % before and over 95 % after; each fault found by its command."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = run("examples.addition.demo", tmp_path)
    assert "after 80 steps of GRPO" in shown and "next, try:" in shown
    assert "Five faults, each found by one command" in run("examples.addition.tour", tmp_path)
