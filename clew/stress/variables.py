"""Shared variables in the user's code: the lines that change them, and which episodes read what others wrote.

Episodes may share an attribute and still not see one another's values, because they take turns: each holds a lock while
it sets and uses the attribute. The changes cannot show this, but the reads do.
"""

from __future__ import annotations

import ast
import dis
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from clew.stress.agent_steps import Episode, current_episode
from clew.stress.frames import Code, line_in_words, shown_path

READS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"))
WRITES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"))

CHANGES = frozenset(
    (
        *("append", "appendleft", "extend", "insert", "update", "add", "setdefault", "put", "put_nowait", "set"),
        *("pop", "popleft", "popitem", "clear", "remove", "discard", "move_to_end", "sort", "reverse"),
    )
)
"""Names of methods that change the object they are called on."""


class Uses:
    """Traces, while entered, where episodes read and write attributes and globals of some names.

    Only functions of the user's code that mention such a name are traced. Names are not objects: another object's
    attribute of the same name counts, too. Threads that exist already are not traced. Under a debugger, nothing is
    traced.
    """

    def __init__(self, names: Collection[str], code: Code) -> None:
        self._names = frozenset(names)
        self._code = code
        self._last: dict[str, Episode] = {}
        """Episode that wrote each name last."""
        self._writers: dict[str, set[Episode]] = defaultdict(set)
        self._read: set[str] = set()
        self.crossed: dict[str, str] = {}
        """Evidence that an episode read another's value after it had written its own, by name."""
        self._operations = cache(self._find_operations)

    def __enter__(self) -> Uses:
        self._traces = sys.gettrace() is None
        if self._traces:
            threading.settrace(self._called)
            sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        if self._traces:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]  # it takes None, whatever its stub says

    def wrote(self, name: str, episode: Episode) -> None:
        """Note that an episode wrote a variable, or changed the object that it holds."""
        self._last[name] = episode
        self._writers[name].add(episode)

    def take_turns(self, name: str, *, matters: bool) -> bool:
        """Return whether episodes were seen to write this variable, and none to read another's value after its own.

        With `matters` (episodes were seen to depend on one another), a variable that no episode was seen to read is not
        excused: it may have been read in a way that is not traced.
        """
        return name in self._writers and name not in self.crossed and (name in self._read or not matters)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._operations(frame.f_code):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._traced
        return None

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        operation = self._operations(frame.f_code).get(frame.f_lasti) if event == "opcode" else None
        episode = current_episode.get()
        if operation is None or episode is None:
            return self._traced
        name, writes = operation
        if writes:
            self.wrote(name, episode)
            return self._traced
        self._read.add(name)
        last = self._last.get(name)
        if last is not episode and last is not None and episode in self._writers[name]:
            line = line_in_words((frame.f_code, frame.f_lineno))
            self.crossed.setdefault(name, f"{episode.id} read at {line} what {last.id} had left there")
        return self._traced

    def _find_operations(self, code: CodeType) -> dict[int, tuple[str, bool]]:
        """Return the name, and whether it is written, by the offset of each instruction that uses one of the names."""
        if self._names.isdisjoint(code.co_names) or not self._code.is_user(code.co_filename):
            return {}
        return {
            each.offset: (each.argval, each.opname in WRITES)
            for each in dis.get_instructions(code)
            if each.opname in READS | WRITES and each.argval in self._names
        }


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Source code that an agent is made of."""

    files: Sequence[str] = ()
    classes: Collection[str] = ()
    """Names of the agent's class and its bases; their lines are listed first."""

    def lines_that_change(self, name: str) -> list[str]:
        """Return the lines within functions that change an object of this name, as `file:line function`.

        They assign to an attribute, a global or an entry of this name, or call a method that changes it. Lines of
        `__init__` are left out if there are others. The search is by name, so another object of this name may be meant.
        """
        lines = [(file, *each) for file in self.files for each in _changes(name, file)]
        return self._shown([line for line in lines if not line[2].endswith("__init__")] or lines)

    def lines_with_sets(self) -> list[str]:
        """Return the lines that make a set, use a set defined in their module, or call `hash`.

        Only the agent's classes are searched, and the functions that these classes call by name.
        """
        expressions = [(file, *each) for file in self.files for each in _expressions(file)]
        called = {
            node.func.id
            for _, function, node in expressions
            if self._is_own(function) and isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        lines = [
            (file, node.lineno, function)
            for file, function, node in expressions
            if (self._is_own(function) or function in called) and _is_unordered(node, file)
        ]
        return self._shown(lines)

    def _shown(self, lines: Iterable[tuple[str, int, str]]) -> list[str]:
        ordered = sorted(dict.fromkeys(lines), key=lambda line: not self._is_own(line[2]))
        return [f"{shown_path(file)}:{number} {function}" for file, number, function in ordered]

    def _is_own(self, function: str) -> bool:
        return function.rpartition(".")[0] in self.classes


def _changes(name: str, file: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the function of each expression that changes an object of this name."""
    for function, node in _expressions(file):
        if isinstance(node, ast.Call):
            method = node.func
            changed = isinstance(method, ast.Attribute) and method.attr in CHANGES and _names(method.value, name)
        elif isinstance(node, ast.Name):  # local, unless declared global
            changed = _is_target(node) and node.id == name and name in _global_names(file)
        else:
            changed = isinstance(node, (ast.Attribute, ast.Subscript)) and _is_target(node) and _names(node, name)
        if changed:
            yield node.lineno, function


def _is_target(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    """Return whether this expression is assigned to or deleted."""
    return not isinstance(node.ctx, ast.Load)


def _is_unordered(node: ast.expr, file: str) -> bool:
    """Return whether this expression may depend on the order of a set, or on a hash."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset", "hash")
    return isinstance(node, (ast.Set, ast.SetComp)) or (isinstance(node, ast.Name) and node.id in _sets_of(file))


@cache
def _sets_of(file: str) -> frozenset[str]:
    """Return the names of the sets that a module defines."""
    return frozenset(
        target.id
        for node in _tree(file).body
        if isinstance(node, ast.Assign) and _is_unordered(node.value, "")  # no file: a name would lead back here
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def _names(tree: ast.AST, name: str) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
        for node in ast.walk(tree)
    )


@cache
def _global_names(file: str) -> frozenset[str]:
    """Return the names that any function of a file declares global or nonlocal."""
    return frozenset(
        name for node in ast.walk(_tree(file)) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    )


@cache
def _expressions(file: str) -> list[tuple[str, ast.expr]]:
    """Return the expressions within functions, with the function's name, in order of their lines."""
    found = []

    def walk(node: ast.AST, path: tuple[str, ...], inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                walk(child, (*path, child.name), inside=True)
            elif isinstance(child, ast.ClassDef):
                walk(child, (*path, child.name), inside=False)
            else:
                if inside and isinstance(child, ast.expr):
                    found.append((".".join(path), child))
                walk(child, path, inside)

    walk(_tree(file), (), inside=False)
    return sorted(found, key=lambda each: each[1].lineno)


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # no source code
        return ast.Module(body=[], type_ignores=[])
