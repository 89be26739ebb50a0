"""Whatever Clew shows goes through here, so that text which it did not write cannot act on a terminal or a page.

A record, a status file or a model's answer may hold escape sequences (a terminal's title, colours, links, a cleared
screen), characters that turn the direction of writing, and marks of Rich or HTML. They are spelt out.

`print` stands for Python's own in every module; `clew.console.EscapingConsole` for Rich's Console.
"""

from __future__ import annotations

import builtins
import html
import logging
from typing import Any, TextIO

KEPT = "\n\t"
"""What is not printable and shown as it is: lines and tabs."""


def visible(text: str, keep: str = "\n") -> str:
    """Return text with control, formatting and other unprintable characters as Python writes them, such as \\x1b.

    Args:
        text: Any text.
        keep: Characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def in_html(text: str) -> str:
    """Return text as it can stand in an HTML page, between tags or in an attribute."""
    return html.escape(visible(text, KEPT))


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print as Python's own `print` does, with everything visible."""
    builtins.print(visible(sep.join(map(str, values)), KEPT), end=end, file=file, flush=flush)


class VisibleRecord(logging.LogRecord):
    """A line of a log, whoever writes it: `logging.setLogRecordFactory` takes this class."""

    def getMessage(self) -> str:
        """Return the message, with everything visible."""
        return visible(super().getMessage(), KEPT)


class VisibleFormatter(logging.Formatter):
    """Formats a line of a log with everything visible, tracebacks included."""

    def format(self, record: logging.LogRecord) -> Any:
        """Return the line."""
        return visible(super().format(record), KEPT)
