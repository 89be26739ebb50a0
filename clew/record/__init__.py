"""The record: sequences, inbox, steps, the run directory. Imports no torch. Read `run.py` first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clew.record.writer import Writer

__all__ = ["Writer"]


def __getattr__(name: str) -> Any:
    """Import `Writer` only when it is asked for: Clew's own processes do not need it."""
    if name == "Writer":
        from clew.record.writer import Writer

        return Writer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
