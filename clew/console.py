"""Rich's Console, for text that Clew did not write. See `clew.printing`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from clew.printing import KEPT, visible


class EscapingConsole(Console):
    """A Console that reads no text as markup and spells out characters that would act on the terminal.

    Text that arrives as `str` is made visible before it is measured, so that tables stay straight. Everything else is
    made visible when it is rendered.
    """

    def __init__(self, **options: Any) -> None:
        """Create a Console with Rich's own options; `markup`, `emoji` and `highlight` are off by default."""
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text with control characters spelt out."""
        return super().render_str(visible(text, KEPT), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments to show. Rich's own control codes, which move the cursor of a live table, are kept."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


@contextmanager
def progress(doing: str, *, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Say on stderr what a long command is doing, and yield a function to call after each unit of the work.

    A terminal gets a bar that disappears at the end; a file gets a line.
    """
    console = EscapingConsole(stderr=True)
    if not console.is_terminal:
        console.print(f"{doing}: {total} {unit}", soft_wrap=True)
        yield lambda: None
        return
    columns = (
        TextColumn(doing, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)
