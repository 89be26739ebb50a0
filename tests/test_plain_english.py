"""Docstrings begin with a verb or a noun: "Return the share of ...", "Number of bytes ..."; no sentence is a riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

AVOIDED = (
    "All", "Also", "As", "At", "Both", "By", "For", "From", "How", "If", "In", "It", "Like", "None", "Of", "So", "That",
    "The same", "Those", "To", "What", "When", "Where", "Whether", "Which", "Who", "Whoever", "Whose", "Why", "With",
    "Without",
)  # fmt: skip
"""First words after which a reader does not know yet what is described."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that stands alone: docstrings, and those below constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


FOLDERS = ("clew", "tests", "bench", "examples", "docs")

RIDDLES = {
    r"\bso many\b": 'say which number: "this many", "the number of ..."',
    r"\bat most so much\b": "say what the upper bound is of",
    r"(?<![Tt]here )(?<!there will )\b(is|are|be|was|were) none\b": 'say "is not a ...", or "there is none"',
    r"\bnull: none is\b|\bwhich there (is|are) none of\b": 'say "off", or "no ..."',
}
"""Turns of phrase that a reader has to decode, and what to write instead."""


@pytest.mark.parametrize(
    "room",
    sorted({path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}),
    ids=lambda room: room.relative_to(ROOT).as_posix(),
)
def test_docstrings_begin_with_a_verb_or_a_noun(room: Path) -> None:
    dangling = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted(room.glob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        if text.startswith(tuple(f"{word} " for word in AVOIDED))
    ]
    assert not dangling, "\n".join(dangling)


def test_what_users_read_has_no_riddles() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "clew").rglob("*.py"),
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()} ({advice})"
        for path in sorted(pages)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for pattern, advice in RIDDLES.items()
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)
