"""Judges ranks that wait for one another in different calls: cycles of collectives and messages."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import PurePath

from clew.hang import source
from clew.hang.activity import DISTRIBUTED, LENGTH, POINT_TO_POINT
from clew.hang.collective_calls import different_counts, first_different_call
from clew.hang.observed import Frame
from clew.hang.rounds import is_past, is_rounds_ahead, may_skip
from clew.hang.same_call import deviating, other_roots, other_shapes, unequal_counters
from clew.hang.verdict import MESSAGES, Actor, Sink, Verdict, names, sentences, subject
from clew.hang.waits_for import key_of


def cycle(sink: Sink) -> Verdict:
    """Judge ranks that wait for one another: cleanup, messages, crossed groups, or different collectives."""
    return next(verdict for rule in CYCLES if (verdict := rule(sink)) is not None)


def _cleaning_up(sink: Sink) -> Verdict | None:
    """Judge ranks that clean up while the others still train.

    A `finally` or `__exit__` may hide an exception, because a collective in it waits for ranks that still train.
    """
    cleaning = [a for a in sink.culprits if a.activity.cleanup or a.activity.kind == "destroy"]
    if not cleaning or len(cleaning) == len(sink.culprits):
        return None
    rest = [a for a in sink.culprits if a not in cleaning]
    failed = any(a.activity.cleanup != "finally" or a.hidden_exception or a.process.old_error for a in cleaning)
    if len(cleaning) > len(rest) and not failed:
        why = (
            f"{subject(rest, 'still trains', 'still train')}; the others have come to a `finally`. There may have been "
            f"a batch more here, or an exception brought the others there. {sink.says}"
        )
        return sink.blame("collective mismatch", rest, why, confidence="medium", structural=True)
    hidden = next((f"{a.hidden_exception} is" for a in cleaning if a.hidden_exception), "An exception may be")
    hidden += " hidden there: it is shown only after the cleanup ends, and that waits."
    if all(a.activity.cleanup == source.WITHOUT_RAISE for a in cleaning):
        hidden = "An exception brought it there, and is not raised again: only the log may show it."
    why = (
        f"{subject(cleaning, 'is', 'are')} cleaning up (in {cleaning[0].activity.cleanup}) while the others still "
        f"train. {hidden} {sink.says}"
    )
    return sink.blame("cleanup deadlock", cleaning, why, structural=True)


def _blocks_its_loop(sink: Sink) -> Verdict | None:
    """Judge a rank that calls a collective on the event loop that should answer another rank."""
    blocked = [a for a in sink.culprits if a.activity.kind in DISTRIBUTED and a.activity.in_loop]
    asking = [a for a in sink.culprits if a.activity.kind in ("http", "network")]
    if not blocked or not asking:
        return None
    one = blocked[0].activity
    why = (
        f"{subject(blocked, 'calls', 'call')} {one.op} on an event loop, at {one.place}: nothing else on that loop can "
        f"run, and {subject(asking, 'waits', 'wait')} for an answer that it should give. {sentences(asking)}"
    )
    return sink.blame("event loop blocked", blocked, why, cause="event loop blocked", structural=True)


def _elsewhere(sink: Sink) -> Verdict | None:
    """Judge ranks outside of collectives that wait for ranks in a collective, which wait for them."""
    inside = [a for a in sink.culprits if a.activity.kind in DISTRIBUTED]
    outside = [a for a in sink.culprits if a not in inside]
    if not outside:
        return None
    who = f"ranks {names(inside)} could end that wait, and they wait"
    who = who if len(inside) > 1 else f"rank {names(inside)} could end that wait, and it waits"
    why = f"{sentences(outside)} Only {who} for rank {names(outside)} in {inside[0].activity.op}."
    return sink.blame("missing rank", outside, why, structural=True)


def _only_messages(sink: Sink) -> Verdict | None:
    """Judge ranks that all send or receive: in a cycle, or with other sizes or numbers of messages."""
    culprits, kinds = sink.culprits, {a.activity.kind for a in sink.culprits}
    if not kinds <= set(MESSAGES):
        return None
    if len(kinds) == len(culprits) == 2 and (found := other_shapes(culprits)):
        return found
    if found := _other_number(sink):
        one, number = found
        why = f"Rank {one.rank} alone has {number}, so it expects another number of rounds. {sink.says}"
        return sink.blame("pipeline micro-batch mismatch", [one], why, confidence="medium", structural=True)
    if kinds == {"recv"} and (parted := _left_a_loop(culprits, sink.sources)):
        pattern = "pipeline micro-batch mismatch"
        why = f"Ranks {names(culprits)} all receive, and none of them sends. {parted[1]} {sink.says}"
    elif kinds == {"send"} and (ahead := _further_on(culprits, sink.sources)):
        why = (
            f"Ranks {names(culprits)} all send, and none of them receives. Rank {ahead.rank} is further on: it "
            f"may receive fewer micro-batches than are sent to it. {sink.says}"
        )
        return sink.blame("pipeline micro-batch mismatch", culprits, why, structural=True)
    else:
        pattern = "send/receive cycle"
        tags = {a.activity.tag for a in culprits if a.activity.tag.isdigit()}
        differ = f" Their tags differ: {' and '.join(sorted(tags))}." if len(kinds) == 2 and len(tags) == 2 else ""
        why = f"Ranks {names(culprits)} wait for one another in send and recv, so none proceeds.{differ} {sink.says}"
        if differ and (ahead := _a_message_ahead(culprits, sink.sources)):
            why += f" Rank {ahead.rank} is further on: it may have left a message out, or counted one too many."
            return sink.blame(pattern, [ahead], why, structural=True, confidence="medium")
        if odd := _with_other_partners([a for a in (*culprits, *sink.waiters) if a.rank is not None]):
            why += f" Rank {odd.rank} has a part in each message that only one side expects: it has other partners."
            return sink.blame(pattern, [odd], why, structural=True, confidence="medium")
    return with_callers(sink.blame(pattern, culprits, why, structural=True), culprits)


def _with_other_partners(ranks: Sequence[Actor]) -> Actor | None:
    """Return the only rank that takes part in every message that just one side expects; None without one.

    The ranks are in batches that send and receive at once, as in a ring. That rank has another order of the ring.
    """
    known = all(a.activity.sends and a.activity.peers for a in ranks)
    sent = {(a.rank, peer) for a in ranks for peer in a.activity.sends}
    odd = sent ^ {(peer, a.rank) for a in ranks for peer in a.activity.peers}
    common = [a for a in ranks if all(a.rank in message for message in odd)]
    return common[0] if known and odd and len(common) == 1 else None


def _further_on(ranks: Sequence[Actor], sources: Mapping[str, str]) -> Actor | None:
    """Return the rank that has come past the places of all others; None if there is none."""
    others = {a.pid: [b for b in ranks if b is not a] for a in ranks}
    return next((a for a in ranks if all(is_past(a, b, sources, loops=False) for b in others[a.pid])), None)


def _a_message_ahead(ranks: Sequence[Actor], sources: Mapping[str, str]) -> Actor | None:
    """Return the rank with the higher tag if both give the same variable, such as a version, as the tag; or None."""
    given = set[str]()
    for one in (a.activity for a in ranks):
        calls = source.calls_at(sources.get(one.file, ""), one.line)
        tags = [tag for call in calls if (tag := source.keyword(call, "tag")) is not None]
        given |= {ast.unparse(tag) for tag in tags if isinstance(tag, ast.Name | ast.Attribute)} or {""}
    return max(ranks, key=lambda a: int(a.activity.tag)) if len(given) == 1 and "" not in given else None


def _left_out(sink: Sink) -> Verdict | None:
    """Judge ranks that are in a later round than a member of their group that waits for them in a collective.

    Collectives with a root are left out: their sender may go on while others still receive.
    """
    for still in (a for a in sink.culprits if a.activity.kind == "collective" and not a.activity.root):
        act = still.activity
        if act.branch == "alone":
            continue
        members = [a for a in sink.job if a.rank is not None and (act.members is None or a.rank in act.members)]
        absent = [a for a in members if (key_of(a.activity), a.activity.op) != (key_of(act), act.op)]
        again = any(a.activity.kind == "collective" and a.activity.group == act.group for a in absent)
        most = 2 * len(absent) > len(members) - again  # of two in one group, either may be the odd one
        if not absent or (most and not (len(members) == 2 and may_skip(absent[0], still, sink.sources))):
            continue
        if all(is_rounds_ahead(a, still, sink.sources) for a in absent):
            why = (
                f"{subject(absent, 'is', 'are')} in a later round than rank {still.rank}, which still waits in "
                f"{act.op} of group {act.group} at {act.site}: {subject(absent, 'has', 'have')} left it out. "
                f"{sink.says}"
            )
            sure = "medium" if most else "high"
            return sink.blame("collective mismatch", absent, why, structural=True, confidence=sure)
    return None


def _gone_on(sink: Sink) -> Verdict | None:
    """Judge stages of a pipeline that went on to a collective while a neighbour still exchanges micro-batches."""
    gone = [a for a in sink.culprits if a.activity.kind not in MESSAGES]
    if len(gone) == len(sink.culprits):
        return None
    numbers = {a.rank for a in gone}
    waiting = [a for a in sink.culprits if a not in gone and numbers & set(a.activity.peers)]
    more = ""
    if len(gone) == 1 and waiting:
        one = gone[0]
        if len(waiting) > 1:  # several await a message from one rank, so that one has left
            why = f"Ranks {names(waiting)} await messages of rank {one.rank}, which has gone on: {one.says}."
            return sink.blame("pipeline micro-batch mismatch", gone, why, structural=True)
        if through := [a for a in sink.waiters if key_of(a.activity) == key_of(one.activity)]:
            more = (
                f" {subject(through, 'has come', 'have come')} to {one.activity.op}, too, so rank {names(waiting)} "
                f"may exchange more messages than its peers do: look at rank {names(waiting)} first."
            )
    why = (
        "One side expects a message that the other does not send (or the reverse): the other side has gone on to "
        f"another operation. The numbers of micro-batches may differ. {sink.says}{more}"
    )
    if found := _other_number(sink):
        one, number = found
        why += f" Rank {one.rank} alone has {number} there, so look at it first."
        return sink.blame("pipeline micro-batch mismatch", [one], why, confidence="medium", structural=True)
    # At fault are the ranks that went on, and those whose peer is one of them or unknown. If all others
    # are at one line, and those that went on have come past it, only these are.
    still = [a for a in sink.culprits if a not in gone]
    sides = [a for a in sink.culprits if a in gone or a in waiting or not a.activity.peers]
    if len(still) > 1 and len(gone) == len(waiting) == 1 and _in_one_turn(still, gone[0], sink.sources):
        why += f" The others wait in the same round for messages that should come from rank {gone[0].rank}."
        return sink.blame("pipeline micro-batch mismatch", gone, why, confidence="medium", structural=True)
    if len(still) > len(gone) and len({a.activity.line for a in still}) == 1:
        sides = gone if all(is_past(a, b, sink.sources, loops=False) for a in gone for b in still) else sides
    return sink.blame("pipeline micro-batch mismatch", sides, why, structural=True)


def _other_number(sink: Sink) -> tuple[Actor, str] | None:
    """Return the rank that alone has another number of rounds for the exchange of messages, and that number.

    None unless all ranks, at least three, are in the function that has the number, and exactly one of them has another
    one.
    """
    ranks = [a for a in sink.job if a.rank is not None and a.process.user_frames]
    if len(ranks) < 3:
        return None
    for looping, holder, name in _limits(sink):
        place = (holder.file, holder.function)
        alike = [(a, f) for a in ranks for f in a.process.user_frames if (f.file, f.function) == place]
        values = [f.locals.get(name, "") for _, f in alike]
        if [a for a, _ in alike] != ranks or sorted(Counter(values).values()) != [1, len(ranks) - 1]:
            continue
        alone, frame = next(each for each, value in zip(alike, values, strict=True) if values.count(value) == 1)
        # A stage with no round at all is the first or the last. Before the fewest rounds are over, all still agree.
        least = min(int(each) if each.isdigit() else 0 for each in values)
        turns = [_turn(each, sink.sources) for each in (looping, frame)]
        agree = any(each.isdigit() and int(each) < least for each in turns)
        if least and not agree and alone in sink.culprits:
            return alone, f"{name} = {frame.locals.get(name, '')}"
    return None


def _limits(sink: Sink) -> Iterator[tuple[Frame, Frame, str]]:
    """Yield each number of rounds for an exchange of messages.

    Yields:
        The frame with the loop, the frame that has the number (the same one, or its caller, which passes the number),
        and the number's name there.
    """
    for stack in (a.process.user_frames for a in sink.culprits if a.activity.kind in MESSAGES):
        for depth, looping in enumerate(stack):
            called = {f.name for f in stack[:depth]} or POINT_TO_POINT
            yield from ((looping, looping, name) for name in _own_limits(looping, called, sink.sources))
            for caller in stack[depth + 1 : depth + 2]:
                yield from ((looping, caller, name) for name in _passed_limits(looping, caller, sink.sources))


def _skipped_a_round(sink: Sink) -> Verdict | None:
    """Judge a stage whose loop over micro-batches has kept too few of them, while a neighbour is still in that loop.

    The limit of the loop is the same for both, so the stage has dropped one, and has not sent or taken it.
    """
    for still, frame in ((a, f) for a in sink.culprits for f in a.process.user_frames):
        text, turn = sink.sources.get(frame.file, ""), _turn(frame, sink.sources)
        loop = source.loop_at(text, frame.line)
        if not isinstance(loop, ast.For) or not turn.isdigit():
            continue
        limits = source.names_in(loop.iter)
        lists = [name for name in source.filled(loop) if frame.locals.get(f"len({name})") == turn]  # one in each round
        lists = [name for name in lists if not _may_be_shorter(name, loop, text)]
        for one in (a for a in sink.culprits if a is not still):
            same = [f for f in one.process.user_frames if (f.file, f.function) == (frame.file, frame.function)]
            left = [f for f in same if f.line > (loop.end_lineno or loop.lineno)]
            alike = (f for f in left if all(f.locals.get(name) == frame.locals.get(name) for name in limits))
            counts = ((name, f.locals.get(f"len({name})", "")) for f in alike for name in lists)
            if kept := next((each for each in counts if each[1].isdigit() and 0 < int(each[1]) <= int(turn)), None):
                why = (
                    f"Rank {one.rank} has left the loop at {PurePath(frame.file).name}:{loop.lineno} with {kept[1]} "
                    f"items in {kept[0]}, and rank {still.rank} is in a later round of it: rank {one.rank} may have "
                    f"dropped a micro-batch, so that a message is missing. {sink.says}"
                )
                return sink.blame("pipeline micro-batch mismatch", [one], why, confidence="medium", structural=True)
    return None


def _may_be_shorter(name: str, loop: ast.For, text: str) -> bool:
    """Return whether a list loses items again, or a loop fills it only in some rounds, as `if step < 2` does."""
    taken = rf"\b{name}\.(pop|popleft|clear)\(|del {name}\b|\b{name} = {name}\[|\*{name}\b.*=|\b{name}\b.*maxlen"
    tests = [each.test for each in source.nodes_in(ast.If, loop) if name in source.filled(each)]
    compared = (side for each in source.nodes_in(ast.Compare, *tests) for side in (each.left, *each.comparators))
    sides = [each for each in compared if not isinstance(each, (ast.Call, ast.NamedExpr))]
    some_rounds = name in source.names_in(*tests) or source.names_in(*sides) & source.names_in(loop.target)
    return bool(some_rounds or re.search(taken, text))


def _in_one_turn(ranks: Sequence[Actor], gone: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether ranks of a chain, each of which receives from the one before it, are in the same round.

    The rounds are those of the loops in which they receive. The rank `gone` must be in none of these loops.
    """
    for frame in (a.process.user_frames[0] for a in ranks if a.process.user_frames):
        loop = source.loop_at(sources.get(frame.file, ""), frame.line)
        lines = {f.line for f in gone.process.user_frames if (f.file, f.function) == (frame.file, frame.function)}
        receives = [call for call in source.calls_in(loop) if source.last_name(call.func) in ("recv", "irecv")]
        # With a second receive in the loop, the first of the chain may have taken too many messages.
        if loop is None or len(receives) > 1 or any(source.covers(loop, line) for line in lines):
            return False
    numbers = {a.rank for a in ranks}
    in_a_chain = sum(numbers.isdisjoint(a.activity.peers) for a in ranks) == 1
    turns = {_turn(a.process.user_frames[0], sources) for a in ranks if a.process.user_frames}
    return in_a_chain and {a.activity.kind for a in ranks} == {"recv"} and len(turns) == 1 and "" not in turns


def _turn(frame: Frame, sources: Mapping[str, str]) -> str:
    """Return the value of the loop variable if a frame is in a `for` over a range; else ""."""
    loop = source.loop_at(sources.get(frame.file, ""), frame.line)
    counts = isinstance(loop, ast.For) and ast.unparse(loop.iter).startswith("range(")
    return frame.locals.get(source.dotted(loop.target), "") if isinstance(loop, ast.For) and counts else ""


def _own_limits(inner: Frame, exchanging: set[str], sources: Mapping[str, str]) -> list[str]:
    """Return the variables of a frame that limit its rounds of messages.

    Empty unless all its loops with messages have one length. With several, such as warm-up and steady state, healthy
    stages have different numbers, too. `exchanging` has the functions that send or receive.
    """
    loops = (ast.For, ast.ListComp, ast.GeneratorExp)
    every = source.nodes_in(loops, source.enclosing_function(sources.get(inner.file, ""), inner.line))
    lengths = set[frozenset[str]]()
    for each in (loop for loop in every if not source.nodes_in(loops, *ast.iter_child_nodes(loop))):
        over = each.iter if isinstance(each, ast.For) else each.generators[0].iter
        exchanges = any(source.last_name(call.func) in exchanging for call in source.calls_in(each))
        if exchanges and isinstance(over, ast.Call) and source.dotted(over.func) == "range":
            lengths.add(frozenset(source.names_in(*over.args)))
    return sorted(inner.locals.keys() & next(iter(lengths))) if len(lengths) == 1 else []


def _passed_limits(inner: Frame, frame: Frame, sources: Mapping[str, str]) -> list[str]:
    """Return the variables that a frame passes to the function that it calls, and that limit the loop there."""
    if (loop := source.loop_at(sources.get(inner.file, ""), inner.line)) is None:
        return []
    limit = loop.test if isinstance(loop, ast.While) else loop.iter
    limits = {inner.locals.get(source.dotted(each)) for each in ast.walk(limit)}
    calls = source.calls_at(sources.get(frame.file, ""), frame.line)
    passed = {source.dotted(each) for call in calls for each in [*call.args, *(k.value for k in call.keywords)]}
    return sorted(name for name in passed & frame.locals.keys() if frame.locals[name] in limits)


def _roots_differ(sink: Sink) -> Verdict | None:
    """Judge ranks that meet in one collective and name different sources or destinations."""
    for key in dict.fromkeys((key_of(a.activity), a.activity.op) for a in sink.culprits if a.activity.root):
        inside = [a for a in sink.culprits if (key_of(a.activity), a.activity.op) == key]
        if found := other_roots(inside, [a for a in sink.job if a not in inside]):
            return found
    return None


def _wrong_group(sink: Sink) -> Verdict | None:
    """Judge the one rank that calls a collective in another group than the others of its group do.

    It is the same collective if it is called at one place, or from the same source.
    """
    inside = [a for a in sink.job if a.rank is not None and a.activity.kind == "collective"]
    places = {a.pid: [(frame.file, frame.line) for frame in a.process.user_frames] for a in inside}
    found = []
    for one in (a for a in sink.culprits if a in inside):
        same = [a for a in inside if a.activity.op == one.activity.op]
        root = one.activity.root
        here = [a for a in same if places[a.pid] == places[one.pid] or (root and a.activity.root == root)]
        others = [a for a in here if key_of(a.activity) != key_of(one.activity)]
        groups = {a.activity.members for a in others}
        members = set(groups.pop() or ()) if len(groups) == 1 else set[int]()
        if one.rank in members and len(others) == len(here) - 1 and {a.rank for a in others} == members - {one.rank}:
            found.append((one, others[0].activity.group))
    if len(found) != 1:
        return None
    [(one, group)] = found
    calls = f"Rank {one.rank} calls {one.activity.op} in group {one.activity.group}"
    alike = f"from source {one.activity.root}" if one.activity.root else "at the same line"
    why = f"{calls}, and the other ranks of group {group} wait for it in that group {alike}. {sink.says}"
    if not _goes_through_groups(one, sink.sources):
        return sink.blame("collective mismatch", [one], why, structural=True)
    why += " It may go through the groups in another order."
    return sink.blame("crossed groups", [one], why, structural=True)


def _goes_through_groups(one: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether a rank calls its collective in a loop over groups, or over objects with a group each.

    No `if` and no `return` may let it leave out a group.
    """
    frames, place = one.process.user_frames[:2], (sources.get(one.activity.file, ""), one.activity.line)
    given = [source.keyword(call, "group") for call in source.calls_at(*place)]
    for frame in frames:
        text, used = sources.get(frame.file, ""), source.names_in(*given)
        if used & source.loop_variables(text, frame.line):
            inner = source.enclosing_function(*place) if frame is not frames[0] else None
            around = [source.loop_at(text, frame.line), inner]
            return not source.nodes_in((ast.If, ast.Return), *around)
        if used != {"self"}:
            return False
        given = [call.func for call in source.calls_at(sources.get(frames[-1].file, ""), frames[-1].line)]
    return False


def _gone_past(sink: Sink) -> Verdict | None:
    """Judge ranks that are further on in the same round than a member of their group, which waits for them."""
    ranks = [a for a in sink.job if a.rank is not None]
    inside = [a for a in ranks if a.activity.kind == "collective"]
    for still in (a for a in sink.culprits if a in inside):
        group = still.activity.members
        members = [a for a in ranks if (still.activity.group == "world" if group is None else a.rank in group)]
        call = key_of(still.activity), still.activity.op
        absent = [a for a in members if (key_of(a.activity), a.activity.op) != call]
        if still.activity.root and len(absent) > 1:
            continue  # with a root, a rank may have called it and gone on without waiting for the others
        elsewhere = [a for a in absent if a in inside and key_of(a.activity) != key_of(still.activity)]
        gone = [a for a in elsewhere if is_past(a, still, sink.sources, loops=True, job=inside)]
        if gone and len(gone) <= len(members) / 2:
            act = still.activity
            why = (
                f"{subject(gone, 'has', 'have')} gone past {act.op} of group {act.group} at {act.site} in this round "
                f"without calling it, and rank {still.rank} waits there. {sink.says}"
            )
            return sink.blame("collective mismatch", gone, why, structural=True)
    return None


def _crossed_groups(sink: Sink) -> Verdict | None:
    """Judge ranks that use two groups in opposite order."""
    culprits = sink.culprits
    if len({key_of(a.activity) for a in culprits}) == 1 or _one_deviates(culprits):
        return None
    why = f"The ranks call collectives of different groups in different order, and wait for one another. {sink.says}"
    # Ranks that only wait count as well: if all but one are in the same call, that one left the common order.
    beside = [a for a in sink.waiters if a.rank is not None and a.activity.kind == "collective"]
    sides = Counter((key_of(a.activity), a.activity.site) for a in [*culprits, *beside])
    alone = [a for a in culprits if sides[key_of(a.activity), a.activity.site] == 1]
    odd = alone if len(sides) == 2 and max(sides.values()) > 2 and alone else culprits
    if len(odd) > 1 and len(early := [a for a in culprits if _is_early(a, [*culprits, *beside])]) == 1:
        odd, call = early, early[0].activity
        why += f" Others call {call.op} of group {call.group} only after that; rank {odd[0].rank} calls it before."
    return sink.blame("crossed groups", odd, why, structural=True)


def _is_early(one: Actor, ranks: Sequence[Actor]) -> bool:
    """Return whether a rank calls a group at an earlier line than a second one, and a third waits between."""
    call = key_of(one.activity), one.activity.site
    same = [a for a in ranks if a is not one and (key_of(a.activity), a.activity.site) == call]
    others = [a for a in ranks if key_of(a.activity) != call[0]]
    lines = (_lines_apart(one, waits, later) for waits in others for later in same)
    return any(each == tuple(sorted(each)) for each in lines if each)


def _lines_apart(*ranks: Actor) -> tuple[int, ...]:
    """Return the lines of ranks in the outermost function in which all of them part; () if there is none."""
    for frames in zip(*(reversed(a.process.user_frames) for a in ranks), strict=False):
        lines = tuple(frame.line for frame in frames)
        if len({(frame.file, frame.function) for frame in frames}) > 1 or 1 < len({*lines}) < len(lines):
            return ()
        if len({*lines}) == len(lines):
            return lines
    return ()


def _different_collectives(sink: Sink) -> Verdict:
    """Judge ranks in different collectives: those that left a loop or the common path of calls are at fault."""
    culprits = sink.culprits
    why = f"The ranks are in different collectives, which can never meet. {sink.says}"
    odd = _deviating(culprits)
    parted = first_different_call(culprits) or different_counts(culprits)
    left = _left_a_loop(culprits, sink.sources)
    if found := left or (None if parted else _received_less(odd, sink)):
        odd, said = found
        why = f"{why} {said}"
    if parted:
        odd = parted[0] if len(parted[0]) < len(culprits) else odd
        why = f"{why} {parted[1]}"
    if len(odd) == len(culprits) and (skipped := _skipped_its_side(culprits, sink.sources)):
        odd, said, site = skipped
        return sink.blame("collective mismatch", odd, f"{why} {said}", structural=True, confidence="medium").at(site)
    # Of two ranks that part at a loop, the one that is still in it may have missed its end.
    unclear = 2 * len(odd) == len(culprits) if left else _is_root(odd)
    guessed = len(odd) == len(culprits) or (unclear and not parted)
    sure = "medium" if guessed else "high"
    return sink.blame("collective mismatch", odd, why, structural=True, confidence=sure)


def _skipped_its_side(ranks: Sequence[Actor], sources: Mapping[str, str]) -> tuple[list[Actor], str, str] | None:
    """Return the ranks that have come past a call that other ranks make in a branch of their own, and its place.

    One function has both branches, as in `main_process_first`: `if rank > 0: barrier()`, the work of rank 0, and
    `if rank == 0: barrier()`. An exception in the work skips the second call.
    """
    for still in ranks:
        text, one = sources.get(still.activity.file, ""), still.activity
        own = [node for node in source.enclosing(text, one.line) if isinstance(node, ast.If)]
        function = source.enclosing_function(text, one.line)
        if function is None or not any(source.tells_ranks(text, node.test) for node in own):
            continue
        others = [each for each in source.nodes_in(ast.If, function) if source.tells_ranks(text, each.test)]
        calls = source.calls_in(*(node for each in others if each not in own for node in each.body))
        gone = [a for a in ranks if a.activity.site != one.site]
        met = next((call for call in calls if source.last_name(call.func) == one.op), None)
        if met is not None and gone and all(is_past(a, still, sources, loops=False) for a in gone):
            site = f"{PurePath(one.file).name}:{met.lineno}"
            said = (
                f"{subject(gone, 'has', 'have')} come past {function.name} without the {one.op} at {site}, which rank "
                f"{still.rank} waits for: look for an exception that was caught."
            )
            return gone, said, site
    return None


def _is_root(odd: Sequence[Actor]) -> bool:
    """Return whether these are one rank that gives something to the others, or takes it, and waits for one of them.

    The others may have had their part and gone on, all but one, so they are no majority against this rank.
    """
    return len(odd) == 1 and odd[0].activity.root == str(odd[0].rank) and odd[0].activity.branch != "alone"


def _received_less(odd: Sequence[Actor], sink: Sink) -> tuple[list[Actor], str] | None:
    """Return the ranks that have received less than others from the one that still sends, and words about it.

    It is the sender itself if no number shows who has. None unless the only rank at fault is such a root.
    """
    if not _is_root(odd):
        return None
    op, rest = odd[0].activity.op, [a for a in sink.culprits if a not in odd]
    loops = source.nodes_in((ast.While, ast.For, ast.AsyncFor), *map(source.parse, sink.sources.values()))
    receiving = [loop for loop in loops if any(name.rpartition(".")[2] == op for name in source.calls_of(loop))]
    # What is kept only if it belongs to a rank differs between ranks that are in step.
    always = (node for loop in receiving for node in takewhile(_goes_on, loop.body) if not isinstance(node, ast.If))
    lists = {name for node in always for name in source.filled(node)}
    for counter, numbers in unequal_counters(rest, LENGTH):
        name = counter.partition(".")[2]
        if name[4:-1].rpartition(".")[2] in lists:
            late = [a for a in rest if numbers[a.pid] == min(numbers.values())]
            told = f"{name} is {deviating(rest, numbers)[1]}: {subject(late, 'has', 'have')} received less than others"
            return late, f"{told} in {op}."
    return list(odd), f"Or the others have received theirs in {op} and gone on, except one, which left it out."


def _goes_on(node: ast.AST) -> bool:
    """Return whether a statement contains no `continue`."""
    return not source.nodes_in(ast.Continue, node)


CYCLES: tuple[Callable[[Sink], Verdict | None], ...] = (
    _cleaning_up, _blocks_its_loop, _elsewhere, _skipped_a_round, _only_messages, _left_out, _gone_on, _roots_differ,
    _wrong_group, _gone_past, _crossed_groups, _different_collectives,
)  # fmt: skip
"""Rules in the order in which they are tried. Those after `_elsewhere` know that all ranks are in an operation."""


def with_callers(verdict: Verdict, actors: Sequence[Actor]) -> Verdict:
    """Return a verdict that also names the callers of the line that some processes share.

    They are the frames at the first level, going outwards, where the processes differ.
    """
    for depth, level in enumerate(zip(*(a.process.user_frames for a in actors), strict=False)):
        if not depth and any(a.activity.line != frame.line for a, frame in zip(actors, level, strict=True)):
            return verdict  # another thread than the main one decides what a process does
        if len({(frame.file, frame.line) for frame in level}) > 1:
            sites = [frame.site for frame in level] if depth else []
            said = (
                f" {a.process.label[:1].upper()}{a.process.label[1:]} was called there by {frame.function} at {site}."
                for a, frame, site in zip(actors, level, sites, strict=False)
            )
            return replace(verdict, explanation=verdict.explanation + "".join(said)).at(*sites)
    return verdict


def _left_a_loop(ranks: Sequence[Actor], sources: Mapping[str, str]) -> tuple[list[Actor], str] | None:
    """Return the smaller side if some ranks have left a loop that the rest are still in, and words about it.

    The loop is in the function in which the ranks part, or in one that this function calls at the earlier line.
    """
    stacks = [list(reversed(a.process.user_frames)) for a in ranks]
    levels = zip(*stacks, strict=False)
    depth = len(list(takewhile(lambda level: len({(f.file, f.function, f.line) for f in level}) == 1, levels)))
    if any(len(stack) <= depth for stack in stacks):
        return None
    level = [stack[depth] for stack in stacks]
    if len({(frame.file, frame.function) for frame in level}) > 1:
        return None
    text, first, file = sources.get(level[0].file, ""), min(frame.line for frame in level), level[0].file
    if source.branch_of_rank(text, first):
        return None  # the other ranks may not have been in the loop at all
    every = [source.loops_at(text, frame.line) for frame in level]
    common = [loop for loop in every[0] if all(loop in each for each in every)]
    if common and not _in_same_round(level, common):
        return None  # those at the earlier line may be a round ahead, and have left out what the others wait in
    own = [next((loop for loop in each if loop not in common), None) for each in every]
    if loops := [loop for loop in own if loop is not None]:
        around = min(loops, key=lambda loop: loop.lineno)
        end = around.end_lineno or around.lineno
        within = [a for a, loop in zip(ranks, own, strict=True) if loop is around]
    else:  # the loop may be in what is called at the earlier line
        called = [stack[depth + 1] for stack in stacks if stack[depth].line == first and stack[depth + 1 :]]
        inner = {(f.file, source.outermost_loop(sources.get(f.file, ""), f.line)) for f in called}
        file, around = inner.pop() if len(inner) == 1 else ("", None)
        end = first
        within = [a for a, frame in zip(ranks, level, strict=True) if frame.line == first]
    past = [a for a, f in zip(ranks, level, strict=True) if f.line > end and source.follows(text, end, f.line)]
    if around is None or not past or not within or len(past) + len(within) != len(ranks):
        return None
    left = f"{subject(past, 'has', 'have')} left the loop at {PurePath(file).name}:{around.lineno}."
    told = f"{left} {subject(within, 'is', 'are')} still in it."
    return (past if len(past) <= len(within) else within), told


def _in_same_round(level: Sequence[Frame], loops: Sequence[source.Loop]) -> bool:
    """Return whether frames of one function show that all ranks are in the same round of each of these loops."""
    for loop in loops:
        names = source.names_in(loop.test if isinstance(loop, ast.While) else loop.target)
        here = ({name: frame.locals.get(name, "<") for name in names} for frame in level)
        # The address of an object differs between ranks, and says nothing.
        rounds = [{name: value for name, value in each.items() if not value.startswith("<")} for each in here]
        if not rounds[0] or any(each != rounds[0] for each in rounds):
            return False
    return True


def _one_deviates(culprits: Sequence[Actor]) -> bool:
    """Return whether most ranks are in one collective, and only the others left the common path.

    One rank against three or more deviates in any case. Otherwise every rank must belong to both groups: only then
    could all of them have met.
    """
    counts = Counter((key_of(a.activity), a.activity.op) for a in culprits)
    if len(counts) != 2 or len(set(counts.values())) == 1:
        return False
    ranks = {a.rank for a in culprits}
    shared = all(a.activity.members is None or ranks <= set(a.activity.members) for a in culprits)
    return shared or (len(culprits) > 3 and min(counts.values()) == 1)


def _deviating(culprits: list[Actor]) -> list[Actor]:
    """Return the ranks that left the common path: those on a branch of their own, or those in a rarer operation."""
    alone = [a for a in culprits if a.activity.branch == "alone"]
    if alone and len(alone) <= len(culprits) / 2:
        return alone
    counts = Counter((a.activity.op, a.activity.group) for a in culprits).most_common()
    if counts[0][1] > (counts[1][1] if len(counts) > 1 else 0):
        return [a for a in culprits if (a.activity.op, a.activity.group) != counts[0][0]]
    side = [a for a in culprits if a.activity.branch == "side"]
    return side if len(side) == 1 and len(culprits) > 2 else culprits
