"""Text in an episode's requests that belongs to another episode: the model's answer to that one, or text of its row.

Another row's text appears, for example, through a cache with a wrong key.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from clew.stress.agent_steps import Episode
from clew.stress.provider import texts
from clew.stress.requests import Request, plain
from clew.stress.shared import State
from clew.stress.verdict import Verdict
from clew.stress.waves import Wave

MARK = 48
"""Number of characters by which a text is recognized; a shorter text is recognized as a whole."""

LEAST_OF_ANSWER = 24
"""Minimum length of an answer that is recognized. Shorter ones (a name, a number) may be in another episode's data."""

LEAST_OF_ROW = 8
"""Minimum number of characters by which a row's text is recognized; shorter text may appear anywhere."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Finding that a prompt of the episode `asker` holds `text` of the episode `owner`. Both are IDs."""

    asker: str
    owner: str
    text: str


def crossed_answers(
    requests: Sequence[Request], is_own: Callable[[str, str], bool] = lambda episode, text: False
) -> list[Crossing]:
    """Return one crossing for each pair of episodes in which one sends text from an answer that the other got.

    Answers that several episodes got, or that only repeat their prompt, do not count. Nor does text that the sender has
    from elsewhere, according to `is_own`: by chance, a model may say what is in another episode's data.
    """
    owners: dict[str, tuple[str, float] | None] = {}
    """Episode and time of each mark; None if the mark is not one episode's alone."""
    for request in requests:
        answer, asked = request.said, plain(request.asked)
        size = min(MARK, len(answer))
        for mark in {answer[i : i + size] for i in range(len(answer) - size + 1)} if size >= LEAST_OF_ANSWER else ():
            owner = owners.get(mark, (request.episode, request.done))  # whoever has a mark first owns it
            common = owner is None or owner[0] != request.episode or mark in asked
            owners[mark] = None if common else owner
    marks = _by_start(((mark, owner) for mark, owner in owners.items() if owner), LEAST_OF_ANSWER)
    answered: dict[str, str] = defaultdict(str)
    for request in requests:
        answered[request.episode] += plain(request.answered) + "\n"
    crossings: dict[tuple[str, str], Crossing] = {}
    # Each answer has about as many marks as characters: too many to search each prompt for one after another.
    for request in requests:
        asker = request.episode
        for mark, (owner, done) in _marks_in(plain(request.asked), marks, LEAST_OF_ANSWER):
            if owner == asker or (asker, owner) in crossings or done > request.came:
                continue
            if mark not in answered[asker] and not is_own(asker, mark):
                crossings[asker, owner] = Crossing(asker=asker, owner=owner, text=mark)
    return list(crossings.values())


def crossed_rows(episodes: Sequence[Episode], requests: Sequence[Request]) -> list[Crossing]:
    """Return one crossing for each pair of rows: an episode of the first row asks with text of the second.

    Text that several rows hold does not count, nor does text that the model itself had given to the asking episode.
    """
    rows = {row_of(episode.data): episode for episode in episodes}
    whole = {row: "\n".join(texts(episode.data)) for row, episode in rows.items()}
    own_marks = (
        (mark, row)
        for row, episode in rows.items()
        for mark in {mark for text in texts(episode.data) for mark in _pieces(text.strip())}
        if not any(mark in text for other, text in whole.items() if other != row)
    )
    marks = _by_start(own_marks, LEAST_OF_ROW)
    row_by_id = {episode.id: row_of(episode.data) for episode in episodes}
    answered: dict[str, str] = defaultdict(str)
    crossings: dict[tuple[str, str], Crossing] = {}
    for request in requests:
        own = row_by_id.get(request.episode)
        if own is None:
            continue
        for mark, row in _marks_in(request.asked, marks, LEAST_OF_ROW):
            if row != own and (own, row) not in crossings and mark not in answered[request.episode]:
                crossings[own, row] = Crossing(asker=request.episode, owner=rows[row].id, text=mark)
        answered[request.episode] += request.answered + "\n"
    return list(crossings.values())


def row_of(data: dict[str, Any]) -> str:
    """Return a text that is equal for equal rows."""
    return json.dumps(data, sort_keys=True, default=repr)


def _pieces(text: str) -> list[str]:
    if len(text) < LEAST_OF_ROW:
        return []
    return [text[start : start + MARK] for start in range(0, max(1, len(text) - MARK + 1), MARK)]


def _by_start(marks: Iterator[tuple[str, T]], least: int) -> dict[str, list[tuple[str, T]]]:
    """Return the marks and their owners by their first characters, so that a text is searched for all at once."""
    by_start: dict[str, list[tuple[str, T]]] = defaultdict(list)
    for mark, owner in marks:
        by_start[mark[:least]].append((mark, owner))
    return by_start


def _marks_in(text: str, marks: Mapping[str, list[tuple[str, T]]], least: int) -> Iterator[tuple[str, T]]:
    """Yield the marks that a text holds, with their owners, in the order of the text."""
    for start in range(len(text) - least + 1):
        for mark, owner in marks.get(text[start : start + least], ()):
            if text.startswith(mark, start):
                yield mark, owner


def judge_answers(waves: Sequence[Wave], state: State, *, repeats: bool) -> list[Verdict]:
    """Return a verdict if an answer to one episode appears in the requests of another.

    Args:
        waves: All waves at full speed, ending with crowd and again.
        state: Names the object that holds the text.
        repeats: True if the model repeats its answers, so that an answer can also be followed from wave to wave.
    """
    *_, crowd, again = waves
    everything = [request for wave in waves for request in wave.requests]
    searches = [(crowd.requests, again.requests), (again.requests, crowd.requests)]
    if repeats:  # in all waves together, an answer of several episodes is nobody's
        searches.append((everything, everything))
    found = [each for requests, others in searches for each in crossed_answers(requests, _is_own(crowd, others))]
    crossings = list({(each.asker, each.owner): each for each in found}.values())
    what = f"answers cross over, between {len(crossings)} pairs of episodes"
    return _verdict(what, "{} asked with {!r}, which {} had been told", crossings, crowd, state, certain=True)


def judge_rows(crossings: Sequence[Crossing], crowd: Wave, state: State, *, certain: bool) -> list[Verdict]:
    """Return a verdict if text of one row stands in the requests of another.

    `certain` is True if the same episodes do not ask with this text in another process, where the owner has not run.
    """
    what = (
        f"text of one row stands in the requests of another, in {len(crossings)} pairs of rows: a cache with a wrong "
        f"key, perhaps" + ("; in a process of their own they do not ask with it" if certain else "")
    )
    return _verdict(what, "{} asked with {!r}, of the row of {}", crossings, crowd, state, certain=certain)


def _verdict(
    what: str, line: str, crossings: Sequence[Crossing], crowd: Wave, state: State, *, certain: bool
) -> list[Verdict]:
    if not crossings:
        return []
    asked = crowd.asked_at(crossings[0].asker)
    where = state.place_of(crossings[0].text) or asked
    evidence = [line.format(crossing.asker, crossing.text, crossing.owner) for crossing in crossings[:4]]
    if asked and asked != where:
        evidence.append(asked)
    return [Verdict(kind="shared", what=what, where=where, evidence=evidence, certain=certain)]


def _is_own(wave: Wave, others: Sequence[Request]) -> Callable[[str, str], bool]:
    """Return a function that tells whether a text is an episode's own.

    A text is the episode's own if its data holds it, or if its requests among `others` do and no answer there does.
    """
    data = {episode.id: plain("\n".join(texts(episode.data))) for episode in wave.episodes}
    asked: defaultdict[str, str] = defaultdict(str)
    for request in others:
        asked[request.episode] += plain(request.asked) + "\n"
    answered = "\n".join(plain(request.answered) for request in others)
    return lambda episode, text: text in data[episode] or (text in asked[episode] and text not in answered)
