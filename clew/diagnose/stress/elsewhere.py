"""A few episodes in other processes: what they do otherwise than here, and which text of others is missing there."""

from __future__ import annotations

from collections.abc import Sequence

from clew.diagnose.stress import repeat, rows, shared
from clew.diagnose.stress.child import Source, run_elsewhere
from clew.diagnose.stress.origins import Origins
from clew.diagnose.stress.requests import Request, Requests
from clew.diagnose.stress.rows import Foreign
from clew.diagnose.stress.steps import Episode, OpenEpisode
from clew.diagnose.stress.verdict import Verdict
from clew.diagnose.stress.wave import Wave
from clew.diagnose.stress.writes import Sources

ELSEWHERE = 4
"""Episodes that each of two other processes runs."""

FAILED_SHARE = 0.1
"""More failed episodes than this speak against the agent."""


def rows_of_others(crowd: Wave, again: Wave) -> list[Foreign]:
    """Requests that hold text of another row, of which one episode for each pair of rows."""
    found = rows.foreign(crowd.episodes, crowd.requests) + rows.foreign(again.episodes, again.requests)
    return list({(rows.row_of(each.asker.data), rows.row_of(each.owner.data)): each for each in found}.values())


async def run_some_elsewhere(
    source: Source,
    crowd: Wave,
    requests: Requests,
    open_episode: OpenEpisode,
    first: Sequence[Episode],
    timeout_s: float,
) -> tuple[list[tuple[Sequence[Episode], list[Request]]], str]:
    """A few episodes of the crowd, each process with rows of its own; and why it could not be done.

    first: episodes to be among them."""
    sound = {episode.id: episode for episode in crowd.episodes if episode.error is None}
    wanted = [*(each for each in first if each.id in sound), *sound.values()]
    by_row = {rows.row_of(episode.data): episode for episode in reversed(wanted)}
    chosen = sorted(by_row.values(), key=wanted.index)[: 2 * ELSEWHERE]
    halves = [chosen[::2], chosen[1::2] or chosen[:1]]
    tried: list[tuple[Sequence[Episode], list[Request]]] = []
    for seed, half in enumerate(halves, 1):
        episodes = [Episode(id=episode.id, data=episode.data) for episode in half]
        if not episodes:
            continue
        requests.take()
        why_not = await run_elsewhere(source, episodes, open_episode, timeout_s=timeout_s, hash_seed=seed)
        if why_not:
            return tried, why_not
        tried.append((episodes, requests.take()))
    return tried, ""


def judge_elsewhere(
    crowd: Wave,
    tried: Sequence[tuple[Sequence[Episode], list[Request]]],
    why_not: str,
    origins: Origins,
    sources: Sources,
    notes: list[str],
) -> list[Verdict]:
    """What another process did otherwise. notes: is added to where that cannot be told."""
    if why_not:
        notes.append(
            f"whether another process gives the same results: the agent could not be run in one ({why_not}). Training "
            f"starts it in processes of its own, so it must be importable by its name, with its arguments."
        )
        return []
    found, failed = [], []
    for episodes, asked in tried:
        here = {episode.id: crowd.told[episode.id] for episode in episodes if episode.id in crowd.told}
        failed += [episode for episode in episodes if episode.error is not None]
        there = {
            episode.id: repeat.Told(
                requests=[request for request in asked if request.episode == episode.id],
                reward=episode.reward,
            )
            for episode in episodes
            if episode.error is None
        }
        found += repeat.differences(here, there)
    of = sum(len(episodes) for episodes, _ in tried)
    if failed:
        evidence = [f"{each.id}: {each.error}" for each in failed[:3]]
        what = f"{len(failed)} of {of} episodes fail in another process, and not here"
        return [Verdict(kind="fails", what=what, where=failed[0].at, evidence=evidence)]
    if not found:
        return []
    used = sources.lines_with_sets()
    drawn = [place for place, _ in origins.drawn.most_common(1)]
    place = crowd.waits_at.get(found[0].episode)
    return [
        Verdict(
            kind="differs",
            what=f"{len(found)} of {of} episodes differ in another process, with another PYTHONHASHSEED and the same "
            f"seeds and answers",
            where=", ".join([*used, *drawn][:1]) or (f"asked at {place}" if place is not None else ""),
            evidence=[f"{each.episode}: {each.what}" for each in found[:4]]
            + ([f"sets and hash() are used at {', '.join(used[:4])}"] if used else [])
            + ["sort a set before its order matters; take hashlib in the place of hash()"],
        )
    ]


def also_elsewhere(found: Foreign, tried: Sequence[tuple[Sequence[Episode], list[Request]]]) -> bool:
    """Whether the asker holds this text also in a process in which its owner had not run before: it is an example, or
    what a tool says. True of one that was not tried: it speaks against nobody."""
    owner = rows.row_of(found.owner.data)
    for episodes, asked in tried:
        for number, episode in enumerate(episodes):
            if rows.row_of(episode.data) == rows.row_of(found.asker.data):
                before = {rows.row_of(each.data) for each in episodes[:number]}
                return owner in before or any(found.text in each.asked for each in asked if each.episode == episode.id)
    return True


def judge_foreign(found: Sequence[Foreign], state: shared.State, crowd: Wave, *, certain: bool) -> list[Verdict]:
    if not found:
        return []
    place = crowd.waits_at.get(found[0].asker.id)
    asked = f"asked at {place}" if place is not None else ""
    where = state.place_of(found[0].text) or asked
    return [
        Verdict(
            kind="shared",
            what=f"text of one row stands in the requests of another, in {len(found)} pairs of rows: a cache with a "
            f"wrong key, perhaps" + ("; in a process of their own they do not ask with it" if certain else ""),
            where=where,
            evidence=[
                *(f"{each.asker.id} asked with {each.text!r}, of the row of {each.owner.id}" for each in found[:4]),
                *([asked] if asked and asked != where else []),
            ],
            certain=certain,
        )
    ]
