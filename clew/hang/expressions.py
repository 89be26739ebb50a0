"""Evaluates expressions of integers, lists and ranges in users' source, such as the ranks of a group. Runs no code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from clew.hang.source import dotted, parse

MOST_MEMBERS = 100_000
"""Largest integer that is evaluated: a larger range would only cost memory."""
ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
ORDERS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def constants(text: str) -> dict[str, int]:
    """Return the integers that a module assigns at its top level, such as WORLD = 4."""
    tree, found = parse(text), dict[str, int]()
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return found


class Unknown(Exception):
    """Raised when the evaluator does not support an expression."""


def evaluate(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of integers, lists and ranges.

    Raises:
        Unknown: It is anything else, or uses a name that is not in `names`.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node) in names:
        return names[dotted(node)]
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [evaluate(each, names) for each in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(evaluate(node.operand, names))
    if isinstance(node, ast.BinOp):
        return _arithmetic(node.op, evaluate(node.left, names), evaluate(node.right, names))
    if isinstance(node, ast.IfExp):
        return evaluate(node.body if evaluate(node.test, names) else node.orelse, names)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node.ops[0], evaluate(node.left, names), evaluate(node.comparators[0], names))
    if isinstance(node, ast.Call):
        return names[ast.unparse(node)] if ast.unparse(node) in names else _call(node, names)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)) and len(node.generators) == 1:
        loop = node.generators[0]
        if isinstance(loop.target, ast.Name):
            rows = ({**names, loop.target.id: value} for value in evaluate(loop.iter, names))
            return [evaluate(node.elt, row) for row in rows if all(evaluate(test, row) for test in loop.ifs)]
    raise Unknown(ast.dump(node)[:80])


def _integer(value: Any) -> int:
    if not isinstance(value, int) or abs(value) > MOST_MEMBERS:
        raise Unknown("no small integer")
    return value


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    one, other = _integer(left), _integer(right)
    if type(op) not in ARITHMETIC or (other == 0 and isinstance(op, (ast.FloorDiv, ast.Mod))):
        raise Unknown("operator")
    return ARITHMETIC[type(op)](one, other)


def _compare(op: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(op, (ast.Eq, ast.NotEq)):
        return (left == right) == isinstance(op, ast.Eq)
    if type(op) not in ORDERS:
        raise Unknown("comparison")
    return ORDERS[type(op)](_integer(left), _integer(right))


def _call(node: ast.Call, names: Mapping[str, Any]) -> Any:
    called = dotted(node.func).rpartition(".")[2]
    if called in ("get_rank", "get_world_size"):
        name = "rank" if called == "get_rank" else "world_size"
        if name in names and not node.args:
            return names[name]
    if called == "range":
        bounds = [_integer(evaluate(each, names)) for each in node.args]
        return list(range(*bounds))
    if called in ("list", "sorted", "tuple", "set") and len(node.args) == 1:
        return sorted(evaluate(node.args[0], names)) if called == "sorted" else list(evaluate(node.args[0], names))
    raise Unknown(called)
