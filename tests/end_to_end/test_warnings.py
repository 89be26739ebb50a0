"""Warnings appear in the command's output, even if that is not a terminal, and are kept in the run directory."""

from __future__ import annotations

import pytest

from clew.record.run_warnings import read_warnings
from tests.end_to_end.project import USER_CODE, Project

ALIKE = """
def alike(completion, data):
    return 0.5
"""


@pytest.mark.slow
def test_trainer_and_rollout_in_separate_processes(project: Project) -> None:
    project.code(USER_CODE + ALIKE)
    ended = project.clew("train", "rollout.reward=mine.alike", "training.steps=5")
    assert ended.code == 0, ended.output
    assert "warning (trainer, step 0): all advantages are zero" in ended.said
    assert "warning (trainer, step 3): nothing to learn for 4 steps" in ended.said
    texts = [each.text for each in read_warnings(project.run.warnings_path)[0]]
    assert len(texts) == 3 and not any("gone" in text for text in texts), texts


def test_trainer_and_rollout_in_one_process(project: Project) -> None:
    project.code(USER_CODE + ALIKE)
    ended = project.inline("rollout.reward=mine.alike", "training.steps=2", "data.max_prompt_tokens=4")
    assert ended.code == 0, ended.output
    assert ended.output.count("step 0: all advantages are zero") == 1
    assert "data.max_prompt_tokens=4 leaves out 7 of the 16 rows of prompts.jsonl" in ended.said
    assert len(read_warnings(project.run.warnings_path)[0]) == 3
