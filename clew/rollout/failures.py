"""When failed episodes are too many to go on."""

from __future__ import annotations

import re
from collections import Counter, deque

from clew.errors import RolloutError

WINDOW = 64
"""Episodes over which the share of failures is taken."""

ALL_FAILED = 16
"""When so many fail, and none has ever succeeded, the run stops, whatever share is allowed."""


class FailureWatch:
    """Looks at the last episodes and stops the run when more than `max_share` of them failed."""

    def __init__(self, max_share: float, episodes_in_all: int, where: str) -> None:
        """episodes_in_all: of the whole run; a short run has a shorter window. where: the folder with the records."""
        self._window: deque[str | None] = deque(maxlen=max(1, min(WINDOW, episodes_in_all)))
        self._max_share = max_share
        self._where = where
        self._seen = 0
        self._succeeded = False

    def add(self, error: str | None) -> None:
        """Take the outcome of one episode: None, or its error. Raises RolloutError when too many failed."""
        self._window.append(error)
        self._seen += 1
        self._succeeded = self._succeeded or error is None
        failed = [each for each in self._window if each is not None]
        size = self._window.maxlen or 1
        hopeless = not self._succeeded and self._seen >= min(ALL_FAILED, size)
        if error is not None and (hopeless or len(failed) > self._max_share * size):
            raise RolloutError(self._message(failed))

    def _message(self, failed: list[str]) -> str:
        kinds = Counter(_kind(each) for each in failed)
        kind, count = kinds.most_common(1)[0]
        example = next(each for each in failed if _kind(each) == kind)
        others = f", and {len(kinds) - 1} other kinds of error" if len(kinds) > 1 else ""
        return (
            f"{len(failed)} of the last {len(self._window)} episodes failed; rollout.max_failed_share "
            f"({self._max_share:g}) allows {int(self._max_share * (self._window.maxlen or 1))} of "
            f"{self._window.maxlen}. The commonest error ({count} times{others}):\n\n{example.rstrip()}\n\n"
            f"Each failed episode is on record in {self._where}."
        )


def _kind(error: str) -> str:
    """The first line without its numbers: errors that differ only in those are of one kind."""
    return re.sub(r"\d+", "#", error.partition("\n")[0])
