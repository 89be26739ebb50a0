"""Verdicts on an agent that the waves support, and notes on what they cannot show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from clew.stress import repeat, serial
from clew.stress.crossings import judge_answers
from clew.stress.origins import Origins
from clew.stress.report import failures, wave_report
from clew.stress.shared import State
from clew.stress.verdict import Verdict, grouped
from clew.stress.watch import judge_blocks
from clew.stress.waves import Wave

FAILED_SHARE = 0.1
"""Share of failed episodes above which the agent is at fault."""

BLOCKED_SHARE = 0.6
"""Share of an episode's time for which others hold the event loop, above which that is suspicious."""


def judge(
    waves: Sequence[Wave], confirming: Sequence[Wave], origins: Origins, state: State
) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts of the waves at full speed, and notes on what they cannot show, with advice.

    Args:
        waves: The waves warm, alone, narrow, crowd and again.
        confirming: Further crowds.
        origins: Names the lines that drew random numbers.
        state: Names the object that holds crossed text.
    """
    warm, alone, _, crowd, again = waves
    verdicts = judge_blocks(crowd.watched, again.watched)
    waits, note = _waiting([*waves, *confirming], blocked=bool(verdicts))
    notes = [note] if note else []
    if not (verdicts or waits or notes):
        verdicts += _held(crowd, again)
    differing = _differing(warm, alone, crowd, again, origins)
    by_chance = repeat.by_chance(crowd.told, again.told)
    if by_chance and not differing:
        notes.append(
            f"whether the same seeds give the same results: run again, {len(by_chance)} of {len(crowd.episodes)} "
            f"episodes were answered differently where they asked the same, so what differs may be the model's doing. "
            f"Run the stress without --base-url: the stand-in repeats its answers."
        )
    verdicts += waits + _strangers(alone, crowd, again) + judge_answers(waves, state, repeats=not by_chance)
    return verdicts + differing + _failing(alone, crowd, again), notes


def waits_for_one_another(waves: Sequence[Wave]) -> Verdict | None:
    """Return a verdict if every crowd (each wave after narrow) shows that something runs one at a time, else None."""
    _, alone, narrow, *crowds = waves
    if not all(_shows_throughput(wave) for wave in waves):
        return None
    verdicts = [serial.verdict(alone.crowd, narrow.crowd, wave.crowd) for wave in crowds]
    return verdicts[0] if None not in verdicts else None


def _shows_throughput(wave: Wave) -> bool:
    """Return whether any episode of a wave ended by itself and without an error.

    A wave of errors shows nothing about throughput: raising errors takes the processor, in turns.
    """
    return any(episode.error is None for episode in wave.ended)


def _waiting(waves: Sequence[Wave], *, blocked: bool) -> tuple[list[Verdict], str]:
    """Return a verdict if something runs one at a time, or a note if the waves cannot show it.

    The waves are warm, alone and narrow, then all crowds. `blocked` is True if something blocks the event loop.
    """
    _, alone, narrow, *crowds = waves
    requests = [request for wave in waves for request in wave.requests]
    refused = [request.refused for request in requests if request.refused]
    if refused:
        return [], (
            f"latency, throughput and what runs one at a time: {len(refused)} of {len(requests)} requests were refused "
            f"({_refusals(refused)}), and waits before another try are in them. Ask for less at once: --batch, --group."
        )
    if not all(_shows_throughput(wave) for wave in waves):
        return [], "what runs one at a time: too few episodes ended without an error. Repair that first."
    waits = waits_for_one_another(waves)
    if waits is not None:
        return [waits], ""
    quicker = min((wave.crowd for wave in crowds), key=lambda crowd: crowd.idle_s)
    few, one = narrow.crowd, alone.crowd
    if quicker.width == few.width:
        return [], "what runs one at a time: too few episodes run at once. Ask for more: --batch, --group."
    saturated, place = serial.saturates(one, few, quicker), serial.waited_most(one, quicker)
    if saturated and serial.by_model(one, quicker):
        return [], (
            f"what runs one at a time: throughput did not grow with the width because the model answers more slowly: "
            f"it has an episode for {quicker.model_s:.2f} s at {quicker.width} at once, alone for {one.model_s:.2f} s. "
            f"Run the stress without --base-url: the stand-in answers as fast in a crowd."
        )
    suspected = place is not None and quicker.busy_share > serial.BUSY and serial.slows(few, quicker)
    if not blocked and (saturated or suspected):
        return [], (
            f"what runs one at a time: throughput did not grow with the width, and at {quicker.width} at once the "
            f"processor was wanted for {quicker.busy_share:.0%} of the time"
            + (f"; episodes waited most at {place}" if place is not None else "")
            + ". Ask again with a stand-in of longer latency (--latency), with fewer episodes at once (--batch), or "
            "when the machine is less busy."
        )
    return [], ""


def _held(*crowds: Wave) -> list[Verdict]:
    """Return a suspicion if episodes wait mostly for the event loop, although no line holds it for long."""
    latencies = [wave_report(wave, None).latency for wave in crowds]
    if not all(latencies):
        return []
    share = min(each["blocked"].p50 / max(each["episode"].p50, 1e-9) for each in latencies)
    if share < BLOCKED_SHARE:
        return []
    what = (
        f"episodes wait for the event loop for {share:.0%} of their time, perhaps for code that is slow on long texts"
    )
    advice = "ask again with longer answers (--tokens), or with fewer episodes at once (--batch)"
    return [Verdict(kind="blocks", what=what, evidence=["no single line holds it for long", advice], certain=False)]


def hanging(waves: Sequence[Wave]) -> list[Verdict]:
    """Return a verdict for each place where episodes that did not end were waiting, however few they are."""
    count = sum(len(wave.episodes) for wave in waves)
    by_place = grouped([(wave, episode) for wave in waves for episode in wave.stopped], lambda entry: entry[1].at)
    return [
        Verdict(
            kind="hangs",
            what=f"{len(stopped)} of {count} episodes did not end, and were stopped",
            where=place,
            evidence=[f"{e.id}, with {wave.width} at once, {e.stopped}" for wave, e in stopped[:3]],
        )
        for place, stopped in sorted(by_place.items(), key=lambda entry: -len(entry[1]))
    ]


def _failing(alone: Wave, crowd: Wave, again: Wave) -> list[Verdict]:
    failed_alone = sum(episode.error is not None for episode in alone.ended)
    crowded = [*crowd.ended, *again.ended]
    failed = sum(episode.error is not None for episode in crowded)
    if not failed_alone and failed <= FAILED_SHARE * len(crowded):
        return []
    commonest = failures([*alone.ended, *crowded])[0]
    what = f"{failed} of {len(crowded)} episodes failed at {crowd.width} at once, {failed_alone} of "
    what += f"{len(alone.episodes)} alone"
    refused = [refusal for wave in (alone, crowd, again) for refusal in _refused_last(wave)]
    evidence = [commonest.error]
    if refused:
        what += f"; the provider had refused the last request of {len(refused)} of them"
        evidence.append(f"the provider said {_refusals(refused)}; ask for less at once (--batch, --group)")
    return [Verdict(kind="fails", what=what, where=commonest.at, evidence=evidence)]


def _refused_last(wave: Wave) -> list[str]:
    """Return the messages with which the provider refused the last request of episodes that failed."""
    last = {request.episode: request.refused for request in wave.requests}
    return [last[each.id] for each in wave.episodes if each.error is not None and last.get(each.id)]


def _refusals(refused: Sequence[str]) -> str:
    """Return how often each kind of refusal happened, and an example of the most common."""
    kinds = Counter(refusal.partition(":")[0] for refusal in refused).most_common()
    example = next(refusal for refusal in refused if refusal.startswith(kinds[0][0]))
    return ", ".join([f"{count} times {kind}" for kind, count in kinds]) + f", such as {example!r}"


def _strangers(*waves: Wave) -> list[Verdict]:
    """Return a verdict if episodes were refused because they used another's key, which the gateway's error names."""
    episodes = [episode for wave in waves for episode in wave.episodes]
    ids = {episode.id for episode in episodes}
    strangers = [
        episode
        for episode in episodes
        if episode.error and (ids - {episode.id}).intersection(re.findall(r"session (\S+) has ended", episode.error))
    ]
    if not strangers:
        return []
    return [
        Verdict(
            kind="shared",
            what=f"{len(strangers)} of {len(episodes)} episodes used the API key of another, whose session had ended",
            where=strangers[0].at,
            evidence=[
                f"{strangers[0].id}: {strangers[0].error}",
                "make the client anew in each run, with the base_url and api_key that it is given",
            ],
        )
    ]


def _differing(warm: Wave, alone: Wave, crowd: Wave, again: Wave, origins: Origins) -> list[Verdict]:
    """Return a verdict if an episode's results depend on chance, or on other episodes that run before or beside it."""
    by_chance_alone = repeat.differences(warm.told, alone.told)
    by_chance, among = repeat.differences(crowd.told, again.told), crowd
    if not by_chance:
        by_chance, among = by_chance_alone, warm
    if by_chance:
        repeats_alone = warm.told and not by_chance_alone
        hint = ["alone, an episode repeats: look at what they share"] if repeats_alone else []
        drawn = [] if repeats_alone else [place for place, _ in origins.drawn.most_common(3)]
        if drawn:
            hint.append(
                f"chance or the clock is asked at {', '.join(drawn)}: seed a random.Random of the episode's own with "
                f"its row"
            )
        return [
            Verdict(
                kind="differs",
                what=f"{len(by_chance)} of {len(among.episodes)} episodes differ when they are run again with the same "
                f"seeds and answers",
                where=drawn[0] if drawn else crowd.asked_at(by_chance[0][0]),
                evidence=[f"{episode}: {what}" for episode, what in by_chance[:4]] + hint,
            )
        ]
    by_company = repeat.differences(alone.told, crowd.told)
    if by_company:
        return [
            Verdict(
                kind="shared",
                what="an episode does something else when others run before or beside it",
                where=crowd.asked_at(by_company[0][0]),
                evidence=[f"{episode}, alone and in a crowd: {what}" for episode, what in by_company[:4]],
            )
        ]
    return []
