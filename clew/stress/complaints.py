"""Problems that asyncio and its libraries report to the event loop because no caller is left to receive them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

from clew.stress.frames import Code, stack_of_error
from clew.stress.origins import Origins
from clew.stress.verdict import Verdict

NEVER_CLOSED = ("Unclosed client session", "Unclosed connection", "Unclosed connector")
"""Messages with which aiohttp reports a client session that was left to the garbage collector."""

NEVER_LOOKED_AT = "Task exception was never retrieved"

SHARE = 0.1
"""Share of the episodes above which a problem is reported."""


class Complaints:
    """Exception handler of the event loop while episodes run: counts what is reported, and prints nothing."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._places: Counter[str] = Counter()

    def hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count one report. This is the handler to pass to `loop.set_exception_handler`."""
        message = str(context.get("message", ""))
        with self._lock:
            self._counts[message] += 1
            if message == NEVER_LOOKED_AT:
                error = context.get("exception")
                place = str(self._code.place(stack_of_error(error)) or "") if error is not None else ""
                self._errors[f"{type(error).__name__}: {error}"] += 1
                self._places[place] += 1

    def verdicts(self, episodes: int, origins: Origins) -> list[Verdict]:
        """Return verdicts on the problems that happened in more than SHARE of the episodes.

        Args:
            episodes: Number of episodes that have run.
            origins: Provides the lines that opened connections.
        """
        connects = Counter(origins.sockets.values()).most_common(1)
        found = []
        unclosed = self._counts[NEVER_CLOSED[0]]
        if unclosed > SHARE * episodes:
            found.append(
                Verdict(
                    kind="growth",
                    what=f"{unclosed} client sessions of aiohttp were left to the garbage collector",
                    where=f"connected at {connects[0][0]}" if connects else "",
                    evidence=["close each: async with aiohttp.ClientSession() as session"],
                )
            )
        unseen = self._counts[NEVER_LOOKED_AT]
        if unseen > SHARE * episodes:
            found.append(
                Verdict(
                    kind="fails",
                    what=f"{unseen} tasks of {episodes} episodes failed, and nobody looked at their errors",
                    where=self._places.most_common(1)[0][0],
                    evidence=[f"{count} times {error}" for error, count in self._errors.most_common(3)],
                )
            )
        return found
