"""Text and tables for a terminal. Text is never read as markup, and control characters are shown as escapes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from clew.printing import visible

MISSING = "-"
GAP = 2
"""Number of blanks between two columns."""
WORDS = 16
"""Maximum width, in characters, that is reserved for a column of text when columns are fitted."""


def one_line(text: str, limit: int = 160, style: str = "") -> Text:
    """Return `text` on one line, cut after `limit` characters or at the end of its column."""
    cut = visible(text[:limit], keep="") + ("…" if len(text) > limit else "")
    return Text(cut, style, no_wrap=True, overflow="ellipsis")


def as_text(value: Any) -> str:
    """Return text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def prompt_text(prompt: Any) -> str:
    """Return a prompt as one text. For chat messages, this is the content of the last."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return content_text(prompt[-1].get("content"))
    return as_text(prompt)


def content_text(content: Any) -> str:
    """Return the content of a chat message as text. Parts that are not text become JSON."""
    if not isinstance(content, list):
        return as_text(content)
    return "\n".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else as_text(part)
        for part in content
    )


def number(value: float | None, form: str = ".3f") -> str:
    """Return a number as text; "-" if it is missing or NaN."""
    return MISSING if value is None or math.isnan(value) else format(value, form)


def duration(seconds: float) -> str:
    """Return a time as text, such as "2 h 5 min", "12 min" or "41.3 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(seconds: float | None) -> str:
    """Return seconds since the epoch as local date and time; "-" for None and for 0."""
    return MISSING if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class Rows:
    """Table that never cuts numbers: spare columns that do not fit are left out, and a line below names them.

    Columns that are empty in every row, such as the rewards of `clew sft`, are left out as well.
    """

    def __init__(
        self, *columns: str, left: Iterable[str] = (), words: Iterable[str] = (), spare: Iterable[str] = ()
    ) -> None:
        """Make a table without rows.

        Args:
            left: Columns of names, aligned to the left.
            words: Columns of text, which is cut or wrapped if the terminal is narrow.
            spare: Columns that may be left out to fit the terminal; the first ones are left out first.
        """
        self.columns = columns
        self.left, self.words, self.spare = set(left), set(words), tuple(spare)
        self.rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with one cell per column. Missing cells at the end stay empty."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {
            name: max(cell_len(str(cell)) for cell in (name, *cells))
            for name, *cells in zip(self.columns, *self.rows, strict=True)
            if not cells or any(str(cell) not in (MISSING, "") for cell in cells)
        }
        for name in widths.keys() & self.words:
            widths[name] = min(widths[name], WORDS)
        out: list[str] = []
        for name in [name for name in self.spare if name in widths]:
            if sum(widths.values()) + GAP * (len(widths) - 1) <= options.max_width:
                break
            del widths[name]
            out.append(name)
        fits = sum(widths.values()) + GAP * (len(widths) - 1) <= options.max_width
        made = Table(box=None, pad_edge=False, header_style="bold")
        for name in widths:
            justify = "left" if name in self.left or name in self.words else "right"
            made.add_column(name, justify=justify, no_wrap=fits and name not in self.words, overflow="fold")
        places = [place for place, name in enumerate(self.columns) if name in widths]
        for row in self.rows:
            made.add_row(*(row[place] for place in places))
        yield made
        if out:
            advice = f"columns left out: {', '.join(out)}. Widen the terminal, or redirect the output to a file."
            yield Text(advice, style="dim", overflow="fold", no_wrap=False)


def pairs(facts: Iterable[tuple[str, Any]]) -> Table:
    """Return a table with a name and its value on each line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in facts:
        made.add_row(Text(visible(name)), value if isinstance(value, Text) else Text(visible(as_text(value))))
    return made
