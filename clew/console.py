"""Rich's Console, for text that Clew did not write. See `clew.printing`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
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
