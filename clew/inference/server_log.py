"""Finds in the log of a vLLM or SGLang server why it has ended."""

from __future__ import annotations

import re

ERROR = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception|error|Killed)\b: .+"
    r"|\b(?<!\w )(?:\w+\.)*\w*(?:Error|Exception)$"  # an error without a message, but not the line `raise KeyError`
)
CONSEQUENCE = re.compile(r"[Ss]ee (?:root cause|stack trace)|EngineDeadError|Engine core initialization failed")
"""Matches an error that only reports the consequence of another one."""
VALIDATION = re.compile(r"\d+ validation errors? for \S+$")
"""Matches the first line of a pydantic error.

The line below it says what is wrong, unless it names a field: then the line after that says it.
"""


def cause_of_end(log: str) -> str:
    """Return the last error in a log that is not a consequence of another one; its last line if it has no error."""
    lines = [line for line in log.splitlines() if line.strip()]
    cause = lines[-1].strip() if lines else "it wrote nothing"
    for place, line in enumerate(lines):
        found = ERROR.search(line)
        if found and " WARNING " not in line and not CONSEQUENCE.search(line):
            cause = found[0].strip()
            if VALIDATION.search(cause):
                # A server's log may have something before each line, such as the name of the process.
                below = [each.removeprefix(line[: found.start()]).strip() for each in lines[place + 1 : place + 3]]
                cause = ": ".join([cause, *_as_far_as_it_says(below)])
    return cause


def _as_far_as_it_says(below: list[str]) -> list[str]:
    """Return the lines below the first one of a pydantic error, up to the one that says what is wrong."""
    said = []
    for line in below:
        text, ends, _ = line.partition(" [type=")
        said.append(text.strip())
        if ends:
            break
    return said
