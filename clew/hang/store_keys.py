"""Judges waits for a key of torch's store, which no other rank sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from clew.hang import source
from clew.hang.equal_stacks import by_value
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
        asking = [a for a in sink.waiters if a.activity.kind == "http"]
        if asking:
            why += f" {sentences(asking)} Whoever has to join, too, must not first wait for that answer."
        return sink.blame("initialisation", [sink.one, *asking], why, cause="store", confidence="medium")
    others = [a for a in sink.job if a.rank is not None and a not in sink.culprits]
    alike = ("store", sink.act.site)  # ranks that wait for the same key
    others = [a for a in others if (a.activity.kind, a.activity.site) != alike]
    waiting = [a for a in others if a in sink.blocked_ranks and a.activity.kind != "store"]
    asking = [a for a in sink.job if a.rank is not None and a not in others]
    # If all other ranks wait for those that ask, nobody is left to set the key: they ask for one that does not exist.
    blamed = asking if len(waiting) == len(others) else others
    if found := _another_key(sink, asking) or _left_out(sink, asking):
        return found
    used = source.names_in(*source.calls_at(sink.sources.get(sink.act.file, ""), sink.act.line))
    here = {n: v for f in sink.one.process.user_frames[:1] for n, v in f.locals.items() if n in used and v.isdigit()}
    numbers = " and ".join(f"{name} is {value}" for name, value in sorted(here.items())[:2])
    why = f"{sink.one.says}{f' (here, {numbers})' if numbers else ''}: nobody has set this key."
    frames = ((a, f) for a in others for f in a.process.user_frames)
    differs = [(a, n, f.locals[n]) for a, f in frames for n in sorted(here) if f.locals.get(n, here[n]) != here[n]]
    why += "".join(f" On rank {a.rank}, {name} is {value}." for a, name, value in differs[:1])
    why += f" Ranks {names(asking)} all wait for it." if len(asking) > 1 else sink.who_waits
    why += f" {sentences(waiting[:1])}" if blamed is asking and waiting else ""
    return sink.blame("missing rank", blamed, why, confidence="medium" if blamed is asking and waiting else "low")


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


def _left_out(sink: Sink, asking: list[Actor]) -> Verdict | None:
    """Judge processes whose loop sets such keys, and that have come past the number in the key that is awaited."""
    frame = next((f for f in sink.one.process.user_frames if f.line == sink.act.line), None)
    if frame is None:
        return None
    text = sink.sources.get(sink.act.file, "")
    given = [each for call in source.calls_at(text, sink.act.line) for each in call.args]
    for pattern, holes in _keys(text, sink.act.line, *given):
        asked = [frame.locals.get(hole, "") for hole in holes]
        if not all(value.isdigit() for value in asked):
            continue
        others = [a for a in sink.job if a not in asking and not a.dead]
        past = {a.pid: found for a in others if (found := _came_past(a, pattern, asked, sink.sources))}
        if blamed := [a for a in others if a.pid in past]:
            place, now = past[blamed[0].pid]
            who = " and ".join(a.process.label for a in blamed)
            why = (
                f"{sink.one.says}. Such keys are set at {place}; {who} left this one out: the awaited key "
                f"has {', '.join(asked)}, and it is at {', '.join(now)}. {sentences(blamed[:1])}"
            )
            return sink.blame("missing rank", blamed, why, cause="store", confidence="medium").at(place)
    return None


def _came_past(
    one: Actor, pattern: tuple[str, ...], asked: list[str], sources: Mapping[str, str]
) -> tuple[str, list[str]] | None:
    """Return where a process's loop sets keys of a pattern, and its numbers there; None if it is not past `asked`.

    It is if one number is higher, which the loop counts, and all others are equal. The loop must also be able to leave
    the call out.
    """
    for frame in one.process.user_frames:
        loop = source.outermost_loop(text := sources.get(frame.file, ""), frame.line)
        for call in source.calls_in(loop):
            if loop is None or not _is_optional(call, loop):
                continue
            counted = source.loop_variables(text, frame.line) | source.counted(loop)
            for holes in [*_set_by(call, pattern, text), *_set_within(call, pattern, sources)]:
                now = [frame.locals.get(hole, "") for hole in holes]
                differ = [(hole, a, b) for hole, a, b in zip(holes, now, asked, strict=True) if a != b]
                ahead = [hole for hole, a, b in differ if a.isdigit() and int(a) > int(b)]
                if len(differ) == len(ahead) == 1 and ahead[0].rpartition(".")[2] in counted:
                    return f"{PurePath(frame.file).name}:{call.lineno}", now
    return None


def _is_optional(call: ast.Call, loop: source.Loop) -> bool:
    """Return whether a loop makes a call in some rounds only: in a branch, or after a `continue`; not in turns."""
    tests = [each for each in source.nodes_in(ast.If, loop) if each.lineno < call.lineno]
    skips = [each for each in tests if call in ast.walk(each) or source.nodes_in(ast.Continue, each)]
    return bool(skips) and not source.nodes_in(ast.Mod, *(each.test for each in skips))


def _set_by(call: ast.Call, pattern: tuple[str, ...], text: str) -> list[list[str]]:
    """Return the expressions in the key of a pattern that a call of `set` or `add` sets; empty if it sets none."""
    sets = source.last_name(call.func) in ("set", "add") and bool(call.args)
    return [holes for found, holes in _keys(text, call.lineno, call.args[0]) if found == pattern] if sets else []


def _set_within(call: ast.Call, pattern: tuple[str, ...], sources: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the expressions, as the caller writes them, in each key of a pattern that the called function sets."""
    receiver = source.dotted(call.func).rpartition(".")[0]
    for text in sources.values():
        for function in source.nodes_in((ast.FunctionDef, ast.AsyncFunctionDef), source.parse(text)):
            if function.name != source.last_name(call.func):
                continue
            parameters = [each.arg for each in function.args.args][1 if receiver else 0 :]
            passed = dict(zip(parameters, map(ast.unparse, call.args), strict=False))
            passed |= {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg}
            for inner in source.calls_in(function):
                for holes in _set_by(inner, pattern, text):
                    yield [passed.get(hole, re.sub(r"^self\.", f"{receiver}.", hole)) for hole in holes]


def _keys(text: str, line: int, *given: ast.expr) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return the constant parts and the expressions of each f-string that is given as a key.

    A key may also be a variable, to which the function has assigned an f-string.
    """
    names = source.names_in(*given)
    assigned = source.nodes_in(ast.Assign, source.enclosing_function(text, line))
    values = [each.value for each in assigned if names & source.names_in(*each.targets)]
    found = list[tuple[tuple[str, ...], list[str]]]()
    for string in source.nodes_in(ast.JoinedStr, *given, *values):
        constant = tuple(str(each.value) for each in string.values if isinstance(each, ast.Constant))
        holes = [ast.unparse(each.value) for each in string.values if isinstance(each, ast.FormattedValue)]
        if constant and holes:
            found.append((constant, holes))
    return found
