"""Finds waits that never end, because a loop rejects everything, or does not make what is waited for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePath

from clew.hang.activity import DISTRIBUTED, Activity, activity_of
from clew.hang.counters import CounterName, accepts, counters_in, moved_counters
from clew.hang.looks import STEADY_LOOKS, mains_of, never_woken
from clew.hang.observed import Frame, Process, Snapshot, Thread
from clew.hang.progress import seen, woken_in_vain
from clew.hang.roles import MAIN_TASK
from clew.hang.source import (
    Loop,
    calls_at,
    calls_in,
    calls_of,
    clocks,
    counted,
    dotted,
    enclosing,
    filled,
    loop_at,
    loops_at,
    missed,
    names_in,
    nodes_in,
    outermost_loop,
    parse,
    same_name,
)
from clew.hang.verdict import Actor, Sink, Verdict, sentences, words_of
from clew.hang.waits_for import TO_OTHERS

REJECTED = re.compile(r"reject|drop|skip|filter|discard|stale|refus|invalid|bad", re.I)
KEPT = re.compile(r"(^|[_\W])(accept(ed)?|kept|emitted|passed)([_\W]|$)")
"""Names of counters that stand still if everything is rejected."""
MANY = 10
"""A filter that has kept nothing in this number of rounds is taken to reject everything."""
BARREN = 100
"""A loop that has kept nothing, or put nothing into a queue, in this number of rounds is taken for endless."""
FRUITLESS = 20
"""A filter that has put nothing into a queue in this number of rounds is taken to reject everything."""
FEEDER = "QueueFeederThread"
"""Beginning of the name of the thread that `multiprocessing.Queue` has once something was put into it."""
UNFORWARDED = 50
"""A filter that was woken up this often by items of a queue, and passed none on, is taken to reject everything."""
NO_FILTER = re.compile(
    r"^(not )?\w+$|\blen\(|size|shape|numel|count|empty|full|\bstart|resume|offset|\bseen|consumed|already|processed"
)
"""Matches a test for whether there is enough of something, or one that skips what an earlier run has done."""
OF_ONE_ITEM = re.compile(r"tok|char|byte|step|position|frame|tick|move|turn|transition|interact|(^|\.)t$", re.I)
"""Matches counters that grow while a single item, such as an answer or an episode, is still being made."""
SENDS = re.compile(r"(^|\.)(send|put|write|post|request|generate)\w*$")
"""Matches the names of calls with which a loop writes to another process in each round."""
GIVES_UP = re.compile(r"bad|err|fail|nan|skip|drop|reject|miss|spike", re.I)
"""Names of what a loop counts to give up, and does not collect."""


def refuses(job: list[Actor], snapshot: Snapshot) -> tuple[Actor, str] | None:
    """Return the process that rejects everything, and its counter; None if nobody waits, or a process accepts work."""
    for a in job:
        if name := _keeps_nothing(a.process, snapshot.sources) or _adds_nothing(a.process, snapshot.sources):
            return a, name
    if any(accepts(a.process, snapshot.sources) for a in job):
        return None
    # Rejecting everything is a fault only if somebody waits for what is accepted, or has collected nothing of it.
    waiting = [a for a in job if not a.moving and not a.activity.heartbeat]
    asks = len(job) == 1 or any(a.activity.kind in (*TO_OTHERS, "sleep", *DISTRIBUTED) for a in waiting)
    found = ((a, name) for a in job if (name := _rejecting(a.process, snapshot.sources)))
    return next(((a, name) for a, name in found if asks or _stays_empty(a.process, name, snapshot.sources)), None)


def rejecting(sink: Sink) -> Verdict | None:
    """Find a filter that rejects everything, so that a batch never fills."""
    found = refuses(sink.job, sink.snapshot)
    if found is None:
        return None
    by, name = found
    files = {frame.file for thread in by.process.threads for frame in thread.user_frames}
    trees = (tree for file in files if (tree := parse(sink.sources.get(file, ""))) is not None)
    if any(name.rpartition(".")[2] in missed(tree) for tree in trees):
        return _times_out(sink, by, name)
    why = f"{by.process.label} rejects everything: {name} grows and nothing is accepted, so no wait can end."
    verdict = sink.blame("rollout blocked", [by], why, cause="refusing", confidence="medium")
    if by.activity.function == (function := name.partition(".")[0]):
        return verdict
    # It is in what the filter judges, such as a generation.
    frames = (f for t in by.process.threads for f in t.user_frames if f.name == function)
    loops = (frame.site for frame in frames)
    test = _line_of_filter(by.process, name, sink.sources) or next(loops, "")
    return replace(verdict, sites=(test,)) if test else verdict


def _times_out(sink: Sink, by: Actor, name: str) -> Verdict:
    """Judge a process whose attempts all reach their time limit, as `name` counts: the main thread may keep them up."""
    why = f"In {by.process.label}, attempts reach their time limit again and again ({name} grows), and none succeeds."
    mains = [each for each in by.threads if each.thread in ("MainThread", MAIN_TASK) and not each.idle_loop]
    why += "".join(f" Meanwhile {each.thread} {words_of(each)} at {each.place}." for each in mains[-1:])
    verdict = sink.blame("rollout blocked", [by], why, cause="refusing", confidence="medium")
    return verdict.at(*(each.site for each in mains[-1:]))


def starved(sink: Sink) -> Verdict | None:
    """Find a thread that loops without putting anything into the queue that the main thread of its process reads."""
    for by in (a for a in [*sink.culprits, *sink.waiters] if not a.moving and not a.dead):
        if barren := _puts_nothing(by.process, sink.sources):
            get, frame, counter = barren
            why = (
                f"{by.process.label} {words_of(get)} at {get.place}. The thread that should fill this queue loops "
                f"at {frame.site} and puts nothing: {frame.name}.{counter} grows, and nothing that it collects does."
            )
            sites = tuple(sorted({get.site, frame.site}))
            return sink.blame("rollout blocked", [by], why, cause="queue", confidence="medium", sites=sites)
    return None


def never_filled(sink: Sink) -> Verdict | None:
    """Find a process that goes round without ever having put anything into the queue that another one reads."""
    readers = [a for a in sink.waiters if a.activity.kind == "queue" and not a.moving]
    for by in (a for a in sink.culprits if readers):
        queue, site, rounds = rounds_without_put(by.process, sink.sources)
        if rounds >= FRUITLESS:
            why = (
                f"{by.process.label} rejects everything so far: its loop at {site} went round at least {rounds} times "
                f"meanwhile, and has put nothing into {queue} since its start. {sentences(readers[:1])}"
            )
            return sink.blame("rollout blocked", [by], why, cause="refusing", confidence="medium", sites=(site,))
    return None


def takes_in_vain(sink: Sink) -> Verdict | None:
    """Find a main thread that takes item after item from a queue, and whose loop keeps none of them."""
    for by in (a for a in sink.job if not a.dead and a.threads):
        get, result = by.threads[0], ""
        if not by.moving and _keeps_no_item(by.process, sink.sources):
            result = "its loop kept nothing, so its batch never fills"
        elif test := _forwards_no_item(by.process, sink.sources):
            result = f"it wrote nothing: {test} decides whether the rest of the loop puts an item into the next queue"
        if result:
            why = (
                f"{by.process.label} rejects everything: it took item after item from a queue at {get.place} and was "
                f"woken up {by.process.wakeups:,} times meanwhile, and {result}."
            )
            return sink.blame("rollout blocked", [by], why, cause="refusing", confidence="medium", sites=(get.site,))
    return None


def never_holds(sink: Sink) -> Verdict | None:
    """Find a main thread that is woken up again and again for a condition that never holds."""
    for one in (a for a in [*sink.culprits, *sink.waiters] if a.threads and not a.moving):
        if woken_in_vain(one.process, seen(one.process, sink.sources), sink.sources):
            wait = one.threads[0]
            why = (
                f"{one.process.label} waits for a condition at {wait.place}. It was woken up "
                f"{one.process.wakeups:,} times meanwhile, and the condition did not hold once. The number in "
                f"it stands still."
            )
            return sink.blame("rollout blocked", [one], why, cause="condition", confidence="medium", sites=(wait.site,))
    return None


def _keeps_no_item(process: Process, sources: Mapping[str, str]) -> bool:
    """Return whether the main thread's loop takes items from a queue, and the list that it fills does not grow.

    A `get` with a limit computes its deadline anew. A later deadline, before the last one has passed, means that the
    `get` before it returned an item.
    """
    main = process.user_frames[:1]
    loop = loop_at(sources.get(main[0].file, ""), main[0].line) if main else None
    if not isinstance(loop, ast.While) or process.wakeups < BARREN:
        return False
    if {each.kind for each in seen(process, sources)} != {"queue"}:
        return False
    lists = [f"len({name})" for name in filled(loop) if f"len({name})" in ast.unparse(loop.test)]
    every = [frame.locals for thread in mains_of(process) for frame in thread.user_frames[:1]]
    if not lists or any(len({each.get(name, look) for look, each in enumerate(every)}) > 1 for name in lists):
        return False  # it grows, or it was not read
    limits = [
        (_number(frame.locals.get("deadline", frame.locals.get("endtime"))), _number(frame.locals.get("timeout")))
        for thread in mains_of(process)
        for frame in [each for each in thread.frames if {"deadline", "endtime"} & {*each.locals}][:1]
    ]
    taken = (0 < after - before < limit for (before, limit), (after, _) in pairwise(limits) if before and after)
    return sum(taken) >= STEADY_LOOKS


def _forwards_no_item(process: Process, sources: Mapping[str, str]) -> str:
    """Return the test that keeps a main thread from passing on what it takes from another process; "" without one.

    It reads between all looks, and writes nothing in the whole watch: neither an item nor a line of its log.
    """
    main, looks = process.user_frames[:1], process.looks
    others = [thread for thread in process.threads if thread.os_id != process.pid]
    if any(thread.name.startswith(FEEDER) or thread.user_frames for thread in others):
        return ""  # it has put something, or may put it into a queue of its own threads
    loop = loop_at(sources.get(main[0].file, ""), main[0].line) if main else None
    if not isinstance(loop, ast.While) or process.wakeups < UNFORWARDED or looks[0].written != looks[-1].written:
        return ""
    if not all(one.read < other.read for one, other in pairwise(looks)) or moved_counters(process, sources):
        return ""  # what grows may be a batch that is passed on as a whole
    if any(each.kind not in ("queue", "compute") for each in seen(process, sources)):
        return ""
    return next((f"{PurePath(main[0].file).name}:{test.lineno}" for test, _, _ in _guarded_puts(loop)), "")


def _number(text: str | None) -> float:
    """Return the number in a text; 0 if there is none."""
    with suppress(ValueError):
        return float(text or "")
    return 0.0


def _rejecting(process: Process, sources: Mapping[str, str]) -> str:
    """Return the counter of what a process rejects, if it grows and no counter of what it keeps does; else ""."""
    moved = moved_counters(process, sources)
    every = [counters_in(look, process, sources) for look in process.looks]
    grown = [name for name in moved if REJECTED.search(name.variable.rpartition(".")[2])]
    grown = [name.short for name in grown if not _keeps_others(process, sources, name, every)]
    return grown[0] if grown else _keeps_none(process, sources, moved)


def _line_of_filter(process: Process, refused: str, sources: Mapping[str, str]) -> str:
    """Return the place of the one test in a loop whose branch raises the counter `refused`; "" if there are several."""
    function, _, name = refused.partition(".")
    places = set[str]()
    for frame in (f for t in process.threads for f in t.user_frames if f.name == function):
        loop = outermost_loop(sources.get(frame.file, ""), frame.line)
        for node in nodes_in(ast.If, loop):
            raised = [each for each in (*node.body, *node.orelse) if isinstance(each, ast.AugAssign)]
            if any(name.rpartition(".")[2] in counted(each) for each in raised):
                places.add(f"{PurePath(frame.file).name}:{node.lineno}")
    return places.pop() if len(places) == 1 else ""


def _keeps_others(
    process: Process, sources: Mapping[str, str], refused: CounterName, every: Sequence[Mapping[CounterName, int]]
) -> bool:
    """Return whether a counter of rounds that keep something grew, or some rounds did not raise `refused`.

    Args:
        every: The counters of each look; see `counters_in`.
    """
    changed = {n for each in every for n in each if len({one[n] for one in every if n in one}) > 1}
    for frame in (f for t in process.threads for f in t.user_frames if f.name == refused.function):
        if (loop := outermost_loop(sources.get(frame.file, ""), frame.line)) is None:
            continue
        kept = _counted_otherwise(loop, refused.variable.rpartition(".")[2])
        if any(each.variable.removeprefix("self.") in kept for each in changed):
            return True
        for rounds in (refused._replace(variable=each, list_at=0) for each in _once_a_round(loop)):
            both = [(one[rounds], one[refused]) for one in every if rounds in one and refused in one]
            if both and both[-1][0] - both[0][0] > both[-1][1] - both[0][1] + 1:
                return True
    return False


def _keeps_none(process: Process, sources: Mapping[str, str], moved: Mapping[CounterName, tuple[int, int]]) -> str:
    """Return a counter that grew by at least `MANY` while one of kept items in the same frame stood still; else ""."""
    every = [counters_in(look, process, sources) for look in process.looks if look.threads]
    for name in dict.fromkeys(name for each in every for name in each):
        if KEPT.search(name.variable) and len({each[name] for each in every if name in each}) == 1:
            for other in (each for each in moved if each.frame == name.frame):
                values = [each[other] for each in every if other in each]
                if values[-1] - values[0] >= MANY:
                    return f"{other.short} (beside {name.variable})"
    return ""


def _keeps_nothing(process: Process, sources: Mapping[str, str]) -> str:
    """Return the counter of rounds of a loop that ends only when it has kept enough, and has kept nothing; else ""."""
    for thread, frame in ((t, f) for t in process.threads for f in t.user_frames):
        alike = [t for t in process.threads if frame.function in {f.function for f in t.user_frames}]
        if not (thread.os_id == process.pid or thread.task) or thread.ended or len(alike) > 1:
            continue  # of several that collect, one has no luck
        text = sources.get(frame.file, "")
        loops = loops_at(text, frame.line)
        stacks = [t.frames for t in _in_each_look(process, thread) if t.frames]
        every = [f.locals for frames in stacks for f in frames if f.function == frame.function]
        for loop in reversed(loops):
            tested = ast.unparse(loop.test) if isinstance(loop, ast.While) else ""
            goals = _collected(loop)  # if one of them grows, the loop may end
            still = sorted(name for name in {*goals, *frame.locals} if {each.get(name) for each in every} == {"0"})
            kept = next((name for name in still if KEPT.search(name) and name in tested), "")
            kept = kept or (min(goals) if goals and goals <= {*still} else "")
            name = _many_rounds(_rounds(loop, loops[0]), every) if kept else ""
            if kept and not name:
                name = _many_tries(process, frame.function, stacks, loop, sources)
            if name:
                return f"{frame.name}.{name} (beside {kept})"
    return ""


def _adds_nothing(process: Process, sources: Mapping[str, str]) -> str:
    """Return the counter of a loop whose filter adds nothing to a collection that another thread finds too short.

    That thread, or task, waits for a condition, and was never notified. Else "".
    """
    for wait, length, has in _too_short(process, sources):
        collection = length[4:-1].rpartition(".")[2]
        for thread, frame in ((t, f) for t in process.threads if t is not wait for f in t.user_frames):
            own = next((n for n in frame.locals if re.fullmatch(rf"len\((.*\.)?{collection}\)", n)), "")
            loop = outermost_loop(sources.get(frame.file, ""), frame.line)
            if not own or not isinstance(loop, ast.While) or not _filters(loop, own[4:-1]):
                continue
            every = [f.locals for t in _in_each_look(process, thread) for f in t.user_frames if f.name == frame.name]
            if {each[own] for each in every if own in each} != {has}:
                continue  # it grows, or is another collection
            for name in sorted(names_in(loop)):
                numbers = [int(each[name]) for each in every if each.get(name, "").isdigit()]
                if numbers and numbers[-1] - numbers[0] >= BARREN:
                    return f"{frame.name}.{name} (beside {length})"
    return ""


def _filters(loop: ast.While, collection: str) -> bool:
    """Return whether a test of something made in each round decides if a loop gives it to a collection or its owner."""
    assigned = (target for node in nodes_in(ast.Assign, loop) for target in node.targets)
    made, receivers = names_in(*assigned), {collection, collection.rpartition(".")[0]}
    return any(
        names_in(test) & made - built
        for test, call, built in _guarded_calls(loop)
        if dotted(call.func).rpartition(".")[0] in receivers
    )


def _too_short(process: Process, sources: Mapping[str, str]) -> Iterator[tuple[Thread, str, str]]:
    """Yield each thread or task that waits until a collection has enough items, the name of its length, and the length.

    It has been in the same wait in nearly all looks.
    """
    for thread in (each for each in process.threads if each.user_frames):
        wait = activity_of(process, thread, sources)
        if wait.kind != "condition" or not _never_notified(process, thread):
            continue
        text = sources.get(wait.file, "")
        loop, here = loop_at(text, wait.line), thread.user_frames[0].locals
        tests = [*calls_at(text, wait.line), *([loop.test] if isinstance(loop, ast.While) else [])]
        for compared in nodes_in(ast.Compare, *tests):
            sides = [ast.unparse(each) for each in (compared.left, *compared.comparators)]
            length = next((side for side in sides if side.startswith("len(")), "")
            shown = [here.get(side, side) for side in sides]
            if length in here and len(sides) == 2 and all(map(str.isdigit, shown)):
                has, wanted = shown if sides[0] == length else reversed(shown)
                if int(has) < int(wanted):
                    yield thread, length, has


def _never_notified(process: Process, thread: Thread) -> bool:
    """Return whether a thread or task that waits for a condition has been in the same wait in nearly all looks."""
    same = _in_each_look(process, thread)
    if len(same) < max(STEADY_LOOKS, 0.8 * len(process.looks)):
        return False
    # A condition makes a new lock, or future, for each wait. But the next one may lie where the last one was: then the
    # thread has been woken up, or has counted something.
    made = {f.addresses[name] for t in same for f in t.frames for name in ("waiter", "fut") if name in f.addresses}
    values = {(f.name, name, value) for t in same for f in t.user_frames[1:] for name, value in f.locals.items()}
    counted_something = len(values) > len({each[:2] for each in values})
    woken = thread.os_id == process.pid and not never_woken(process)
    return len(made) == 1 and not counted_something and not woken


def _in_each_look(process: Process, thread: Thread) -> list[Thread]:
    """Return a thread or task as it was in each look that has it."""
    return [t for look in process.looks for t in look.threads if (t.at, t.os_id) == (thread.at, thread.os_id)]


def _many_rounds(rounds: set[str], every: Sequence[Mapping[str, str]]) -> str:
    """Return what counts the rounds of a loop, if it went round `BARREN` times since it was entered; else "".

    Args:
        rounds: Names that start again when the loop is entered.
        every: Local variables of the loop's function in each look.
    """
    for name in (each for each in rounds if not OF_ONE_ITEM.search(each)):
        values = [int(each[name]) for each in every if each.get(name, "").isdigit()]
        if values and values[0] < values[-1] >= BARREN:
            return name
    return ""


def _many_tries(
    process: Process, function: str, stacks: Sequence[Sequence[Frame]], loop: Loop, sources: Mapping[str, str]
) -> str:
    """Return the attribute that counts tries, if it grew by `BARREN` and nothing else shows progress; else "".

    It goes on where the last call of the function ended. So the function must not have returned meanwhile.

    Args:
        function: Name of the function with the loop.
        stacks: Frames of its thread in each look.
    """
    silent = process.first.written == process.last.written or any(map(SENDS.search, calls_of(loop)))
    whole = [each for each in stacks if each[-1].function == stacks[0][-1].function]  # others were torn while read
    inside = [(each[n], each[n + 1 :]) for each in whole for n, f in enumerate(each) if f.function == function]
    keeps_one = isinstance(loop, ast.While) and re.search(r"\b1\b|^not ", ast.unparse(loop.test))
    if keeps_one or not silent or len(inside) != len(whole) or 2 * len(whole) < len(process.looks):
        return ""
    if not all(outer and _assigns(sources.get(outer[0].file, ""), outer[0].line) for _, outer in inside):
        return ""  # nothing would show that it has returned
    # A list that is no longer than before may be what it takes its items from.
    grown = [
        name
        for name, (one, other) in moved_counters(process, sources).items()
        if other > one or not name.variable.startswith("len(")
    ]
    moved = {name.variable.rpartition(".")[2] for name in grown}
    every = [frame.locals for frame, _ in inside]
    for name in (each for each in every[-1] if each.startswith("self.") and not OF_ONE_ITEM.search(each)):
        tries, values = name[5:], [int(each[name]) for each in every if each.get(name, "").isdigit()]
        if not values or values[-1] - values[0] < BARREN or not moved <= {tries}:
            continue
        callers = [
            [(_without(f.locals, tries), f.addresses, f.line) for f in outer if f.of_user] for _, outer in inside
        ]
        counts = any(tries in counted(tree) for text in sources.values() if (tree := parse(text)))
        never_returned = all(each == callers[0] for each in callers)
        if counts and never_returned:
            return name
    return ""


def _assigns(text: str, line: int) -> bool:
    """Return whether the statement at a line assigns something."""
    kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
    return any(isinstance(node, kinds) for node in enclosing(text, line))


def _without(values: Mapping[str, str], attribute: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if name.rpartition(".")[2] != attribute}


def _stays_empty(process: Process, refused: str, sources: Mapping[str, str]) -> bool:
    """Return whether a loop has collected nothing while the counter `refused` grew by at least `MANY`."""
    moved = moved_counters(process, sources).items()
    if not any(name.short == refused and last - first >= MANY for name, (first, last) in moved):
        return False
    for frame in process.main_frames:
        loop = loop_at(sources.get(frame.file, ""), frame.line)
        goals = _collected(loop) if loop is not None else set[str]()
        every = [f.locals for t in mains_of(process) for f in t.frames if f.function == frame.function]
        if goals and {each.get(goal) for each in every for goal in goals} == {"0"}:
            return True
    return False


def _puts_nothing(process: Process, sources: Mapping[str, str]) -> tuple[Activity, Frame, str] | None:
    """Return evidence that a thread loops without putting anything into the queue that the main thread reads.

    Returns:
        The wait of the main thread; the frame of the other thread, at the line of its loop; and the counter of the
        loop's rounds, which alone has changed. None if there is no such thread.
    """
    every = seen(process, sources) if never_woken(process) else []
    if {each.kind for each in every} != {"queue"}:
        return None
    others = (t for t in process.threads if t.os_id != process.pid)
    for thread, frame in ((t, f) for t in others for f in t.user_frames):
        loop = outermost_loop(sources.get(frame.file, ""), frame.line)
        puts = [name[:-4] for name in calls_of(loop) if name.endswith(".put")] if loop is not None else []
        if loop is not None and any(same_name(name, every[-1].target) for name in puts):
            same = [t for look in process.looks for t in look.threads if t.os_id == thread.os_id]
            values = [f.locals for t in same for f in t.frames if f.function == frame.function]
            if counter := _only_rounds(loop, values):
                return every[-1], replace(frame, line=loop.lineno), counter
    return None


def _only_rounds(loop: Loop, values: Sequence[Mapping[str, str]]) -> str:
    """Return the counter of a loop's rounds if it grew by at least `BARREN`, and nothing else did; else ""."""
    rounds = _rounds(loop, loop)
    counts = {*counted(loop), *rounds, "unfinished_tasks"}
    moved = {n for each in values for n in each if n in values[0] and each[n] != values[0][n]}
    moved = {n for n in moved if "len(" in n or n.rpartition(".")[2] in counts}
    name = moved.pop() if len(moved) == 1 else ""
    numbers = [int(each[name]) for each in values if each.get(name, "").isdigit()]
    counts_rounds = name.rpartition(".")[2] in rounds
    return name if counts_rounds and numbers and numbers[-1] - numbers[0] >= BARREN else ""


def rounds_without_put(process: Process, sources: Mapping[str, str]) -> tuple[str, str, int]:
    """Return a queue to other processes, the line that decides what is put there, and how many rounds were seen.

    The rounds are counted by the addresses of what the line tests and the loop puts: a new object is a new round. None
    are counted once anything was put, since `multiprocessing.Queue` has its feeder thread from then on.
    """
    if any(t.name.startswith(FEEDER) for t in process.threads):
        return "", "", 0
    for frame in (f for t in process.threads for f in t.user_frames):
        loop = loop_at(sources.get(frame.file, ""), frame.line)
        for test, put, built in _guarded_puts(loop) if isinstance(loop, ast.While) else ():
            queue = dotted(put.func).removesuffix(".put")
            items = names_in(test).intersection(*map(names_in, put.args)) - built
            items -= clocks(sources[frame.file], frame.line)
            if f"{queue}._opid" not in frame.locals or not items:  # an attribute that only these queues have
                continue
            met: dict[tuple[int, str], list[int]] = {}
            for thread in (t for look in process.looks for t in look.threads):
                for each in (f for f in thread.user_frames if (f.file, f.function) == (frame.file, frame.function)):
                    for name in items & each.addresses.keys():
                        met.setdefault((thread.at or thread.os_id, name), []).append(each.addresses[name])
            rounds = sum(one != other for addresses in met.values() for one, other in pairwise(addresses))
            return queue, f"{PurePath(frame.file).name}:{test.lineno}", rounds
    return "", "", 0


def _guarded_puts(loop: ast.While) -> Iterator[tuple[ast.expr, ast.Call, set[str]]]:
    """Yield what `_guarded_calls` yields for calls of `put`."""
    return (each for each in _guarded_calls(loop) if dotted(each[1].func).endswith(".put"))


def _guarded_calls(loop: ast.While) -> Iterator[tuple[ast.expr, ast.Call, set[str]]]:
    """Yield each test of a loop that can skip a call, that call, and the names without a new item in each round.

    These are counters, collections that the loop fills, and names that are computed from their own last value.
    """
    assigned = [(each, node.value) for node in nodes_in(ast.Assign, loop) for each in node.targets]
    built = {n for each, value in assigned for n in names_in(each) & names_in(value)} | counted(loop) | filled(loop)
    for place, node in ((n, each) for n, each in enumerate(loop.body) if isinstance(each, ast.If)):
        # A test of a size, or one whose branch pauses, waits for a full batch or for new input.
        if NO_FILTER.search(ast.unparse(node.test)) or "sleep" in " ".join(calls_of(node)):
            continue
        if isinstance(node.body[-1], (ast.Break, ast.Return)):
            continue  # what it puts on its way out marks the end
        skips = isinstance(node.body[-1], ast.Continue)
        for call in calls_in(*(loop.body[place + 1 :] if skips else node.body)):
            yield node.test, call, built


def _counted_otherwise(loop: Loop, name: str) -> set[str]:
    """Return the numbers, such as written or len(rows), that a loop raises only in rounds that do not count `name`."""
    blocks = [getattr(node, part, []) for node in ast.walk(loop) for part in ("body", "orelse")]
    for body in (each for each in blocks if isinstance(each, list)):  # a lambda's body is one expression
        for place, node in enumerate(body):
            if isinstance(node, ast.If) and any(name in counted(each) for each in node.body):
                goes_on = isinstance(node.body[-1], ast.Continue)
                others = [*node.orelse, *(body[place + 1 :] if goes_on else [])]
                return {n for each in others for n in (*counted(each), *(f"len({c})" for c in filled(each)))} - {name}
    return set()


def _collected(loop: Loop) -> set[str]:
    """Return the numbers that a loop makes grow until it has enough, such as len(batch) or accepted.

    The set is empty for a loop that sleeps or swallows an exception: its rounds may be failed attempts.
    """
    if isinstance(loop, ast.While):
        tests = [] if isinstance(loop.test, ast.Constant) else [loop.test]
    elif isinstance(loop.iter, ast.Call) and dotted(loop.iter.func).endswith("count"):
        tests = list[ast.expr]()
    else:  # it ends by itself
        return set()
    grown = counted(loop) | filled(loop)
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and isinstance(node.body[-1], (ast.Break, ast.Return)):
            tests.append(node.test)
        elif isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            return set()
    if any(name.endswith("sleep") for name in calls_of(loop)):
        return set()
    grown = {name for name in grown if not GIVES_UP.search(name)}
    goals = list[set[str]]()
    for test in tests:
        sides = (s for c in nodes_in(ast.Compare, test) for s in (c.left, *c.comparators))
        texts = map(ast.unparse, sides)
        goals.append({t for t in texts if t.removeprefix("len(").rstrip(")").rpartition(".")[2] in grown})
    return set[str]().union(*goals) if all(goals) else set()  # otherwise something else can end it


def _once_a_round(loop: Loop) -> set[str]:
    """Return the names that grow by one in each round of a loop."""
    if isinstance(loop, ast.While):
        raised = (node for node in loop.body if isinstance(node, ast.AugAssign) and ast.unparse(node.value) == "1")
        return set().union(*map(counted, raised))
    steps = isinstance(loop.iter, ast.Call) and len(loop.iter.args) > 2  # of range
    return set() if steps else _rounds(loop, loop)


def _rounds(loop: Loop, outer: Loop) -> set[str]:
    """Return the names that count the rounds of a loop, and start again each time that `outer` enters the loop."""
    if isinstance(loop, ast.While):
        names = counted(loop)
        before = [node for node in outer.body if isinstance(node, ast.Assign) and node.lineno < loop.lineno]
        stored = {name.id for name in nodes_in(ast.Name, *before) if isinstance(name.ctx, ast.Store)}
        return names if loop is outer else names & stored
    counts = isinstance(loop.iter, ast.Call) and re.search(r"(range|enumerate|count)$", dotted(loop.iter.func))
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    return {target.id} if counts and isinstance(target, ast.Name) else set()
