"""Judges processes that ask again and again: for a file, for a flag, or for what another one should bring."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import PurePath

from clew.hang import source
from clew.hang.activity import Activity, line_of
from clew.hang.looks import mains_of
from clew.hang.progress import fails_in_loop
from clew.hang.verdict import Actor, Sink, Verdict, sentences

FILE_CALLS = re.compile(
    r"(^|\.)(exists|lexists|is_file|isfile|is_dir|isdir|i?r?glob|l?stat|listdir|scandir|iterdir|getmtime|getsize)$"
)
WRITES = re.compile(r"(^|\.)(write_text|write_bytes|touch|rename|save\w*)$|^os\.replace$")
"""Names of calls that make a file, besides open() with a mode that writes."""


def asks_again(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether a thread sleeps in a loop."""
    return one.kind == "sleep" and one.loop_in(sources) is not None


def retrying(sink: Sink) -> Verdict | None:
    """Judge a client that asks an idle server again and again and sleeps where it handles the failure."""
    still = [a for a in [*sink.culprits, *sink.waiters] if not a.moving]
    pausing = [a for a in still if a.activity.kind in ("sleep", "http", "network")]
    unwell = sink.one.process.answers.get("health", "").startswith("5") and sink.act.kind == "select"

    def has_failed(actor: Actor) -> bool:
        failing = any(fails_in_loop(thread, sink.sources) for thread in mains_of(actor.process))
        return failing or (unwell and asks_again(actor.activity, sink.sources))

    clients = list(filter(has_failed, pausing))
    if not clients or (clients[0] is not sink.one and not sink.one.process.listens):
        return None
    asked = [a.process for a in sink.job if "health" in a.process.answers]
    said = {f"{process.label} answers {process.answers['health']}." for process in asked}
    label, site = clients[0].process.label, clients[0].activity.site
    why = f"{label} asks again and again, and each attempt fails: it is at {site}."
    if clients[0].activity.kind == "sleep" and not clients[0].process.wakeups:
        why = f"{label} had an attempt fail, and sleeps at {site} before the next one; it has not woken up meanwhile."
    one = clients[0].activity
    path = source.enclosing(sink.sources.get(one.file, ""), one.line)
    handled = [each.type for each in path if isinstance(each, ast.ExceptHandler) and each.type is not None]
    if any("FileExistsError" in ast.unparse(each) for each in handled[-1:]):
        why += " The file that it wants to make exists: somebody has this lock, or has ended without removing the file."
        return sink.blame("lock or I/O", clients, why, cause="lock", confidence="medium")
    why = " ".join([why, *sorted(said)])
    return sink.blame("external wait", clients, why, cause="http", confidence="medium")


def threads_poll(sink: Sink) -> Verdict | None:
    """Judge threads of one process that ask again and again, at several places: each waits for another one."""
    polling = [each for each in sink.one.threads if asks_again(each, sink.sources)]
    polling = [each for each in polling if each is sink.act or not each.heartbeat or _fills(each, sink)]
    if sink.act not in polling or len({each.site for each in polling}) < 2 or sink.one.rank is not None:
        return None
    told = ", ".join(f"{each.thread} at {each.site}" for each in polling[:4])
    why = f"Threads of {sink.one.process.label} sleep in loops, and one should bring what another waits for: {told}."
    sites = tuple(sorted({each.site for each in polling}))
    return sink.blame("rollout blocked", [sink.one], why, cause="sleep", confidence="medium", sites=sites)


def _fills(one: Activity, sink: Sink) -> bool:
    """Return whether a thread's loop fills what the culprit's loop asks about, and so does more than report."""
    fills, asks = one.loop_in(sink.sources), sink.act.loop_in(sink.sources)
    if fills is None or not isinstance(asks, ast.While):
        return False
    asked = set(map(source.last_name, source.nodes_in((ast.Attribute, ast.Name), asks.test)))
    return not asked.isdisjoint(source.filled(fills))


def both_poll(sink: Sink) -> Verdict | None:
    """Judge a program that asks again and again for its children's work, while they ask for work or for one another."""
    by = next((a for a in sink.waiters if a.pid == sink.one.process.parent), None)
    if by is None or sink.one.rank is not None:
        return None
    if not all(asks_again(each, sink.sources) for each in (sink.act, by.activity)):
        return None
    children = [a for a in sink.job if a.process.parent == by.pid and not (a.moving or a.dead)]
    if circle := [a for a in children if any(_wait_for_each_other(a, b, sink.sources) for b in children if b is not a)]:
        why = f"{by.says}. Its children wait for one another: each asks again and again for what another one sets."
        why = " ".join([why, sentences(circle)])
        return sink.blame("rollout blocked", circle, why, cause="sleep", confidence="medium")
    why = (
        f"{by.says}. Its worker {sink.one.process.label} waits for work at {sink.act.place}. So what "
        f"is awaited was never given to a worker, or was lost; or each of the two waits for the other."
    )
    return sink.blame("rollout blocked", [by], why, cause="sleep", confidence="medium").at(sink.act.site)


def _wait_for_each_other(one: Actor, other: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether each of two processes sleeps until a condition holds that the function of the other one sets."""
    both = ((one, other), (other, one))
    return all(
        _with_indices(_asked_at(asks.activity, sources), asks)
        & _with_indices(_set_around(sets.activity, sources), sets)
        for asks, sets in both
    )


def _with_indices(items: set[str], one: Actor) -> set[str]:
    """Return items such as `flags[i]` with the number of the variable, so that the items of two processes differ."""
    values = {name: value for frame in one.process.user_frames[:1] for name, value in frame.locals.items()}
    return {re.sub(r"\[([\w.]+)\]", lambda index: f"[{values.get(index[1], index[1])}]", each) for each in items}


def _asked_at(one: Activity, sources: Mapping[str, str]) -> set[str]:
    """Return the strings, attributes and items in the condition of the loop in which a thread sleeps."""
    loop = one.loop_in(sources)
    if one.kind != "sleep" or not isinstance(loop, ast.While):
        return set()
    items = source.nodes_in((ast.Attribute, ast.Subscript), loop.test)
    return source.texts_in(loop.test) | set(map(ast.unparse, items))


def _set_around(one: Activity, sources: Mapping[str, str]) -> set[str]:
    """Return the attributes and items that the function around a line assigns, and the strings that it passes on."""
    around = source.enclosing_function(sources.get(one.file, ""), one.line)
    calls = [node for node in source.nodes_in(ast.Expr, around) if isinstance(node.value, ast.Call)]
    targets = [each for node in source.nodes_in(ast.Assign, around) for each in node.targets]
    targets += [node.target for node in source.nodes_in(ast.AugAssign, around)]
    return set().union(*map(source.texts_in, calls), map(ast.unparse, targets))


def asks_as_told(sink: Sink) -> Verdict | None:
    """Judge a helper that polls a condition which its caller has passed to it, such as `poll(lambda: exists(path))`.

    Processes that call it at different places may wait for one another: all of them are named, with their callers.
    """
    frames, loop = sink.one.process.user_frames, sink.act.loop_in(sink.sources)
    helper = source.enclosing_function(sink.sources.get(sink.act.file, ""), sink.act.line)
    if sink.act.kind != "sleep" or sink.act.task or helper is None or loop is None:
        return None
    given = {each.arg for each in helper.args.args}
    used = given & source.names_in(loop)
    if len(frames) < 2 or frames[0].line != sink.act.line or not used:
        return None
    there = [a for a in sink.job if a.activity.site == sink.act.site and len(a.process.user_frames) > 1]
    callers = {a.pid: (a.process.user_frames[1].file, a.process.user_frames[1].line) for a in there}
    others = [a for a in there if callers[a.pid] != callers[sink.one.pid] and not (a.moving or a.dead)]
    if not others and not given & {source.dotted(call.func) for call in source.calls_in(loop)}:
        return None
    asking = [*sink.culprits, *(a for a in others if a not in sink.culprits)]
    test = loop.test if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant) else None
    why = f"{sink.one.says} and asks again {f'while {ast.unparse(test)}' if test else 'and again'}."
    sites = list[str]()
    for one in (a for a in asking if a.pid in callers):
        file, line = callers[one.pid]
        sites.append(f"{PurePath(file).name}:{line}")
        place = f"{sites[-1]}: {line_of(sink.sources.get(file, ''), line)}"
        why += f" {one.process.label[:1].upper()}{one.process.label[1:]} asks at {place}."
    why += (" They may wait for one another." if others else "") + sink.who_waits
    confidence = "high" if sink.blocked_ranks else "medium"
    return sink.blame("external wait", asking, why, cause="sleep", confidence=confidence).at(*sites)


def polling(sink: Sink) -> Verdict | None:
    """Judge a loop that sleeps until a file appears."""
    if (loop := _loop_over_files(sink.act, sink.sources)) is None:
        return None
    said = "{} polls for a file that does not appear, at {}."
    if sink.blocked_ranks and _writes_itself(sink, loop):
        why = said.format(sink.one.process.label, sink.act.place)
        why += " The program writes such files itself: the ranks that should do it may be those that wait."
        return sink.blame("missing rank", sink.culprits, why + sink.who_waits, cause="file", structural=True)
    apart = [a for a in sink.job if a.activity.site not in {b.activity.site for b in sink.culprits}]
    others = [a for a in apart if not (a.moving or a.dead) and _loop_over_files(a.activity, sink.sources)]
    # One that looks for files forever, or until it is stopped, waits for more work.
    asking = [a for a in (*sink.culprits, *others) if not _serves(a.activity, sink.sources)] or sink.culprits
    one, more = asking[0], [a for a in asking[1:] if a in others]
    why = said.format(one.process.label, one.activity.place)
    if more:
        why += "".join(f" So does {a.process.label}, at {a.activity.site}." for a in more[:3])
        why += " They may wait for one another."
    confidence = "medium" if more else "high"
    return sink.blame("external wait", asking, why + sink.who_waits, cause="file", confidence=confidence)


def _serves(one: Activity, sources: Mapping[str, str]) -> bool:
    """Return whether the loop in which a thread sleeps never ends, or only once the program should end."""
    loop = one.loop_in(sources)
    until_end = isinstance(loop, ast.While) and source.SAYS_END.search(ast.unparse(loop.test)) is not None
    return until_end or source.goes_on_forever(loop)


def _loop_over_files(one: Activity, sources: Mapping[str, str]) -> source.Loop | None:
    """Return the loop in which a thread sleeps and looks for files; None without one."""
    loop = one.loop_in(sources) if one.kind == "sleep" else None
    return loop if loop is not None and any(map(FILE_CALLS.search, source.calls_of(loop))) else None


def _writes_itself(sink: Sink, loop: source.Loop) -> bool:
    """Return whether the sources write a file whose name has all parts of one that a loop asks for."""
    test = loop.test if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant) else loop
    asked = _names_of_files(test, sink.sources[sink.act.file])
    return bool(asked) and any(
        _writes(call) and asked <= _names_of_files(call, text)
        for text in sink.sources.values()
        for call in source.calls_in(source.parse(text))
    )


def _writes(call: ast.Call) -> bool:
    """Return whether a call makes a file."""
    if (name := source.dotted(call.func)).rpartition(".")[2] == "open":
        modes = (*call.args[:2], source.keyword(call, "mode"))
        return any(re.fullmatch("[wax][bt+]*", text) for mode in modes if mode for text in source.texts_in(mode))
    return WRITES.search(name) is not None


def _names_of_files(node: source.Loop | ast.expr, text: str) -> set[str]:
    """Return the strings of a loop or expression, and of what its names stand for, except file types and short ones."""
    around = source.enclosing_function(text, node.lineno)
    names, assigns = source.names_in(node), source.nodes_in(ast.Assign, around)
    assigned = [each.value for each in assigns if names & source.names_in(*each.targets)]
    return {part for each in (node, *assigned) for part in source.texts_in(each) if re.match(r"[^.\s].{2}", part)}
