"""Docstrings begin with a verb or a noun: "Return the share of ...", "Number of bytes ..."."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize(
    "room",
    sorted({path.parent for path in (ROOT / "clew").rglob("*.py")}),
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
