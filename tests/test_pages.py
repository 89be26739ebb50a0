"""The pages: each command is run by a test or marked as not run, and no paragraph is longer than five lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import COMMAND, PAGES, ROOT, blocks, commands

BY_ANOTHER_TEST = {
    "make demo": "tests/end_to_end/test_demo.py::test_the_demo_learns",
    "make tour": "tests/end_to_end/test_demo.py::test_the_tour_finds_every_fault",
    "make docs": ".ci/run",
    "make test": ".ci/run",
    "make slow": ".ci/run",
    ".ci/run": ".ci/run",
    "python -m examples.agents.make --out runs/calculator/material": (
        "tests/end_to_end/test_agents.py::test_the_example_of_an_agent"
    ),
    "clew sft examples/agents/sft.yaml": "tests/end_to_end/test_agents.py::test_the_example_of_an_agent",
    "clew sft examples/agents/sft.yaml trial=talk training.steps=20 "
    "data.path=runs/calculator/material/conversations.jsonl": (
        "tests/end_to_end/test_agents.py::test_the_example_of_an_agent"
    ),
    "clew train examples/agents/grpo.yaml": "tests/end_to_end/test_agents.py::test_the_example_of_an_agent",
}
"""Commands that a test other than `test_the_commands_of_the_pages` runs."""

RUN = ("README.md", "docs/quickstart.md", "docs/guides/")
"""Pages whose other commands `test_the_commands_of_the_pages` runs."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_each_command_is_run_or_marked(page: Path) -> None:
    for command in commands(page):
        if command.marked or name(page).startswith(RUN):
            continue
        assert command.line in BY_ANOTHER_TEST, (
            f"{name(page)}: no test runs `{command.line}`. Write above its block: <!-- not run: REASON -->"
        )


def test_the_tests_that_run_commands_are_there() -> None:
    for where in BY_ANOTHER_TEST.values():
        path, _, test = where.partition("::")
        assert not test or f"def {test}(" in (ROOT / path).read_text(), where


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_stand_in_blocks_of_their_kind(page: Path) -> None:
    """A command in another block would be run by nobody."""
    for block in blocks(page):
        if block.kind not in ("bash", "console"):
            assert not [line for line in block.lines if COMMAND.match(line)], f"{name(page)}: ```{block.kind}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_paragraph_is_longer_than_five_lines(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) )", text):
        lines = paragraph.strip().splitlines()
        if lines and not lines[0].startswith("|"):
            assert len(lines) <= 5 and max(map(len, lines)) <= 125, f"{name(page)}:\n{paragraph}"


def test_the_readme_fits_a_terminal() -> None:
    long = [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 120]
    assert not long, long
