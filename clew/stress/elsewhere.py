"""Comparison with a few episodes in other processes: what differs there, and which text of other rows is missing."""

from __future__ import annotations

from collections.abc import Sequence

from clew.stress import repeat, rows, shared
from clew.stress.child import Source, run_elsewhere
from clew.stress.origins import Origins
from clew.stress.requests import Request, Requests
from clew.stress.rows import Foreign
from clew.stress.steps import Episode, OpenEpisode
from clew.stress.verdict import Verdict
from clew.stress.wave import Wave
from clew.stress.writes import Sources

ELSEWHERE = 4
"""Number of episodes that each of the two other processes runs."""


def rows_of_others(crowd: Wave, again: Wave) -> list[Foreign]:
    """Return requests that hold text of another row, one for each pair of rows."""
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
    """Run a few episodes of the crowd in two other processes, each with rows of its own.

    Args:
        source: Recipe to create the agent in another process.
        crowd: The wave from which episodes are chosen.
        requests: Receives the requests of the episodes.
        open_episode: Opens the gateway session of an episode.
        first: Episodes to prefer.
        timeout_s: Maximum seconds per episode.

    Returns:
        The episodes and requests of each process, and the reason if a process could not be run (otherwise empty).
    """
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
    """Return a verdict if episodes fail or give other results in another process.

    Args:
        crowd: The wave in this process to compare with.
        tried: Episodes and requests of each process.
        why_not: Reason why a process could not be run; empty if all ran.
        origins: Provides the lines that drew random numbers.
        sources: Provides the lines that use sets and hashes.
        notes: Receives a note if this cannot be judged.
    """
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
            + (
                [
                    f"sets and hash() are used at {', '.join(used[:4])}",
                    "sort a set before its order matters; take hashlib in the place of hash()",
                ]
                if used
                else ["look for the clock, for chance, for the environment and for what earlier episodes left behind"]
            ),
        )
    ]


def also_elsewhere(found: Foreign, tried: Sequence[tuple[Sequence[Episode], list[Request]]]) -> bool:
    """Return whether the asker uses this text even in a process in which its owner had not run before.

    Such text is an example, or the output of a tool, and no sign of a fault. The result is also True if this could not
    be tested: if no process ran the asker, or the owner ran there first.
    """
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
