"""Finds out which of two ranks is further on in the same round of a program, from their stacks and its source.

A rank that is past a collective in which another still waits has left it out. It is only blamed if every round comes to
that collective, and if the two are surely in the same round: in the same turn of each loop, within one call.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile

from clew.hang.observed import Frame
from clew.hang.source import (
    Function,
    Loop,
    calls_at,
    dotted,
    enclosing,
    guards_before,
    last_name,
    loops_at,
    names_in,
    nodes_in,
    parse,
    tells_ranks,
)
from clew.hang.verdict import Actor

CALLS_ONCE = re.compile(
    r"/(nn/modules/module|nn/parallel/\w+|_?contextlib|functools|autograd/function|autograd/grad_mode)\.py$|"
    r"/(elastic|hydra|click|typer|fire|absl|multiprocessing)/"
)
"""Files of libraries that call a user's function once for each call of theirs."""

NUMBERS = re.compile(r"(?<![\w.])(range|enumerate|count)\(|\bitertools\.count\(")
"""Matches the source of what a `for` goes over, if its values number the turns."""


def is_past(ahead: Actor, still: Actor, sources: Mapping[str, str], *, loops: bool, job: Sequence[Actor] = ()) -> bool:
    """Return whether a rank has come past the line at which another is, in the same round of every loop around it.

    Args:
        ahead: The rank that may have come past.
        still: The other one.
        sources: Texts of the files.
        loops: Count a rank as past, too, if it has left a loop in which the other still is.
        job: Ranks that show how many turns such a loop should take.
    """
    for depth, (a, b) in enumerate(_common_calls(ahead, still)):
        text = sources.get(a.file, "")
        for loop in _loops_around(text, a.line, b.line):
            variables, numbers = _rounds(loop, b.line, a.line)
            known = variables & a.locals.keys() & b.locals.keys()
            known = {name for name in known if numbers or a.locals[name].startswith(("'", '"'))}
            if not known or any(a.locals[name] != b.locals[name] for name in known):
                return False
        if a.line != b.line:
            inner = still.process.user_frames[::-1][depth + 1 :]
            optional = loops and any(_is_on_branch(sources.get(each.file, ""), each.line) for each in inner)
            extra_turn = loops and any(_takes_more(name, a, b, job) for name in _turns_before(text, b.line, a.line))
            return not optional and not extra_turn and _has_passed(text, b.line, a.line, loops=loops)
        if not _calls_once(text, a.line) or _called_by_library(b, still):
            return False
    return False


def is_rounds_ahead(ahead: Actor, still: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether a rank is in a later round than another of the outermost loop in which their rounds differ."""
    for a, b in _common_calls(ahead, still):
        text = sources.get(a.file, "")
        for loop in _loops_around(text, a.line, b.line):
            # Other counters need not count rounds: of tokens, for example, or of rows from the rank's own first one on.
            if not isinstance(loop, ast.For) or tells_ranks(text, loop.iter):
                continue
            variables, numbers = _rounds(loop, a.line, b.line)
            values = [(a.locals.get(name, ""), b.locals.get(name, "")) for name in variables if numbers]
            known = [(int(here), int(there)) for here, there in values if here.isdigit() and there.isdigit()]
            if any(here != there for here, there in known):
                return all(here > there for here, there in known)
        if a.line != b.line:
            return False
    return False


def may_skip(ahead: Actor, still: Actor, sources: Mapping[str, str]) -> bool:
    """Return whether a `continue` in a loop around both ranks skips the call of the one that is behind.

    That call must not be on a branch: then it might be one too many.
    """
    for a, b in _common_calls(ahead, still):
        text = sources.get(a.file, "")
        for loop in _loops_around(text, a.line, b.line):
            path = enclosing(text, b.line)
            within = path[path.index(loop) + 1 :]
            skips = any(node.lineno < b.line for node in nodes_in(ast.Continue, loop))
            if skips and not any(isinstance(node, (ast.If, ast.ExceptHandler)) for node in within):
                return True
    return False


def _common_calls(ahead: Actor, still: Actor) -> Iterator[tuple[Frame, Frame]]:
    """Yield the frames of two ranks in pairs, the outermost first, as long as both are in the same function."""
    pairs = zip(ahead.process.user_frames[::-1], still.process.user_frames[::-1], strict=False)
    return takewhile(lambda pair: (pair[0].file, pair[0].function) == (pair[1].file, pair[1].function), pairs)


def _takes_more(name: str, ended: Frame, still: Frame, job: Sequence[Actor]) -> bool:
    """Return whether a rank is in a turn of a loop that no other has taken; `ended` is a frame that has left it."""
    turn = still.locals.get(name, "")
    frames = [f for a in job for f in a.process.user_frames if (f.file, f.function) == (ended.file, ended.function)]
    turns = [f.locals[name] for f in frames if f is not still and f.locals.get(name, "").isdigit()]
    fewer = turn.isdigit() and ended.locals.get(name, turn) != turn
    return fewer and all(int(each) < int(turn) for each in turns)


def _called_by_library(frame: Frame, actor: Actor) -> bool:
    """Return whether a library calls the next frame of the user, and may do so several times."""
    frames = actor.process.main_frames
    place = next((n for n, each in enumerate(frames) if each is frame), 0)
    between = takewhile(lambda each: not each.of_user, reversed(frames[:place]))
    return any(not CALLS_ONCE.search(each.file) for each in between)


def _has_passed(text: str, line: int, later: int, *, loops: bool) -> bool:
    """Return whether line `later` comes after the statement at `line`, which every round has to run first.

    Args:
        loops: True also if `line` is in a loop that has ended there, maybe after fewer turns.
    """
    here, there = enclosing(text, line), enclosing(text, later)
    depth = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a is not b), len(here))
    around = here[depth - 1] if depth else parse(text)
    if depth in (len(here), len(there)) or around is None:
        return False
    blocks = [block for _, block in ast.iter_fields(around) if isinstance(block, list)]
    in_order = any(there[depth] in block and here[depth] in block[: block.index(there[depth])] for block in blocks)
    return in_order and not _branches_off(text, [around, *here[depth:]], loops=loops)


def _is_on_branch(text: str, line: int) -> bool:
    """Return whether some calls of the function around a line may rightly leave the line out: it is on a branch."""
    module = parse(text)
    path = [*([module] if module else ()), *enclosing(text, line)]
    first = max((n for n, node in enumerate(path) if isinstance(node, Function)), default=0)
    return _branches_off(text, path[first:], loops=True)


def _branches_off(text: str, path: Sequence[ast.AST], *, loops: bool) -> bool:
    """Return whether the last of these nodes is on a branch within the first, or after an exit for most ranks."""
    branches = (ast.If, ast.Match, ast.While, ast.ExceptHandler, *(() if loops else (ast.For, ast.AsyncFor)))
    left = any(guards_before(text, outer, inner) for outer, inner in pairwise(path))
    return left or any(isinstance(node, branches) for node in path[1:])


def _calls_once(text: str, line: int) -> bool:
    """Return whether a line calls each function once, as far as it shows: it has no comprehension, for example."""
    calls = calls_at(text, line)
    if any(last_name(call.func) in ("map", "filter", "reduce", "starmap") for call in calls):
        return False
    called = [name for call in calls if (name := dotted(call.func)) not in vars(builtins)]
    simple = [node for node in enclosing(text, line)[-1:] if not hasattr(node, "body")]
    several = nodes_in((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), *calls, *simple)
    return len(called) == len(set(called)) and not several


def _loops_around(text: str, line: int, later: int) -> list[Loop]:
    """Return the loops around both of two lines, outermost first."""
    return [loop for loop in loops_at(text, line) if loop in loops_at(text, later)]


def _turns_before(text: str, line: int, later: int) -> set[str]:
    """Return the variables that number the turns of the `for` loops that are around a line, but not around another."""
    left = [loop for loop in loops_at(text, line) if loop not in loops_at(text, later) and isinstance(loop, ast.For)]
    return {name for loop in left for names, numbers in [_rounds(loop, line, later)] if numbers for name in names}


def _rounds(loop: Loop, line: int, later: int) -> tuple[set[str], bool]:
    """Return the variables that tell one round of a loop around two lines from another.

    The second value is False if they do so only as texts: numbers of other sources than `range` may repeat.
    """
    if isinstance(loop, ast.While):  # a counter that each round counts, but not between the lines
        steps = [node for node in loop.body if isinstance(node, ast.AugAssign)]
        steps = [node for node in steps if isinstance(node.value, (ast.Constant, ast.Name))]
        between = {dotted(node.target) for node in steps if line <= node.lineno <= later}
        return {dotted(node.target) for node in steps} - between, True
    source = ast.unparse(loop.iter)
    target = loop.target
    if "enumerate(" in source and isinstance(target, ast.Tuple):
        target = target.elts[0]
    return names_in(target), NUMBERS.search(source) is not None
