"""Safe output: everything that Clew shows goes through here, so that foreign text cannot act on a terminal or a page.

A record, a status file or a model's answer may hold escape sequences (a terminal's title, colours, links, a cleared
screen), characters that change the direction of writing, and markup of Rich or HTML. They are spelt out.

`print` replaces Python's own in every module; `clew.console.EscapingConsole` replaces Rich's Console.
"""

from __future__ import annotations

import builtins
import html
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

shown = threading.Event()
"""Set once this process has shown something: printed, logged, or rendered by `clew.console`."""

SILENT_S = 2.0
"""Seconds after which a command that has printed nothing says what it is doing."""

KEPT = "\n\t"
"""Unprintable characters that are shown as they are: line breaks and tabs."""


def visible(text: str, keep: str = "\n") -> str:
    """Return text with control, formatting and other unprintable characters as Python writes them, such as \\x1b.

    Characters in `keep` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many leading items are equal, which is the index of the first difference."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def around(text: str, place: int, length: int, write: Callable[[str], str] = str) -> str:
    """Return `length` characters before and after a place in a text, written by `write`. An ellipsis marks a cut."""
    begin, end = max(0, place - length), place + length
    return f"{'…' * (begin > 0)}{write(text[begin:end])}{'…' * (end < len(text))}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 step" or "3 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def few(items: Sequence[Any], most: int = 8) -> str:
    """Return the first items, separated by commas, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def sentence(text: str) -> str:
    """Return text, with a full stop added unless it ends with a full stop, `!` or `?`."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def in_html(text: str) -> str:
    """Return text for use in an HTML page, between tags or in an attribute."""
    return html.escape(visible(text, KEPT))


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print as Python's own `print` does, with unprintable characters spelt out."""
    shown.set()
    builtins.print(visible(sep.join(map(str, values)), KEPT), end=end, file=file, flush=flush)


def break_silence(said: str) -> None:
    """Print a line on stderr after `SILENT_S` seconds if nothing has been shown until then."""

    def say() -> None:
        if not shown.is_set():
            print(said, file=sys.stderr, flush=True)

    later = threading.Timer(SILENT_S, say)
    later.daemon = True
    later.start()


class VisibleRecord(logging.LogRecord):
    """A log record, from any library, whose message is made visible. Use it with `logging.setLogRecordFactory`."""

    def getMessage(self) -> str:
        return visible(super().getMessage(), KEPT)


class VisibleFormatter(logging.Formatter):
    """Log formatter that spells out unprintable characters, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> Any:
        shown.set()
        return visible(super().format(record), KEPT)
