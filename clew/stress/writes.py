"""Lines of source code that change an object with a given name."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clew.stress.frames import shown_path

CHANGES = frozenset(
    (
        *("append", "appendleft", "extend", "insert", "update", "add", "setdefault", "put", "put_nowait", "set"),
        *("pop", "popleft", "popitem", "clear", "remove", "discard", "move_to_end", "sort", "reverse"),
    )
)
"""Names of methods that change the object they are called on."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Source code that an agent is made of."""

    files: Sequence[str] = ()
    classes: Collection[str] = ()
    """Names of the agent's class and its bases; their lines are listed first."""

    def lines_that_change(self, name: str) -> list[str]:
        """Return the lines within functions that change an object of this name, as `file:line function`.

        They assign to an attribute, a global or an entry of this name, or call a method on it that changes it. They are
        found in the source code, so another object with the same name may be meant.
        """
        lines = [(file, *each) for file in self.files for each in _changes(name, file)]
        return self._shown([line for line in lines if not line[2].endswith("__init__")] or lines)

    def lines_with_sets(self) -> list[str]:
        """Return the lines that make a set, use a set of their module, or call `hash`.

        They stand within the agent's classes, or in functions that these call by their name.
        """
        statements = [(file, *each) for file in self.files for each in _statements(file)]
        called = {
            node.func.id
            for _, function, node in statements
            if self._is_own(function) and isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        lines = [
            (file, node.lineno, function)
            for file, function, node in statements
            if (self._is_own(function) or function in called)
            and isinstance(node, ast.expr)
            and _is_unordered(node, file)
        ]
        return self._shown(lines)

    def _shown(self, lines: Iterable[tuple[str, int, str]]) -> list[str]:
        ordered = sorted(dict.fromkeys(lines), key=lambda line: not self._is_own(line[2]))
        return [f"{shown_path(file)}:{number} {function}" for file, number, function in ordered]

    def _is_own(self, function: str) -> bool:
        return function.rpartition(".")[0] in self.classes


def _changes(name: str, file: str) -> Iterator[tuple[int, str]]:
    for function, node in _statements(file):
        if isinstance(node, ast.Call):
            method = node.func
            if isinstance(method, ast.Attribute) and method.attr in CHANGES and _names(method.value, name):
                yield node.lineno, function
            continue
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        if any(_names(target, name) for target in targets if not isinstance(target, ast.Name)) or (
            any(isinstance(target, ast.Name) and target.id == name for target in targets)
            and name in _global_names(file)
        ):
            yield node.lineno, function


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
        if isinstance(node, ast.Assign) and _is_unordered(node.value, "")
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
    """Return the names that a function declares global."""
    return frozenset(
        name for node in ast.walk(_tree(file)) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    )


@cache
def _statements(file: str) -> list[tuple[str, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete | ast.expr]]:
    """Return the statements and expressions within functions, with the function's name, in order of their lines."""
    found = []

    def walk(node: ast.AST, path: tuple[str, ...], inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                walk(child, (*path, child.name), inside=True)
            elif isinstance(child, ast.ClassDef):
                walk(child, (*path, child.name), inside=False)
            else:
                if inside and isinstance(child, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.expr)):
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
