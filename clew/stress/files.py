"""Files that several episodes write at the same path at the same time, so that one reads what another has written."""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.stress import audit
from clew.stress.frames import Code, lines_of
from clew.stress.steps import Episode, current_episode
from clew.stress.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A file that an episode began to write."""

    path: str
    where: str
    episode: Episode


class Files:
    """Records, while entered, the files that episodes open to overwrite them."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.opened: list[Opened] = []

    async def __aenter__(self) -> Files:
        self._listening = audit.listening(self._note)
        self._listening.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.__exit__(None, None, None)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & (os.O_APPEND | os.O_EXCL)
        episode = current_episode()
        if episode is None or not writes or not isinstance(path, (str, bytes)):
            return
        place = self._code.place(lines_of(sys._getframe(2)))
        name = str(Path(os.fsdecode(path)).absolute())
        if place is not None and place.user and not name.startswith("/dev/"):
            self.opened.append(Opened(path=name, where=str(place), episode=episode))


def verdicts(opened: Sequence[Opened], *, matters: bool) -> list[Verdict]:
    """Return one verdict for each path that overlapping episodes write.

    Args:
        opened: Files that episodes opened for writing.
        matters: True if episodes were seen to depend on one another. Otherwise the file may be a cache or a log, and
            the verdict is only a suspicion.
    """
    by_path: dict[str, list[Opened]] = defaultdict(list)
    for each in opened:
        by_path[each.path].append(each)
    found = []
    for path, made in by_path.items():
        second = next((b for a, b in itertools.pairwise(made) if _overlap(a.episode, b.episode)), None)
        if second is None:
            continue
        episodes = sorted({each.episode.id for each in made})
        shown = ", ".join(episodes[:6]) + (", …" if len(episodes) > 6 else "")
        found.append(
            Verdict(
                kind="shared",
                what=f"the file {path} is written by episodes that run at the same time"
                + ("; each reads the other's" if matters else ", perhaps a cache"),
                where=second.where,
                evidence=[
                    f"written by {len(episodes)} episodes: {shown}",
                    "give each episode a folder of its own: tempfile.TemporaryDirectory()",
                ],
                certain=matters,
            )
        )
    return found


def _overlap(first: Episode, second: Episode) -> bool:
    return first is not second and second.started < first.finished and first.started < second.finished
