"""Judges waits for a key of torch's store, which no other rank sets."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import PurePath

from clew.hang import source
from clew.hang.equal_stacks import by_value
from clew.hang.observed import Frame
from clew.hang.verdict import Actor, Sink, Verdict, names, sentences


def missing_key(sink: Sink) -> Verdict | None:
    """Judge a wait for a key of torch's store that no other rank sets, or for the members of a store."""
    if sink.act.kind != "store":
        return None
    if sink.act.op == "TCPStore":
        frames = sink.one.process.main_frames
        wanted = next((f.locals["world_size"] for f in frames if f.locals.get("world_size", "").isdigit()), "")
        members = f"until its {wanted} members have come" if wanted else "until all of its members have come"
        why = f"{sink.one.says}. It waits for the server of this store, and {members}: fewer have.{sink.who_waits}"
        return sink.blame("initialisation", [sink.one], why, cause="store", confidence="medium")
    others = [a for a in sink.job if a.rank is not None and a not in sink.culprits]
    alike = ("store", sink.act.site)  # ranks that wait for the same key
    others = [a for a in others if (a.activity.kind, a.activity.site) != alike]
    waiting = [a for a in others if a in sink.blocked_ranks and a.activity.kind != "store"]
    asking = [a for a in sink.job if a.rank is not None and a not in others]
    # If all other ranks wait for those that ask, nobody is left to set the key: they ask for one that does not exist.
    blamed = asking if len(waiting) == len(others) else others
    if found := _another_key(sink, asking) or _left_out(sink, waiting):
        return found
    why = f"{sink.one.says}: no other rank sets this key."
    why += f" Ranks {names(asking)} all wait for it." if len(asking) > 1 else sink.who_waits
    why += f" {sentences(waiting[:1])}" if blamed is asking and waiting else ""
    return sink.blame("missing rank", blamed, why, confidence="low")


def _another_key(sink: Sink, asking: list[Actor]) -> Verdict | None:
    """Judge ranks that wait at one line, where the key that one of them waits for has another number in it."""
    calls = source.calls_at(sink.sources.get(sink.act.file, ""), sink.act.line)
    used = sorted(source.names_in(*(each for call in calls for each in call.args)))
    frames = [next((f for f in a.process.user_frames if f.line == sink.act.line), None) for a in asking]
    values = [tuple(f"{n} is {f.locals[n]}" for n in used if f and f.locals.get(n, "").isdigit()) for f in frames]
    alone = [a for a, value in zip(asking, values, strict=True) if values.count(value) == 1]
    if len(asking) < 3 or len(alone) != 1 or len(set(values)) != 2:
        return None
    told = by_value((a.rank or 0, " and ".join(value)) for a, value in zip(asking, values, strict=True))
    why = f"Ranks {names(asking)} wait for a key of the store at {sink.act.place}, but not for the same one: {told}."
    return sink.blame("missing rank", alone, why, cause="store", confidence="medium")


def _left_out(sink: Sink, waiting: list[Actor]) -> Verdict | None:
    """Judge ranks whose loop sets such keys, and that have come past the number in the key that is awaited."""
    frame = next((f for f in sink.one.process.user_frames if f.line == sink.act.line), None)
    text = sink.sources.get(sink.act.file, "")
    calls = source.calls_at(text, sink.act.line)
    for pattern, used in _keys(text, sink.act.line, *(each for call in calls for each in call.args)):
        numbers = {frame.locals[name] for name in used if frame and frame.locals.get(name, "").isdigit()}
        past = [
            (a, call)
            for a in waiting
            if len(numbers) == 1 and (call := _came_past(a, pattern, int(*numbers), sink.sources))
        ]
        if past:
            blamed, (place, said) = [a for a, _ in past], past[0][1]
            why = (
                f"{sink.one.says}. Rank {names(blamed)} sets such keys at {place}, and has left this one out: the "
                f"number in its key is {min(numbers)}, and {said} there. {sentences(blamed[:1])}"
            )
            return sink.blame("missing rank", blamed, why, cause="store", confidence="medium").at(place)
    return None


def _came_past(one: Actor, pattern: tuple[str, ...], number: int, sources: Mapping[str, str]) -> tuple[str, str] | None:
    """Return where a rank's loop sets keys of this pattern, and what shows a later round than `number`; or None."""
    setters = {name for text in sources.values() for name in _setters(text, pattern)}
    for frame in one.process.user_frames:
        loop = source.outermost_loop(text := sources.get(frame.file, ""), frame.line)
        for call in source.calls_in(loop):
            given = (
                {each.id for each in call.args if isinstance(each, ast.Name)}
                if source.last_name(call.func) in setters
                else set()
            )
            given |= _set_by(call, pattern, text)
            if later := next((each for each in sorted(given) if _number(frame, each) > number), ""):
                return f"{PurePath(frame.file).name}:{call.lineno}", f"{later} is {frame.locals[later]}"
    return None


def _setters(text: str, pattern: tuple[str, ...]) -> set[str]:
    """Return the names of the functions of a source that set keys of a pattern."""
    functions = source.nodes_in((ast.FunctionDef, ast.AsyncFunctionDef), source.parse(text))
    return {each.name for each in functions if any(_set_by(call, pattern, text) for call in source.calls_in(each))}


def _set_by(call: ast.Call, pattern: tuple[str, ...], text: str) -> set[str]:
    """Return the variables in the key that a call sets, if it sets one of this pattern; else an empty set."""
    sets = source.last_name(call.func) in ("set", "add") and bool(call.args)
    found = _keys(text, call.lineno, call.args[0]) if sets else []
    return set[str]().union(*(used for each, used in found if each == pattern))


def _keys(text: str, line: int, *given: ast.expr) -> list[tuple[tuple[str, ...], set[str]]]:
    """Return the constant parts of the f-strings that are given as keys, and the variables in each.

    A key may also be a variable, to which the function has assigned an f-string.
    """
    names = source.names_in(*given)
    assigned = source.nodes_in(ast.Assign, source.enclosing_function(text, line))
    values = [each.value for each in assigned if names & source.names_in(*each.targets)]
    strings = source.nodes_in(ast.JoinedStr, *given, *values)
    return [
        (tuple(str(each.value) for each in source.nodes_in(ast.Constant, string)), source.names_in(string))
        for string in strings
    ]


def _number(frame: Frame, name: str) -> int:
    return int(value) if (value := frame.locals.get(name, "")).isdigit() else -1
