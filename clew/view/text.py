"""What models and users wrote, made safe for a terminal: none of it is markup, and what cannot be seen is spelt out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

MISSING = "-"


def visible(text: str, keep: str = "\n") -> str:
    """Control, formatting and other unprintable characters as Python writes them (\\x1b); those in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def one_line(text: str, limit: int = 160, style: str = "") -> Text:
    """`text` on one line, cut after `limit` characters or where its place ends."""
    cut = visible(text[:limit], keep="") + ("…" if len(text) > limit else "")
    return Text(cut, style, no_wrap=True, overflow="ellipsis")


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def prompt_text(prompt: Any) -> str:
    """A prompt as one text: of chat messages the content of the last."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return content_text(prompt[-1].get("content"))
    return as_text(prompt)


def content_text(content: Any) -> str:
    """What a chat message says: its text, or that of its parts; other parts as JSON."""
    if not isinstance(content, list):
        return as_text(content)
    return "\n".join(
        part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else as_text(part)
        for part in content
    )


def number(value: float | None, form: str = ".3f") -> str:
    """A number that may be missing or NaN."""
    return MISSING if value is None or math.isnan(value) else format(value, form)


def moment(seconds: float | None) -> str:
    """Seconds since the epoch, as this machine's clock has it."""
    return MISSING if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(*columns: str, left: Iterable[str] = (), words: Iterable[str] = ()) -> Table:
    """A table of right-aligned numbers, but for the columns `left` and `words`; where the terminal is narrow, those of
    `words` give way."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify = "left" if name in left or name in words else "right"
        made.add_column(name, justify=justify, no_wrap=name not in words, overflow="fold")
    return made


def pairs(facts: Iterable[tuple[str, Any]]) -> Table:
    """A name and what there is to say about it, a line each."""
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True, style="bold")
    made.add_column(overflow="fold")
    for name, value in facts:
        made.add_row(Text(visible(name)), value if isinstance(value, Text) else Text(visible(as_text(value))))
    return made
