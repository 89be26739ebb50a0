"""`make demo` and `make tour`, as a newcomer types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clew.record.run import RunDirectory
from tests.end_to_end.project import ROOT


def run(module: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_learns_and_the_tour_finds_every_fault(tmp_path: Path) -> None:
    """Both assert what they should show: under 50 % before and over 95 % after; each fault found by its command."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shown = run("examples.addition.demo", tmp_path)
    assert "after 80 steps of GRPO" in shown and "next, try:" in shown
    assert "Five faults, each found by one command" in run("examples.addition.tour", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_agent_learns_to_use_its_tool(tmp_path: Path) -> None:
    """What docs/agents.md shows, as it is typed there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run("examples.agents.make", tmp_path, "--out", "runs/calculator/material")
    run("clew", tmp_path, "sft", "examples/agents/sft.yaml")
    run("clew", tmp_path, "train", "examples/agents/grpo.yaml")
    record = RunDirectory(tmp_path / "runs" / "calculator" / "grpo")
    curve = [evaluation["pass@1"] for evaluation in record.read_evals()]
    assert curve[0] < 0.5 and curve[-1] > 0.85, curve
    (first, *_), (*_, last) = record.steps.read_data(0), record.steps.read_data(59)
    assert first.interactions and any("tool_calls" in each["reply"] for each in last.interactions)
