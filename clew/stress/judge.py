"""Verdicts on an agent that the waves support, and notes on what they cannot show."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from clew.stress import repeat, serial, shared, watch
from clew.stress.origins import Origins
from clew.stress.report import failures
from clew.stress.requests import Request
from clew.stress.steps import Episode
from clew.stress.verdict import Verdict
from clew.stress.wave import Wave
from clew.stress.words import texts

FAILED_SHARE = 0.1
"""Share of failed episodes above which the agent is at fault."""


def waits_for_one_another(waves: Sequence[Wave]) -> Verdict | None:
    """Return what runs one at a time, if every crowd says so.

    Args:
        waves: The waves warm, alone and narrow, then all crowds.
    """
    _, alone, narrow, *crowds = waves
    if not all(_shows_throughput(wave) for wave in waves):
        return None
    found = [serial.verdict(alone.crowd, narrow.crowd, wave.crowd) for wave in crowds]
    return found[0] if all(each is not None for each in found) else None


def _shows_throughput(wave: Wave) -> bool:
    """Return whether an episode of a wave ended without an error: raising errors takes the processor, in turns."""
    return any(episode.error is None for episode in wave.ended)


def judge(
    waves: Sequence[Wave], confirming: Sequence[Wave], origins: Origins, state: shared.State
) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts of the waves at full speed, and notes on what they cannot show, with advice.

    Args:
        waves: The waves warm, alone, narrow, crowd and again.
        confirming: Further crowds.
        origins: Provides the lines that drew random numbers.
        state: State that outlives the episodes, in which crossed text is looked up.
    """
    warm, alone, _, crowd, again = waves
    verdicts = watch.verdicts(crowd.watched + again.watched)
    notes, waits = _waiting([*waves, *confirming], blocked=bool(verdicts))
    verdicts += waits
    differing = _differing(warm, alone, crowd, again, origins)
    told_otherwise = repeat.by_chance(crowd.told, again.told)
    if told_otherwise and not differing:
        notes.append(
            f"whether the same seeds give the same results: run again, {len(told_otherwise)} of {len(crowd.episodes)} "
            f"episodes were answered differently where they asked the same, so what differs may be the model's doing. "
            f"Run the stress without --base-url: the stand-in repeats its answers."
        )
    verdicts += _strangers(alone, crowd, again) + _crossing(waves, state, repeats=not told_otherwise) + differing
    return verdicts + _failing(alone, crowd, again), notes


def _waiting(waves: Sequence[Wave], *, blocked: bool) -> tuple[list[str], list[Verdict]]:
    """Return a note if the waves cannot show what runs one at a time, or a verdict if something does.

    Args:
        waves: The waves warm, alone and narrow, then all crowds.
        blocked: True if something blocks the event loop.
    """
    _, alone, narrow, *crowds = waves
    asked = [request for wave in waves for request in wave.requests]
    refused = [request.refused for request in asked if request.refused]
    if refused:
        return [
            f"latency, throughput and what runs one at a time: {len(refused)} of {len(asked)} requests were refused "
            f"({_refusals(refused)}), and waits before another try are in them. Ask for less at once: --batch, --group."
        ], []
    if not all(_shows_throughput(wave) for wave in waves):
        return ["what runs one at a time: too few episodes ended without an error. Repair that first."], []
    quicker = min((wave.crowd for wave in crowds), key=lambda crowd: crowd.idle_s)
    few, one = narrow.crowd, alone.crowd
    waits = waits_for_one_another(waves)
    if waits is not None:
        return [], [waits]
    if quicker.width == few.width:
        return ["what runs one at a time: too few episodes run at once. Ask for more: --batch, --group."], []
    if serial.saturates(one, few, quicker) and serial.by_model(one, quicker):
        return [
            f"what runs one at a time: throughput did not grow with the width because the model answers more slowly: "
            f"it has an episode for {quicker.model_s:.2f} s at {quicker.width} at once, alone for {one.model_s:.2f} s. "
            f"Run the stress without --base-url: the stand-in answers as fast in a crowd."
        ], []
    saturated, place = serial.saturates(one, few, quicker), serial.waited_most(one, quicker)
    suspected = place is not None and quicker.busy_share > serial.BUSY and serial.slows(few, quicker)
    if not blocked and (saturated or suspected):
        return [
            f"what runs one at a time: throughput did not grow with the width, and at {quicker.width} at once the "
            f"processor was wanted for {quicker.busy_share:.0%} of the time"
            + (f"; episodes waited most at {place}" if place is not None else "")
            + ". Ask again with a stand-in of longer latency (--latency), with fewer episodes at once (--batch), or "
            "when the machine is less busy."
        ], []
    return [], []


def hanging(waves: Sequence[Wave]) -> list[Verdict]:
    """Return a verdict for each place where episodes waited that did not end, however few they are."""
    by_place: dict[str, list[tuple[Wave, Episode]]] = defaultdict(list)
    for wave in waves:
        for episode in wave.stopped:
            by_place[episode.at].append((wave, episode))
    return [
        Verdict(
            kind="hangs",
            what=f"{len(stopped)} of {sum(len(wave.episodes) for wave in waves)} episodes did not end, and were "
            f"stopped",
            where=place,
            evidence=[f"{each.id}, with {wave.width} at once, {each.stopped}" for wave, each in stopped[:3]],
        )
        for place, stopped in sorted(by_place.items(), key=lambda entry: -len(entry[1]))
    ]


def _failing(alone: Wave, crowd: Wave, again: Wave) -> list[Verdict]:
    failed = [sum(e.error is not None for e in wave.ended) for wave in (alone, crowd, again)]
    of = len(crowd.ended) + len(again.ended)
    if not failed[0] and failed[1] + failed[2] <= FAILED_SHARE * of:
        return []
    commonest = failures([*alone.ended, *crowd.ended, *again.ended])[0]
    what = f"{failed[1] + failed[2]} of {of} episodes failed at {crowd.width} at once, {failed[0]} of "
    what += f"{len(alone.episodes)} alone"
    refused = [each for wave in (alone, crowd, again) for each in wave.refused_last]
    evidence = [commonest.error]
    if refused:
        what += f"; the provider had refused the last request of {len(refused)} of them"
        evidence.append(f"the provider said {_refusals(refused)}; ask for less at once (--batch, --group)")
    return [Verdict(kind="fails", what=what, where=commonest.at, evidence=evidence)]


def _refusals(refused: Sequence[str]) -> str:
    """Return how often each kind of refusal happened, and an example of the most common."""
    kinds = Counter(each.partition(":")[0] for each in refused).most_common()
    example = next(each for each in refused if each.startswith(kinds[0][0]))
    return ", ".join([f"{count} times {kind}" for kind, count in kinds]) + f", such as {example!r}"


def _strangers(*waves: Wave) -> list[Verdict]:
    """Return a verdict if episodes were refused because they used the API key of another episode.

    The gateway's error message names the other episode.
    """
    episodes = [episode for wave in waves for episode in wave.episodes]
    names = {episode.id for episode in episodes}
    found = [
        episode
        for episode in episodes
        if episode.error and (names - {episode.id}).intersection(re.findall(r"session (\S+) has ended", episode.error))
    ]
    if not found:
        return []
    return [
        Verdict(
            kind="shared",
            what=f"{len(found)} of {len(episodes)} episodes used the API key of another, whose session had ended",
            where=found[0].at,
            evidence=[
                f"{found[0].id}: {found[0].error}",
                "make the client anew in each run, with the base_url and api_key that it is given",
            ],
        )
    ]


def _crossing(waves: Sequence[Wave], state: shared.State, *, repeats: bool) -> list[Verdict]:
    """Return a verdict if an answer to one episode appears in the requests of another.

    Args:
        waves: All waves at full speed, ending with crowd and again.
        state: State that outlives the episodes, in which the text is looked up.
        repeats: True if the model repeats its answers, so that an answer can also be followed from wave to wave.
    """
    *_, crowd, again = waves
    found = [
        crossing
        for wave, other in ((crowd, again), (again, crowd))
        for crossing in shared.crossings(wave.requests, _is_own(wave, other.requests))
    ]
    if repeats and not found:
        everything = [request for wave in waves for request in wave.requests]
        found = shared.crossings(everything, _is_own(crowd, everything))
    if not found:
        return []
    place = crowd.waits_at.get(found[0].asker)
    asked = f"asked at {place}" if place is not None else ""
    where = state.place_of(found[0].text) or asked
    return [
        Verdict(
            kind="shared",
            what=f"answers cross over, between {len(found)} pairs of episodes",
            where=where,
            evidence=[f"{each.asker} asked with {each.text!r}, which {each.owner} had been told" for each in found[:4]]
            + ([asked] if asked and asked != where else []),
        )
    ]


def _is_own(wave: Wave, others: Sequence[Request]) -> Callable[[str, str], bool]:
    """Return a function that tells whether a text is an episode's own.

    It is if it stands in the episode's data, or in its requests among `others` although no answer there contained
    it.
    """
    data = {episode.id: "\n".join(texts(episode.data)) for episode in wave.episodes}
    asked: defaultdict[str, str] = defaultdict(str)
    for request in others:
        asked[request.episode] += request.asked + "\n"
    told = "\n".join(request.answered for request in others)
    return lambda episode, text: text in data[episode] or (text in asked[episode] and text not in told)


def _differing(warm: Wave, alone: Wave, crowd: Wave, again: Wave, origins: Origins) -> list[Verdict]:
    """Return a verdict if an episode's results depend on chance, or on other episodes that run before or beside it."""
    by_chance_alone = repeat.differences(warm.told, alone.told)
    by_chance = repeat.differences(crowd.told, again.told) or by_chance_alone
    if by_chance:
        repeats_alone = warm.told and not by_chance_alone
        hint = ["alone, an episode repeats: look at what they share"] if repeats_alone else []
        drawn = [] if repeats_alone else [place for place, _ in origins.drawn.most_common(3)]
        if drawn:
            hint.append(
                f"chance or the clock is asked at {', '.join(drawn)}: seed a random.Random of the episode's own with "
                f"its row"
            )
        asked_at = crowd.waits_at.get(by_chance[0].episode)
        return [
            Verdict(
                kind="differs",
                what=f"{len(by_chance)} of {len(crowd.episodes)} episodes differ when they are run again with the same "
                f"seeds and answers",
                where=drawn[0] if drawn else f"asked at {asked_at}" if asked_at is not None else "",
                evidence=[f"{each.episode}: {each.what}" for each in by_chance[:4]] + hint,
            )
        ]
    by_company = repeat.differences(alone.told, crowd.told)
    if by_company:
        return [
            Verdict(
                kind="shared",
                what="an episode does something else when others run before or beside it",
                where=f"asked at {place}" if (place := crowd.waits_at.get(by_company[0].episode)) is not None else "",
                evidence=[f"{each.episode}, alone and in a crowd: {each.what}" for each in by_company[:4]],
            )
        ]
    return []
