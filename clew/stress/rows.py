"""Text of one row of the data that appears in another row's requests, for example through a cache with a wrong key."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clew.stress.requests import Request
from clew.stress.steps import Episode
from clew.stress.words import texts

LEAST = 8
"""Minimum number of characters by which a row's text is recognized; shorter text may appear anywhere."""

MARK = 48
"""Length of the pieces in which a longer text is searched for."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A request that holds text of another episode's row."""

    asker: Episode
    owner: Episode
    text: str


def row_of(data: dict[str, Any]) -> str:
    """Return a text that is equal for equal rows."""
    return json.dumps(data, sort_keys=True, default=repr)


def foreign(episodes: Sequence[Episode], requests: Sequence[Request]) -> list[Foreign]:
    """Return one request for each pair of rows: an episode of the first row sent it, and it holds text of the second.

    Text that several rows hold does not count, nor does text that the model itself had given to the asking episode.
    """
    rows = {row_of(episode.data): episode for episode in episodes}
    whole = {row: "\n".join(texts(episode.data)) for row, episode in rows.items()}
    marks: dict[str, list[tuple[str, str]]] = defaultdict(list)
    """Mark and its row, by the mark's first characters."""
    for row, episode in rows.items():
        for mark in {mark for text in texts(episode.data) for mark in _marks(text.strip())}:
            if not any(mark in text for other, text in whole.items() if other != row):
                marks[mark[:LEAST]].append((mark, row))
    by_id = {episode.id: episode for episode in episodes}
    told: dict[str, str] = defaultdict(str)
    found: dict[tuple[str, str], Foreign] = {}
    for request in requests:
        asker = by_id.get(request.episode)
        if asker is None:
            continue
        own = row_of(asker.data)
        for start in range(len(request.asked) - LEAST + 1):
            for mark, row in marks.get(request.asked[start : start + LEAST], ()):
                if row == own or (own, row) in found or not request.asked.startswith(mark, start):
                    continue
                if mark not in told[asker.id]:
                    found[own, row] = Foreign(asker=asker, owner=rows[row], text=mark)
        told[asker.id] += request.answered + "\n"
    return list(found.values())


def _marks(text: str) -> list[str]:
    if len(text) < LEAST:
        return []
    return [text[start : start + MARK] for start in range(0, max(1, len(text) - MARK + 1), MARK)]
