"""The warnings of a run: every process appends its own to warnings.jsonl, one JSON object per line."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clew.waits import Reporter

_STEP = re.compile(r"step (\d{1,12}): ")


@dataclass(frozen=True, kw_only=True)
class RunWarning:
    time: float
    """Seconds since the epoch."""
    process: str
    step: int | None
    """Step that the warning names; otherwise the version that the process had then, or None if it had none yet."""
    text: str
    """Warning without the name of its step."""


class _Appending(logging.Handler):
    """Log handler that appends each warning in one write, so that those of several processes do not mix."""

    def __init__(self, path: Path, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "clew.waits":  # status/ shows waits while they last
            return
        step = self._reporter.facts.get("version")
        append_warning(self._path, process=self._reporter.process, step=step, text=record.getMessage())


def append_warning(path: Path, *, process: str, step: int | None, text: str) -> None:
    entry = {"time": time.time(), "process": process, "step": step, "text": text}
    with suppress(OSError), path.open("ab", buffering=0) as file:  # a full disk: the record itself reports it
        file.write(json.dumps(entry).encode() + b"\n")  # unbuffered, so in one write


@contextmanager
def kept_warnings(path: Path, reporter: Reporter) -> Iterator[None]:
    """Append to `path` the warnings of all modules of Clew while the block runs."""
    handler = _Appending(path, reporter)
    logger = logging.getLogger("clew")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def read_warnings(path: Path, offset: int = 0) -> tuple[list[RunWarning], int]:
    """Return the warnings in warnings.jsonl from `offset` (in bytes) on, and the offset after its last complete line.

    A line that Clew did not write is left out: a killed process may have left half of one. Many texts begin with
    "step N: ", because a log line has no other place for the step; it is moved to `RunWarning.step`.
    """
    if not path.is_file():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        lines, ended, _ = file.read().rpartition(b"\n")
    warnings = []
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
            step, text = entry["step"], str(entry["text"])
            if (named := _STEP.match(text)) is not None:
                step, text = named[1], text[named.end() :]
            warnings.append(
                RunWarning(
                    time=float(entry["time"]),
                    process=str(entry["process"]),
                    step=None if step is None else int(step),
                    text=text,
                )
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return warnings, offset + len(lines) + len(ended)


def kind_of(error: str) -> str:
    """Return the first line of an error with its numbers masked. Errors with the same result are of one kind."""
    return re.sub(r"\d+", "#", error.partition("\n")[0])


def named_kinds(errors: Sequence[str]) -> list[str]:
    """Return for each error the name of its kind: the first line of the first error of that kind."""
    lines: dict[str, list[str]] = {}
    for error in errors:
        lines.setdefault(kind_of(error), []).append(error.partition("\n")[0])
    names = {
        kind: texts[0] if len(set(texts)) == 1 else f"{texts[0]}, or with other numbers"
        for kind, texts in lines.items()
    }
    return [names[kind_of(error)] for error in errors]


def warnings_in_words(warnings: list[RunWarning]) -> list[str]:
    """Return a line for each kind of warning of each process, in the order of first appearance.

    A line has the newest warning of the kind and how often the kind occurred. Warnings that differ only in numbers are
    of one kind.
    """
    kinds: dict[tuple[str, str], list[RunWarning]] = {}
    for warning in warnings:
        kinds.setdefault((warning.process, kind_of(warning.text)), []).append(warning)
    lines = []
    for (process, _), of_kind in kinds.items():
        steps = sorted({warning.step for warning in of_kind if warning.step is not None})
        where = f", step {steps[0]}" if len(steps) == 1 else f", steps {steps[0]} to {steps[-1]}" if steps else ""
        often = f", {len(of_kind)} times" if len(of_kind) > 1 else ""
        lines.append(f"{process}{where}{often}: {of_kind[-1].text}")
    return lines
