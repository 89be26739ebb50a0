"""Verdicts on an agent that the waves support, and notes on what they cannot show."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from clew.stress import repeat, serial
from clew.stress.crossings import LEAST_OF_ANSWER, MARK, judge_answers
from clew.stress.origins import Origins
from clew.stress.report import failures, wave_report
from clew.stress.requests import plain
from clew.stress.shared import State
from clew.stress.verdict import Kind, Verdict, grouped
from clew.stress.watch import judge_blocks
from clew.stress.waves import NO_REQUEST, Wave

FAILED_SHARE = 0.1
"""Share of episodes with an error, or with a warning of one kind, above which the agent is at fault."""

BLOCKED_SHARE = 0.6
"""Share of an episode's time spent waiting for the event loop, above which this is suspicious."""

WARNINGS: dict[str, tuple[Kind, bool, str]] = {
    "a branch (chat": ("rewrites", False, "lose the model's reasoning; harmless for a model that does not reason"),
    "a branch (other": ("rewrites", False, "offer other tools in the middle of a conversation"),
    "own words": ("rewrites", False, "put words of the model into a new conversation, which is a sequence of its own"),
    "a branch": ("rewrites", True, "change their conversation so far; send back what was sent and said"),
    "the client sets N episodes": ("sampling", False, "set the seed; with one, a group's episodes are all the same"),
    "greedy": ("sampling", True, "ask at temperature 0; a group's episodes are then all the same"),
    "sampling": ("sampling", False, "set the sampling themselves; leave it to the configuration"),
    "N was cut": ("sampling", False, "have answers cut short; is their max_tokens large enough?"),
    "a fault": ("rewards", True, "give a reward although the server had failed; let its error out"),
    "an error": ("rewards", False, "give a reward although the server had failed at once; let its error out"),
    "a second try": ("rewards", True, "ask again when an answer was cut short, and are rewarded for both alike"),
}
"""Findings by the beginning of a warning's kind: the finding's kind, whether it is certain, and what episodes do.

If several beginnings match, the first one counts. Other warnings are no findings.
"""


def judge(waves: Sequence[Wave], origins: Origins, state: State) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts that waves at full speed support, and notes, with advice, on what they cannot show.

    Args:
        waves: The waves warm, alone, narrow, crowd and again, in this order, and further crowds that confirm.
        origins: Names the lines that drew random numbers.
        state: Names the object that holds crossed text.
    """
    warm, alone, _, crowd, again, *_ = waves
    verdicts = judge_blocks([*crowd.blocks, *again.blocks], crowd.seconds + again.seconds)
    waits = _waiting(waves, blocked=bool(verdicts))
    notes = [waits] if isinstance(waits, str) else []
    if not verdicts and waits is None:
        verdicts += _held(crowd, again)
    differing = _differing(warm, alone, crowd, again, origins)
    by_chance = repeat.by_chance(crowd.behaviour, again.behaviour)
    if by_chance and not differing:
        notes.append(
            f"whether the same seeds give the same results: run again, {len(by_chance)} of {len(crowd.episodes)} "
            f"episodes were answered differently where they asked the same, so what differs may be the model's doing. "
            f"Run the stress without --base-url: the stand-in repeats its answers."
        )
    verdicts += [waits] if isinstance(waits, Verdict) else []
    verdicts += judge_answers(waves[:5], state, repeats=not by_chance)
    return verdicts + differing + _failing(alone, crowd, again, state), notes


def waits_for_one_another(waves: Sequence[Wave]) -> Verdict | None:
    """Return a verdict if every crowd (each wave after narrow) shows that something runs one at a time, else None."""
    _, alone, narrow, *crowds = waves
    if not all(_shows_throughput(wave) for wave in waves):
        return None
    verdicts = [serial.verdict(alone, narrow, wave) for wave in crowds]
    return verdicts[0] if None not in verdicts else None


def _shows_throughput(wave: Wave) -> bool:
    """Return whether any episode of a wave ended by itself and without an error.

    A wave of errors shows nothing about throughput: raising errors takes the processor, in turns.
    """
    return any(episode.error is None for episode in wave.ended)


def _waiting(waves: Sequence[Wave], *, blocked: bool) -> Verdict | str | None:
    """Return a verdict if something runs one at a time, a note if the waves cannot show it, or else None.

    The waves are warm, alone and narrow, then all crowds. `blocked` is True if something blocks the event loop.
    """
    _, alone, narrow, *crowds = waves
    requests = [request for wave in waves for request in wave.requests]
    refused = [request.refused for request in requests if request.refused]
    if refused:
        return (
            f"latency, throughput and what runs one at a time: {len(refused)} of {len(requests)} requests were refused "
            f"({_refusals(refused)}), and waits before another try are in them. Ask for less at once: --batch, --group."
        )
    if not all(_shows_throughput(wave) for wave in waves):
        return "what runs one at a time: too few episodes ended without an error. Repair that first."
    waits = waits_for_one_another(waves)
    if waits is not None:
        return waits
    quicker = min(crowds, key=lambda crowd: crowd.idle_s)
    if quicker.width == narrow.width:
        return "what runs one at a time: too few episodes run at once. Ask for more: --batch, --group."
    saturated, place = serial.saturates(alone, narrow, quicker), serial.waited_most(alone, quicker)
    if saturated and serial.by_model(alone, quicker):
        return (
            f"what runs one at a time: throughput did not grow with the width because the model answers more slowly: "
            f"it has an episode for {quicker.model_s:.2f} s at {quicker.width} at once, alone for {alone.model_s:.2f} "
            f"s. Run the stress without --base-url: the stand-in answers as fast in a crowd."
        )
    suspected = place is not None and quicker.busy_share > serial.BUSY and serial.slows(narrow, quicker)
    if not blocked and (saturated or suspected):
        return (
            f"what runs one at a time: throughput did not grow with the width, and at {quicker.width} at once the "
            f"processor was wanted for {quicker.busy_share:.0%} of the time"
            + (f"; episodes waited most at {place}" if place is not None else "")
            + ". Ask again with a stand-in of longer latency (--latency), with fewer episodes at once (--batch), or "
            "when the machine is less busy."
        )
    return None


def _held(*crowds: Wave) -> list[Verdict]:
    """Return a suspicion if episodes wait mostly for the event loop, although no line holds it for long."""
    latencies = [wave_report(wave, None).latency for wave in crowds]
    if not all(latencies):
        return []
    share = min(each["blocked"]["p50"] / max(each["episode"]["p50"], 1e-9) for each in latencies)
    if share < BLOCKED_SHARE:
        return []
    what = f"episodes wait for the event loop for {share:.0%} of their time, perhaps for code slow on long texts"
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


def _failing(alone: Wave, crowd: Wave, again: Wave, state: State) -> list[Verdict]:
    failed_alone = sum(episode.error is not None for episode in alone.ended)
    crowded = [*crowd.ended, *again.ended]
    failed = sum(episode.error is not None for episode in crowded)
    if not failed_alone and failed <= FAILED_SHARE * len(crowded):
        return []
    commonest = failures([*alone.ended, *crowded])[0]
    what = f"{failed} of {len(crowded)} episodes failed in two waves of {crowd.width} at once, {failed_alone} of "
    what += f"{len(alone.ended)} alone"
    where, kind, evidence, refused = commonest.at, "fails", [commonest.error], []
    for wave in (alone, crowd, again):  # the last request decides
        last = {request.episode: request.refused for request in wave.requests}
        refused += [last[each.id] for each in wave.episodes if each.error is not None and last.get(each.id)]
    if refused:
        what += f"; the provider had refused the last request of {len(refused)} of them"
        evidence.append(f"the provider said {_refusals(refused)}; ask for less at once (--batch, --group)")
    if "has ended: its episode is over" in commonest.error:  # the session of the API key
        kind = "shared"
        evidence.append("it is another's: make the client anew in each run, with the base_url and api_key of this run")
    if commonest.error == NO_REQUEST:
        said = (request.said[:MARK] for request in [*alone.requests, *crowd.requests])
        holder = next(filter(None, (state.place_of(text) for text in said if len(text) >= LEAST_OF_ANSWER)), "")
        if holder:
            where, kind = holder, "shared"
            evidence.append("replies are cached across episodes; each episode must ask for itself")
    return [Verdict(kind=kind, what=what, where=where, evidence=evidence)]


def _refusals(refused: Sequence[str]) -> str:
    """Return how often each kind of refusal happened, and an example of the most common."""
    kinds = Counter(refusal.partition(":")[0] for refusal in refused).most_common()
    example = next(refusal for refusal in refused if refusal.startswith(kinds[0][0]))
    return ", ".join([f"{count} times {kind}" for kind, count in kinds]) + f", such as {example!r}"


def _differing(warm: Wave, alone: Wave, crowd: Wave, again: Wave, origins: Origins) -> list[Verdict]:
    """Return a verdict if an episode's results depend on chance, or on other episodes that run before or beside it."""
    differ_alone = repeat.differences(warm.behaviour, alone.behaviour)
    differ_in_crowd = repeat.differences(crowd.behaviour, again.behaviour)
    differ, wave = (differ_in_crowd, crowd) if differ_in_crowd else (differ_alone, warm)
    if differ:
        drawn, clocks = ([place for place, _ in lines.most_common(3)] for lines in (origins.drawn, origins.clocks))
        hint = []
        if warm.behaviour and not differ_alone:
            drawn, clocks, hint = [], [], ["alone, an episode repeats: look at what they share"]
        if drawn:
            hint.append(f"random numbers are drawn at {', '.join(drawn)}: seed a random.Random with the row")
        if clocks:
            hint.append(f"a clock is read at {', '.join(clocks)}: keep its time out of what is sent and of the reward")
        what = f"{len(differ)} of {len(wave.episodes)} episodes differ when run again with the same seeds and answers"
        where = next(iter(drawn + clocks), "") or crowd.asked_at(differ[0].episode)
        return [repeat.judge_differences("differs", what, differ, where, advice=hint)]
    by_company = repeat.differences(alone.behaviour, crowd.behaviour)
    if not by_company:
        return []
    what = "an episode does something else when others run before or beside it; first alone, then in a crowd"
    return [repeat.judge_differences("shared", what, by_company, crowd.asked_at(by_company[0].episode))]


def judge_warnings(warned: Mapping[str, Mapping[str, str]], crowd: Wave, troubled: int) -> list[Verdict]:
    """Return verdicts on warnings.

    Args:
        warned: Texts of the warnings, by their kind and then by the ID of their episode.
        crowd: Wave in which the warned episodes ran.
        troubled: Number of episodes in the wave whose server fails, from which the warnings about rewards are.
    """
    by_start: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for kind, warnings in list(warned.items()):
        if kind == "a branch (end token)":
            continue  # the stand-in ends all its texts with one, also where a model would stop at a stop string
        if start := next(filter(kind.startswith, WARNINGS), None):
            by_start[start].append(warnings)
    verdicts = []
    for start, several in by_start.items():
        kind, certain, what = WARNINGS[start]
        episodes = {episode for warnings in several for episode in warnings}
        if start == "N was cut" and 2 * len(episodes) <= len(crowd.episodes):
            continue  # real models also say too much at times, and the stress cuts some answers itself
        if start == "own words" and any(each.startswith("a branch") for each in by_start):
            continue
        texts = [text for warnings in several for text in warnings.values()]
        # All texts but the one about seeds have IDs. So a text repeats only if two episodes set the same seed.
        certain = certain or len(set(texts)) < len(texts)
        certain = certain and (kind == "rewards" or len(episodes) > FAILED_SHARE * len(crowd.episodes))
        where, evidence = crowd.asked_at(min(episodes)), [next(iter(warnings.values())) for warnings in several[:4]]
        count = f"{troubled} troubled" if kind == "rewards" else str(len(crowd.episodes))
        what = f"{len(episodes)} of {count} episodes {what}"
        verdicts.append(Verdict(kind=kind, what=what, where=where, evidence=evidence, certain=certain))
    return verdicts


def add_warnings(troubled: Wave, crowd: Wave, warn: Callable[[str, str, str], None]) -> None:
    """Warn of rewards for episodes whose requests failed, and of the model's words in another conversation."""
    for episode in crowd.episodes:
        for a, b in itertools.combinations(crowd.requests_of(episode.id), 2):
            said = a.said[:MARK]
            if len(said) >= LEAST_OF_ANSWER and not b.asked.startswith(a.asked) and said in plain(b.asked):
                warn(episode.id, f"{b.id} has words of {a.id} in it, and does not continue it", "own words")
    for episode in troubled.episodes:
        requests = troubled.requests_of(episode.id)
        answered = Counter(request.asked for request in requests if not request.refused)
        usual = Counter(request.asked for request in crowd.requests_of(episode.id))
        for request in requests:
            if episode.error is None and request.refused and not answered[request.asked]:
                what = f"{request.id} failed, and the reward is {episode.reward!r}"
                warn(episode.id, what, "a fault" if answered else "an error")
            if request.cut and answered[request.asked] > max(1, usual[request.asked]):
                warn(episode.id, f"{request.id} was cut short, and asked for once more", "a second try")
