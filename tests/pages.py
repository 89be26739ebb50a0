"""The commands on the pages (README, CONTRIBUTING, docs/): which there are, and what each page shows of its output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(
    r"(?P<mark><!-- not run: [^>]+ -->\n+)?^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
COMMAND = re.compile(r"^(\$ |clew |make |python |pip |torchrun |git |\.venv/bin/|\.ci/)")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command on a page, and the output that the page shows below it."""

    page: str
    line: str
    marked: bool
    """True if the page says above the block that no test runs it."""
    shown: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: str
    kind: str
    lines: list[str]
    marked: bool


def blocks(page: Path) -> Iterator[Block]:
    for found in FENCE.finditer(page.read_text()):
        indent = len(found["indent"])
        yield Block(
            page=str(page.relative_to(ROOT)),
            kind=found["kind"],
            lines=[line[indent:] for line in found["text"].splitlines()],
            marked=found["mark"] is not None,
        )


def commands(page: Path) -> list[Command]:
    """Return the commands of a page: lines of bash blocks, and lines of console blocks that begin with "$ "."""
    made: list[Command] = []
    for block in blocks(page):
        if block.kind == "bash":
            joined = "\n".join(block.lines).replace("\\\n", " ").splitlines()
            written = [line.partition("  #")[0].strip() for line in joined]
            lines = [line for line in written if line and not line.startswith("#")]
            made += [Command(page=block.page, line=line, marked=block.marked) for line in lines]
        elif block.kind == "console":
            for line in block.lines:
                if line.startswith("$ "):
                    made.append(Command(page=block.page, line=line[2:], marked=block.marked))
                elif made:
                    made[-1].shown.append(line)
    return made


def files(page: Path) -> dict[str, str]:
    """Return the files of a page by name: blocks whose first line is a comment with the name."""
    named: dict[str, str] = {}
    for block in blocks(page):
        first = block.lines[0] if block.lines else ""
        if block.kind in ("python", "yaml") and (name := re.fullmatch(r"# (\w+\.(?:py|yaml))", first)):
            named[name[1]] = "\n".join(block.lines) + "\n"
    return named


def shape(line: str) -> str:
    """Return a line without what differs from run to run and machine to machine: its numbers, and its width."""
    without = " ".join("#" if re.search(r"[0-9]", word) else word for word in line.split())
    return without.replace("# things deserve ", "# thing deserves ")  # how many differs, too


def missing(shown: list[str], printed: str) -> list[str]:
    """Return the lines that a page shows and a command did not print; "…" stands for anything."""
    there = [shape(line) for line in printed.splitlines()]
    lines = [shape(line) for line in shown if line.strip() not in ("", "…", "...")]
    return [line for line in lines if not any(_matches(line, each) for each in there)]


def _matches(line: str, printed: str) -> bool:
    return printed.startswith(line.removesuffix("…").strip()) if line.endswith("…") else printed == line
