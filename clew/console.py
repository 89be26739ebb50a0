"""Rich's Console, made safe for text that Clew did not write (see `clew.printing`); tables and progress bars."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from clew.printing import KEPT, SILENT_S, print, shown, visible

T = TypeVar("T")

AGAIN_S = 10.0
"""Seconds between two lines about the progress of a command whose output goes to a file."""


class EscapingConsole(Console):
    """A Console that reads no text as markup, and spells out characters that would act on the terminal.

    They are spelled out in a `str` before its width is measured, so that tables stay straight, and in everything else
    when it is rendered.
    """

    def __init__(self, *, wide: int | None = None, **options: Any) -> None:
        """Create a Console with Rich's own options; `markup`, `emoji` and `highlight` are off by default.

        `wide` is the number of columns if stdout is a file or a pipe; None for Rich's own choice, usually 80.
        """
        width = None if sys.stdout.isatty() else wide
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, "width": width, **options})

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Return the text of the segments. For a file or a pipe, remove trailing blanks, Rich's padding."""
        shown.set()  # from now on, the notice of a long silence is not needed
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else re.sub(r" +$", "", text, flags=re.MULTILINE)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text, KEPT), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to show. Rich's own control codes, which move the cursor of a live table, are kept."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def numbers_table(*columns: str, left: Iterable[str] = (), title: str | Text | None = None) -> Table:
    """Return an empty table without lines. Its columns are aligned to the right, except for those of text in `left`."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


@contextmanager
def progress(doing: str, *, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Show the progress of a long command on stderr, and yield a function to call after each unit of the work.

    A terminal gets a bar that disappears at the end; a file gets a line after `SILENT_S` seconds, and one every
    `AGAIN_S` from then on. The block must print nothing to the terminal.
    """
    console, unit = EscapingConsole(stderr=True), unit.removesuffix("s") if total == 1 else unit
    if not console.is_terminal:
        steps, ended = list[None](), threading.Event()  # a list: append is safe in threads, += is not

        def report() -> None:
            patience = SILENT_S
            while not ended.wait(patience):
                patience = AGAIN_S
                print(f"{doing}: {f'{len(steps)} of ' if steps else ''}{total} {unit}", file=sys.stderr, flush=True)

        threading.Thread(target=report, daemon=True).start()
        try:
            yield lambda: steps.append(None)
        finally:
            ended.set()
        return
    label, unit_label = TextColumn(doing, markup=False), TextColumn(unit)
    columns = (label, BarColumn(), MofNCompleteColumn(), unit_label, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


def tracked(items: Iterable[T], doing: str, *, total: int, unit: str) -> Iterator[T]:
    """Yield the items, and advance a `progress` display as the caller finishes each of them."""
    with progress(doing, total=total, unit=unit) as advance:
        for item in items:
            yield item
            advance()
