"""Reads users' source: which call a line makes, whether only some ranks run it, and which ranks form a group.

Native calls have no Python frame. The line that makes the call is the innermost one a stack shows, so its source says
what the process waits in. Nothing here runs the user's code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

STDIN, STDOUT = re.compile(r"\.stdin\.write(lines)?$"), re.compile(r"(^|\.)stdout\.write(lines)?$|^print$")
"""Match calls that write to a child program, and calls by which a program writes its own output."""
UNBUFFERED = re.compile(r"bufsize=[01]\b|line_buffering|write_through|UNBUFFERED")
"""Matches source text by which a program writes each line at once, instead of keeping it in a buffer."""
FLUSHES = re.compile(r"(^|\.)(flush|close|communicate|drain|input)$")
"""Matches calls that empty the buffer of a pipe: input() does, too."""
RANK_WORDS = re.compile(
    r"^(?!lora_|low_|r_).*rank(?!ing|ed|er)|is_main|is_master|master_process|(global|process)_zero|is_chief|is_primary",
    re.I,
)
"""Names that tell the ranks apart in a condition."""
CLEANUP_NAMES = re.compile(
    r"clean|teardown|tear_down|shutdown|shut_down|finali[sz]e|close|__exit__|__del__|destroy|atexit", re.I
)
EVERYDAY_NAMES = re.compile(r"(?!.*(up|down|destroy|atexit|__)).*(clean|finali[sz]e|close)", re.I)
"""Cleanup names that functions of a training loop have, too, such as finalize_metrics or close_episode."""
HANDLER_CLEANUP = re.compile(rf"{CLEANUP_NAMES.pattern}|barrier|(^|_)save|abort", re.I)
"""Names of calls by which an `except` cleans up. Other calls there go on with the work, perhaps with half a batch."""
WITHOUT_RAISE = "an except without raise"
"""Kind of cleanup in an `except` that hides no exception, because it raises none."""
ENDS = ("sys.exit", "exit", "quit", "os._exit", "os.abort")
"""Calls that end the program, as an exception would."""
POLLS = re.compile(
    r"(^|\.)(sleep|time|monotonic|perf_counter|get|get_nowait|exists|is_file|isfile|isdir|is_dir|empty|qsize|is_set|"
    r"wait|print|info|warning|debug|error|urlopen|read|read_text|open|json|load|loads|poll|is_alive|len|acquire|glob|stat|"
    r"getsize|getmtime|listdir|scandir|iterdir|flush|check|test|join|int|str|float|max|min|any|all|list|sorted|append|"
    r"done|locked|strip|split|endswith|startswith|format|round|getpid)$"
)
"""Calls of a loop that only asks again and again."""
QUERIES = re.compile(r"\.(execute|fetchone|fetchall|now|strftime|ready|raise_for_status|refresh)$|stdout\.write$")
"""Calls of a loop that only asks again and again if it also waits; otherwise it may work through the rows."""
EVENT = re.compile(r"\.(wait|is_set)\(|running|alive|stop|clos|shut|exit|quit|cancel")
"""Calls and names in the condition of a loop that goes on until an event is set, or until the program ends."""
CLOCK = re.compile(r"(^|\.)(time|monotonic|perf_counter)(_ns)?$")
MEASURES = re.compile(
    r"\.(write|writelines|write_text|dump|dumps|send|sendto|log|set|touch|execute|inc|observe|add_scalars?)$|"
    r"^(os\.getloadavg|(psutil|pynvml|resource|torch\.cuda)\..*)$"
)
"""Calls by which a heartbeat tells others that its process is alive, and those by which it looks at the machine."""
GROWS = ("append", "extend", "add", "update", "appendleft")
"""Methods by which a collection grows."""
NUMBERS = {"int", "round", "float", "max", "min", "abs"}
"""Calls that only change the form of a number."""
COLLECTS = re.compile(r"(^|\.)Path$|^(range|enumerate|zip|set|tuple|map|filter)$")
"""Calls that only go through what the condition of a loop asks about."""
LIMIT = re.compile(r"Empty|Full|Time_?[Oo]ut")
"""Exceptions that say that a wait has reached its limit."""
PROGRAM_ENDS = re.compile("Cancelled|Interrupt")
"""Exceptions that are raised when the program or its task should end."""
SAYS_END = re.compile("stop|shut|exit|quit", re.I)
"""Matches the names of events and files that are set or made when the program should end."""
UNLIMITED = re.compile(r"\.(get|wait|acquire|read)$")
"""Calls that do not poll unless they have an argument, such as a timeout."""
ENDING = {
    "queue": r"(.*)\.(put\w*|send\w*|write|append\w*|extend)",
    "pipe": r"(.*)\.(put\w*|send\w*|write|append\w*|extend)",
    "queue_full": r"(.*)\.(get\w*|recv\w*|read\w*|task_done)",
    "barrier": r"(.*)\.wait",
    "": r"(.*)\.(set|notify\w*|release|set_result|set_exception)",
}
"""Calls that end each kind of wait, with the object in group 1; those at "" end any other kind."""
Wait = tuple[str, str]
"""Kind of a wait, and the object that is waited for ("" if it has no name)."""
Loop = ast.While | ast.For | ast.AsyncFor
Function = ast.FunctionDef | ast.AsyncFunctionDef
LEAVES = (ast.Break, ast.Return, ast.Raise)
"""Statements by which a program leaves a loop."""
Node = TypeVar("Node", bound=ast.AST)


@lru_cache(maxsize=256)
def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a source file; None if it is no Python."""
    with suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse(text)
    return None


def covers(node: ast.AST, line: int) -> bool:
    """Return whether a line is one of those of a node."""
    first = getattr(node, "lineno", None)
    return first is not None and first <= line <= (getattr(node, "end_lineno", None) or first)


@lru_cache(maxsize=4096)
def enclosing(text: str, line: int) -> tuple[ast.AST, ...]:
    """Return the nodes around a line, outermost first."""
    path: list[ast.AST] = []
    around: ast.AST | None = parse(text)
    while around and (around := next((n for n in ast.iter_child_nodes(around) if _spans(n, line)), None)):
        path.append(around)
    return tuple(path)


def enclosing_function(text: str, line: int) -> Function | None:
    """Return the innermost function around a line; None at the top of a module."""
    found = [node for node in enclosing(text, line) if isinstance(node, Function)]
    return found[-1] if found else None


def _spans(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return any(covers(each, line) for each in node.body)
    return isinstance(node, (ast.ExceptHandler, ast.stmt)) and covers(node, line)


def dotted(node: ast.AST) -> str:
    """Return an expression as a dotted name, such as dist.all_reduce; () stands for a call, [] for a subscript."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    return "?"


def same_name(one: str, other: str) -> bool:
    """Return whether two expressions may name one object: `self.lock` is what others call `self.buffer.lock`."""
    short, long = sorted((each.removeprefix("self.") for each in (one, other)), key=len)
    return bool(short) and (long == short or long.endswith(f".{short}"))


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, such as all_reduce in dist.all_reduce."""
    return dotted(node).rpartition(".")[2]


def nodes_in(kind: type[Node] | tuple[type[Node], ...], *roots: ast.AST | None) -> list[Node]:
    """Return the nodes of some classes that occur in syntax trees, also the roots; None counts as an empty tree."""
    return [node for root in roots if root is not None for node in ast.walk(root) if isinstance(node, kind)]


def names_in(*roots: ast.AST | None) -> set[str]:
    """Return the names of the variables that occur in syntax trees."""
    return {node.id for node in nodes_in(ast.Name, *roots)}


def calls_in(*roots: ast.AST | None) -> list[ast.Call]:
    """Return the calls that occur in syntax trees."""
    return nodes_in(ast.Call, *roots)


def calls_at(text: str, line: int) -> list[ast.Call]:
    """Return the calls that begin at or cover a line, those that begin there first, short before long."""
    path = enclosing(text, line)
    if not path:
        return []
    siblings = getattr(path[-2] if path[1:] else parse(text), "body", [])
    nodes = [node for node in siblings if covers(node, line)] if path[-1] in siblings else [path[-1]]
    calls: list[ast.Call] = []
    for node in nodes:
        # The body of a loop or function is not part of its first line.
        roots = [node]
        if hasattr(node, "body"):
            roots = [each for each in ast.iter_child_nodes(node) if not isinstance(each, (ast.stmt, ast.ExceptHandler))]
        calls += [each for each in calls_in(*roots) if covers(each, line)]
    return sorted(calls, key=lambda call: (call.lineno != line, (call.end_lineno or 0) - call.lineno))


@lru_cache(maxsize=256)
def rank_names(text: str) -> frozenset[str]:
    """Return the variables assigned from get_rank(), RANK of the environment, or a comparison with such a variable."""
    found = set[str]()
    for node in nodes_in(ast.Assign, parse(text)):
        value = ast.unparse(node.value)
        compares = isinstance(node.value, ast.Compare) and found & set(re.findall(r"\w+", value))
        if compares or re.search(r"get_rank\(|[\"']RANK[\"']", value):
            for target in node.targets:
                found |= {last_name(each) for each in getattr(target, "elts", [target])}
    return frozenset(found - {"world", "world_size"})


def holds_for_one(test: ast.expr) -> bool:
    """Return whether a condition on the rank, such as `rank == 0` or `is_main`, holds for one rank, not for the others.

    `rank != 0`, `rank > 0`, `0 < rank`, `rank` alone and `not is_main` hold for all ranks but one.
    """
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return not holds_for_one(test.operand)
        case ast.Compare(left=ast.Constant()):
            return not isinstance(test.ops[0], (ast.NotEq, ast.Lt, ast.LtE))
        case ast.Compare():
            return not isinstance(test.ops[0], (ast.NotEq, ast.Gt, ast.GtE))
        case ast.Name() | ast.Attribute():
            return not re.fullmatch(r"(\w+_)?rank", last_name(test).lower())
    return True


def tells_ranks(text: str, test: ast.expr) -> bool:
    """Return whether a condition tells the ranks apart."""
    words = set(re.findall(r"\w+", ast.unparse(test)))
    return bool(words & rank_names(text)) or any(RANK_WORDS.search(word) for word in words)


def _of_one(text: str, test: ast.expr) -> bool:
    """Return whether a condition is plainly on one rank: `rank != 0` or `not is_main`, but not `i % world != rank`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name() | ast.Attribute() | ast.Call() as one):
            name = last_name(one.func if isinstance(one, ast.Call) else one)
            return name in rank_names(text) or bool(re.search("(^|_)(main|master|zero|chief|primary)(_|$)", name))
        case ast.Compare(left=ast.Name() | ast.Attribute() | ast.Call() as left, comparators=[ast.Constant(value=0)]):
            test = left.func if isinstance(left, ast.Call) else left
    name = last_name(test)
    return name in rank_names(text) or bool(re.fullmatch(r"(\w+_)?rank", name.removeprefix("get_"), re.I))


def leaves_one(text: str, node: ast.If) -> bool:
    """Return whether all ranks but one leave at a statement, such as `if not is_main: return`."""
    leaves = isinstance(node.body[-1], (ast.Return, ast.Continue, ast.Break))
    return leaves and tells_ranks(text, node.test) and not holds_for_one(node.test)


def guards_before(text: str, outer: ast.AST, inner: ast.AST) -> list[ast.If]:
    """Return the statements by which all ranks but one leave a block of `outer` before they come to `inner`."""
    block = block_of(outer, inner)
    before = block[: block.index(inner)] if block else []
    return [node for node in before if isinstance(node, ast.If) and leaves_one(text, node)]


@lru_cache(maxsize=4096)
def branch_of_rank(text: str, line: int) -> str:
    """Return "alone" if only one rank runs a line, "side" if the others run the other branch, otherwise ""."""
    for outer, inner in pairwise(enclosing(text, line)):
        # The others may make the same call before they leave.
        left = (guard for guard in guards_before(text, outer, inner) if not calls_in(*guard.body))
        if any(_of_one(text, guard.test) for guard in left):
            return "alone"
        if not isinstance(outer, ast.If) or not tells_ranks(text, outer.test):
            continue
        if inner in (outer.body if holds_for_one(outer.test) else outer.orelse):
            return "side" if outer.orelse else "alone"
    return ""


def deletes(text: str, line: int) -> bool:
    """Return whether a line belongs to a `del` statement."""
    return any(isinstance(node, ast.Delete) for node in enclosing(text, line))


@lru_cache(maxsize=4096)
def in_cleanup(text: str, line: int) -> str:
    """Return "finally", "except", WITHOUT_RAISE or the function's name if a line belongs to cleanup; otherwise ""."""
    path = enclosing(text, line)
    for place, (outer, inner) in enumerate(pairwise(path)):
        if isinstance(outer, (ast.Try, ast.TryStar)) and inner in outer.finalbody:
            return "finally"
        if isinstance(outer, ast.ExceptHandler) and (raises := _cleans_up(path[place:], text, line)) is not None:
            return "except" if raises else WITHOUT_RAISE
    functions = [node.name for node in path if isinstance(node, Function)]
    return next((name for name in functions if CLEANUP_NAMES.search(name)), "")


def _cleans_up(path: Sequence[ast.AST], text: str, line: int) -> bool | None:
    """Return whether an `except` that cleans up can raise; None if it goes on with the work instead, as a retry does.

    Args:
        path: The handler and the nodes in it around the line.
        text: Source of the file.
        line: The line, from which a call has not returned.
    """
    names = (last_name(call.func) for call in calls_at(text, line))
    if not _leads_to_raise(path) and not any(map(HANDLER_CLEANUP.search, names)):
        return None
    return bool(nodes_in(ast.Raise, path[0]))


def block_of(outer: ast.AST, inner: ast.AST) -> list[Any]:
    """Return the statements of `outer` among which `inner` is; [] if it is in none of its blocks."""
    blocks = (getattr(outer, name, []) for name in ("body", "orelse", "finalbody"))
    return next((each for each in blocks if inner in each), [])


def _leads_to_raise(path: Sequence[ast.AST]) -> bool:
    """Return whether a program that goes on from the last of these nodes always raises or exits within the first."""
    for place in range(len(path) - 1, 0, -1):
        outer, inner = path[place - 1 : place + 1]
        block = block_of(outer, inner)
        for node in block[block.index(inner) :] if block else ():
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(node, ast.Raise) or (isinstance(call, ast.Call) and dotted(call.func) in ENDS):
                return True
            around = any(isinstance(each, (ast.For, ast.AsyncFor, ast.While)) for each in path[1:place])
            if isinstance(node, ast.Return) or (isinstance(node, (ast.Break, ast.Continue)) and not around):
                return False
    return False


def in_handler(text: str, line: int) -> bool:
    """Return whether a line is in the body of an `except`."""
    return any(isinstance(outer, ast.ExceptHandler) for outer, _ in pairwise(enclosing(text, line)))


def loop_at(text: str, line: int) -> Loop | None:
    """Return the innermost loop around a line, within its function."""
    return next(reversed(loops_at(text, line)), None)


def outermost_loop(text: str, line: int) -> Loop | None:
    """Return the outermost loop around a line, within its function."""
    return next(iter(loops_at(text, line)), None)


def loops_at(text: str, line: int) -> list[Loop]:
    """Return the loops around a line, within its function, outermost first."""
    found: list[Loop] = []
    for node in enclosing(text, line):
        if isinstance(node, Function):
            found = []
        elif isinstance(node, Loop):
            found.append(node)
    return found


def texts_in(node: ast.AST) -> set[str]:
    """Return the string constants in an expression or statement."""
    return {each.value for each in nodes_in(ast.Constant, node) if isinstance(each.value, str)}


def counted(*roots: ast.AST) -> set[str]:
    """Return the names and attributes that loops count up or down, such as `tries` in `tries += 1`."""
    targets = (node.target for node in nodes_in(ast.AugAssign, *roots))
    return {last_name(each) for each in targets if isinstance(each, (ast.Name, ast.Attribute))}


def skipped_counts(text: str, line: int) -> set[str]:
    """Return the variables that every full round of a loop counts, if a line is in a branch that skips this.

    In `if batch is None: sleep(1); continue`, with `step += 1` further down, `step` tells whether a batch has come.
    """
    body = loop.body if (loop := loop_at(text, line)) is not None else []
    full: list[ast.stmt] = []
    for at, branch in ((n, each) for n, each in enumerate(body) if isinstance(each, ast.If)):
        for here, other in ((branch.body, branch.orelse), (branch.orelse, branch.body)):
            if any(covers(each, line) for each in here):
                full = [*other, *(body[at + 1 :] if isinstance(here[-1], ast.Continue) else ())]
    return {each.target.id for each in full if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name)}


def _handlers(loop: ast.AST, errors: re.Pattern[str]) -> list[ast.ExceptHandler]:
    """Return each `except` in a loop that names such an exception."""
    return [each for each in nodes_in(ast.ExceptHandler, loop) if each.type and errors.search(ast.unparse(each.type))]


def missed(loop: ast.AST) -> set[str]:
    """Return the names that a loop counts when a wait has reached its limit, such as `idle` beside queue.Empty."""
    late = nodes_in(ast.AugAssign, *_handlers(loop, LIMIT))
    return counted(*late) - counted(*(node for node in nodes_in(ast.AugAssign, loop) if node not in late))


@lru_cache(maxsize=256)
def failures(text: str) -> frozenset[str]:
    """Return the names of errors that a file counts or collects only where it handles an exception."""
    tree = parse(text)
    handlers = nodes_in(ast.ExceptHandler, tree)
    late = {*nodes_in(ast.AugAssign, *handlers), *nodes_in(ast.Call, *handlers)}
    every = {*nodes_in(ast.AugAssign, tree), *nodes_in(ast.Call, tree)}

    def names(nodes: set[ast.AugAssign | ast.Call]) -> set[str]:
        return counted(*nodes) | filled(ast.Module([ast.Expr(n) for n in nodes if isinstance(n, ast.Call)], []))

    return frozenset(name for name in names(late) - names(every - late) if re.search("err|fail|exc", name, re.I))


def filled(loop: ast.AST) -> set[str]:
    """Return the names and attributes of the collections to which a loop adds items, such as `rows` in rows[n] = 1."""
    functions = (call.func for call in calls_in(loop))
    grown = [each.value for each in functions if isinstance(each, ast.Attribute) and each.attr in GROWS]
    targets = [each for node in nodes_in(ast.Assign, loop) for each in node.targets]
    grown += [each.value for each in targets if isinstance(each, ast.Subscript)]
    return set(map(last_name, grown))


@lru_cache(maxsize=4096)
def made_anew(text: str, line: int) -> frozenset[str]:
    """Return, as len(name), the collections that a loop makes as a whole in each round, but not from themselves."""
    if (loop := outermost_loop(text, line)) is None:
        return frozenset()
    whole = (ast.ListComp, ast.SetComp, ast.DictComp)
    made = [node for node in nodes_in(ast.Assign, loop) if isinstance(node.value, whole)]
    names = {name for each in made for name in names_in(*each.targets) - names_in(each.value)}
    return frozenset(f"len({name})" for name in names - filled(loop))


@lru_cache(maxsize=4096)
def loop_variables(text: str, line: int) -> frozenset[str]:
    """Return the variables of all `for` loops in the function around a line, or in the module if there is none."""
    around = enclosing_function(text, line) or parse(text)
    return frozenset(names_in(*(loop.target for loop in nodes_in((ast.For, ast.AsyncFor), around))))


def goes_on_forever(loop: ast.AST | None) -> bool:
    """Return whether a loop is `while True` without a break, return or raise: it is not meant to end."""
    if not isinstance(loop, ast.While) or not isinstance(loop.test, ast.Constant) or not loop.test.value:
        return False
    return set(nodes_in(LEAVES, loop)) <= set(nodes_in(LEAVES, *_handlers(loop, PROGRAM_ENDS)))


@lru_cache(maxsize=4096)
def rounds(text: str, line: int) -> frozenset[str]:
    """Return what numbers the rounds of the loops around a line, of those that work and are meant to end.

    These are variables, or lengths of lists such as len(log).
    """
    found = set[str]()
    for loop in loops_at(text, line):
        if isinstance(loop, ast.While):
            forever = goes_on_forever(loop) or EVENT.search(ast.unparse(loop.test))
            lists = {f"len({name})" for name in filled(loop)}
            found |= set() if forever or polls(loop, text) or retries(loop) else counted(loop) | lists
        elif not re.search(r"\b(count|cycle)\(", ast.unparse(loop.iter)):
            found |= names_in(loop.target)
    return frozenset(found)


@lru_cache(maxsize=4096)
def periodic(text: str, line: int) -> bool:
    """Return whether a line is in a `while` that pauses in each round, forever or until an event is set."""
    loop = outermost_loop(text, line)
    if not isinstance(loop, ast.While) or not (goes_on_forever(loop) or EVENT.search(ast.unparse(loop.test))):
        return False
    body = [*loop.body, *(each for node in loop.body if isinstance(node, ast.Try) for each in node.body)]
    each_round = [loop.test, *(node for node in body if isinstance(node, ast.Expr))]
    return any(re.search(r"(sleep|\.wait)\([^)]", ast.unparse(node)) for node in each_round)


@lru_cache(maxsize=4096)
def clocks(text: str, line: int) -> set[str]:
    """Return the names that the function around a line computes from the clock, without other calls, such as an age."""
    found = set[str]()
    for node in nodes_in(ast.Assign, enclosing_function(text, line)):
        if isinstance(node.targets[0], ast.Name):
            calls = {dotted(call.func) for call in calls_in(node.value)} - NUMBERS
            used = names_in(node.value)
            if (calls or used & found) and all(map(CLOCK.search, calls)):
                found.add(node.targets[0].id)
    return found


def follows(text: str, line: int, later: int) -> bool:
    """Return whether a program can go from one line on to a later one: not from one branch of an `if` to another."""

    def branch(blocks: Sequence[list[ast.stmt]], line: int) -> list[ast.stmt] | None:
        return next((b for b in blocks if b and b[0].lineno <= line <= (b[-1].end_lineno or 0)), None)

    for node in enclosing(text, line):
        blocks = [node.body, node.orelse] if isinstance(node, ast.If) else []
        blocks += [case.body for case in node.cases] if isinstance(node, ast.Match) else []
        here, there = branch(blocks, line), branch(blocks, later)
        if here and there and here is not there:
            return False
    return True


@lru_cache(maxsize=4096)
def function_named(text: str, name: str) -> Function | None:
    """Return the first function of a file with this name."""
    functions = nodes_in((ast.FunctionDef, ast.AsyncFunctionDef), parse(text))
    return next((each for each in functions if each.name == name), None)


def taking(text: str, line: int, queue: str) -> set[str]:
    """Return the names of the functions, of the class around a line if there is one, that take items from a queue."""
    around = [node for node in enclosing(text, line) if isinstance(node, ast.ClassDef)]
    scope = around[-1] if around else parse(text)
    taken = re.compile(rf"{re.escape(queue)}(\.get(_nowait)?)?")
    named = {
        function.name: {dotted(each) for call in calls_in(function) for each in (call.func, *call.args)}
        for function in nodes_in((ast.FunctionDef, ast.AsyncFunctionDef), scope)
    }
    return {name for name, called in named.items() if any(taken.fullmatch(each) for each in called)}


def started_before(text: str, line: int) -> set[str]:
    """Return the targets of the threads that the function around a line, or its class's `__init__`, has started.

    Outside of functions, they are those that the module's own lines before it have started. Threads that only one
    branch starts are left out: nothing says which branch was taken.
    """
    around = enclosing_function(text, line) or parse(text)
    if around is None:
        return set()
    classes = [node for node in enclosing(text, line) if isinstance(node, ast.ClassDef)]
    made = [node for each in classes for node in each.body if isinstance(node, Function) and node.name == "__init__"]
    branches = (node for node in nodes_in(ast.If, around) if not covers(node, line))
    perhaps = calls_in(*(each for node in branches for each in (*node.body, *node.orelse)))
    before = [node for node in _without_nested(around) if isinstance(node, ast.Call) and node.lineno < line]
    calls = [call for call in before if call not in perhaps]
    begun = {dotted(call.func).removesuffix(".start") for call in calls if dotted(call.func).endswith(".start")}
    named = {
        node.value: dotted(node.targets[0])
        for node in nodes_in(ast.Assign, around)
        if node.lineno < line and isinstance(node.targets[0], ast.Name)
    }
    # One that has a name is started by a call of its own, perhaps further down.
    calls = [call for call in calls if call not in named or named[call] in begun] + calls_in(*made)
    targets = (keyword(call, "target") for call in calls if dotted(call.func).endswith("Thread"))
    return {dotted(target).rpartition(".")[2] for target in targets if target is not None}


def ends_one_of(text: str, line: int, waits: Collection[Wait], *, by_argument: bool = True) -> bool:
    """Return whether the function around a line, or the loop if there is none, may end one of these waits.

    Args:
        text: Source of the file.
        line: A line of the function or loop.
        waits: Waits of other threads.
        by_argument: Count calls on any argument of the function, too: it may be the object under another name.
    """
    around = enclosing_function(text, line) or outermost_loop(text, line)
    return around is not None and any(ends_wait(around, text, wait, by_argument) for wait in waits)


@lru_cache(maxsize=4096)
def ends_wait(
    around: Function | Loop | ast.Module, text: str, wait: Wait, by_argument: bool = True, depth: int = 2
) -> bool:
    """Return whether a function or loop, or one that it calls, may end a wait; see `ends_one_of`."""
    kind, target = wait
    nested = enclosing(text, around.lineno) if by_argument and isinstance(around, Function) else ()
    given = {each.arg for one in nested if isinstance(one, Function) for each in one.args.args} - {"self"}
    for call in (node for node in _without_nested(around) if isinstance(node, ast.Call)):
        # A call can be handed on, as in call_soon(future.set_result, 1) and pool.submit(self.score).
        for called in map(dotted, (call.func, *call.args)):
            found = re.fullmatch(ENDING.get(kind, ENDING[""]), called)
            # Whoever sets the result of a future that another one waits for may have taken it from a table.
            any_name = not target or (kind == "future" and found and _from_table(found[1], around))
            if found and (any_name or found[1] in given or same_name(found[1], target)):
                return True
            inner = function_named(text, called.rpartition(".")[2]) if depth else None
            if inner is not None and ends_wait(inner, text, wait, by_argument, depth - 1):
                return True
    return False


def _from_table(name: str, around: ast.AST) -> bool:
    """Return whether an object is an item of a table, such as pending.pop(number), or a variable that was one."""
    if name in names_in(*(loop.target for loop in nodes_in(ast.For, around))):
        return True
    values = (dotted(node.value) for node in nodes_in(ast.Assign, around) if name in map(dotted, node.targets))
    return any(each.endswith(("[]", ".pop()", ".get()", ".popleft()")) for each in (name, *values))


def _without_nested(around: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a function or loop, without those of functions that it only defines."""
    for node in ast.iter_child_nodes(around):
        if not isinstance(node, Function):
            yield node
            yield from _without_nested(node)


@lru_cache(maxsize=4096)
def calls_of(loop: ast.AST) -> tuple[str, ...]:
    """Return the names of the calls in a loop. One that waits without a limit gets (), so that POLLS does not match."""
    calls = [(dotted(call.func), call) for call in calls_in(loop)]
    return tuple(
        "get"  # a TCPStore's counter is read so
        if name.endswith(".add") and [ast.unparse(each) for each in call.args[1:]] == ["0"]
        else name + ("()" if UNLIMITED.search(name) and not call.args and not call.keywords else "")
        for name, call in calls
    )


@lru_cache(maxsize=4096)
def polls(loop: ast.AST, text: str, depth: int = 2, also: re.Pattern[str] | None = None) -> bool:
    """Return whether a loop only waits and asks again.

    Args:
        loop: A loop, or a function that a loop calls.
        text: Source of its file, in which the functions that it calls are looked up.
        depth: Number of levels of calls that are followed.
        also: Matches further calls that may be in such a loop.
    """
    names = calls_of(loop)
    if isinstance(loop, ast.While):
        asked = {dotted(call.func) for call in calls_in(loop.test)}
        names = [name for name in names if not (name in asked and COLLECTS.search(name))]
    if isinstance(loop, ast.For):
        names = [name for name in names if name != "range"]
        if all(name.endswith("sleep") for name in names):
            return False
    if not names:
        return False
    sleeps = any(name.endswith("sleep") for name in names)
    if also is None and (sleeps or any(".wait" in name for name in names)):
        also = QUERIES
    for name in names:
        if sleeps and name.endswith(".remote"):  # a method of an actor of Ray: without a sleep, the loop may be the job
            continue
        if POLLS.search(name) or (also is not None and also.search(name)):
            continue
        function = function_named(text, name.rpartition(".")[2])
        if function is None or not depth:
            return False
        only_returns = all(isinstance(each, (ast.Return, ast.Expr)) for each in function.body)
        if not (only_returns and not calls_of(function)) and not polls(function, text, depth - 1, also):
            return False
    return True


def retries(loop: ast.AST) -> bool:
    """Return whether a loop only makes attempts: it is left when one succeeds, and goes on when one fails."""
    for node in nodes_in(ast.Try, loop):
        if any(not isinstance(each.body[-1], ast.Raise) for each in node.handlers):
            last = (node.orelse or node.body)[-1]  # reached only if the attempt has succeeded
            while isinstance(last, (ast.With, ast.AsyncWith)):
                last = last.body[-1]
            if isinstance(last, (ast.Return, ast.Break)):
                return True
    return False


def _ends_if(loop: Loop) -> list[ast.expr]:
    """Return the conditions of `if` statements in the body of a loop that leave it."""
    tests = (node for node in loop.body if isinstance(node, ast.If))
    return [node.test for node in tests if isinstance(node.body[-1], (ast.Return, ast.Break))]


def asks(loop: Loop | None) -> bool:
    """Return whether a `while` is left when a test holds, and otherwise only gets values, logs and sleeps."""
    if not isinstance(loop, ast.While) or not _ends_if(loop):
        return False
    acts = [dotted(n.value.func) for n in loop.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    return all(map(POLLS.search, acts))


def asks_for_file(loop: Loop, text: str) -> bool:
    """Return whether a loop only waits and asks for a file, and is left when it is there."""
    for_file = any(re.search(r"exists|is_?file|glob|listdir|stat\(", ast.unparse(test)) for test in _ends_if(loop))
    return for_file and any(name.endswith("sleep") for name in calls_of(loop)) and polls(loop, text)


@lru_cache(maxsize=4096)
def heartbeat(text: str, line: int) -> bool:
    """Return whether a line is in a loop that only sleeps and reports, forever or until an event is set."""
    loop = loop_at(text, line)
    if not isinstance(loop, ast.While) or nodes_in(LEAVES, loop):
        return False
    until = next((dotted(call.func) for call in calls_in(loop.test)), "")
    if not isinstance(loop.test, ast.Constant):
        waits = all(name.removesuffix("()").endswith((".wait", ".is_set", "sleep")) for name in calls_of(loop))
        if waits or not until.endswith((".wait", ".is_set")):  # one that reports nothing waits for the event
            return False
    told = [node for node in loop.body if isinstance(node, ast.Expr) and _tells_the_time(node.value)]
    rest = ast.While(test=loop.test, body=[node for node in loop.body if node not in told], orelse=[])
    return polls(rest, text, also=MEASURES)


def _tells_the_time(node: ast.expr) -> bool:
    """Return whether an expression puts only the time, and constants, into a queue: no work comes through it."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("put", "put_nowait"):
        return False
    return names_in(*node.args) == {"time"}


def selects_for_a_time(text: str, line: int) -> bool:
    """Return whether a line calls select() or poll() with a limit."""
    places = {"select": 3, "poll": 0}
    calls = [(call, last_name(call.func)) for call in calls_at(text, line)]
    limits = (keyword(call, "timeout", places[name]) for call, name in calls if name in places)
    return any(limit is not None and ast.unparse(limit) != "None" for limit in limits)


def may_ask_again(text: str, line: int) -> bool:
    """Return whether a line is in a `while`, in a loop that may be left early, or where a failure is handled."""
    loops = loops_at(text, line)
    may_go_on = any(isinstance(loop, ast.While) or nodes_in((ast.Break, ast.Return), loop) for loop in loops)
    return may_go_on or in_handler(text, line)


def sleeps_s(text: str, line: int, names: Mapping[str, str]) -> float | None:
    """Return the seconds that the sleep at a line takes; None if they are not known, or if it may be a round of many.

    Args:
        text: Source of the file.
        line: Line of the call.
        names: Variables of its function, as text.
    """
    call = next((each for each in calls_at(text, line) if dotted(each.func).endswith("sleep") and each.args), None)
    function = enclosing_function(text, line)
    own = {f"{owner}{function.name}" for owner in ("", "self.", "cls.")} if function is not None else set[str]()
    recurs = function is not None and not own.isdisjoint(name.removesuffix("()") for name in calls_of(function))
    if call is None or recurs or may_ask_again(text, line):
        return None
    given = ast.unparse(call.args[0])
    with suppress(ValueError):
        return float(names.get(given, given))
    return None


@lru_cache(maxsize=4096)
def dispatches(text: str, line: int) -> bool:
    """Return whether a line is in a function with a loop that sets the results of futures."""
    function = enclosing_function(text, line)
    return function is not None and loop_at(text, line) is not None and "set_result" in " ".join(calls_of(function))


def unflushed(text: str, line: int, written: re.Pattern[str]) -> int:
    """Return the line of a call, such as print(), whose text a process may still have in a buffer; 0 if there is none.

    The loop or function around `line`, with what it calls, is looked at first, and then the whole file.
    """
    tree = parse(text)
    first = outermost_loop(text, line) or enclosing_function(text, line)
    for around in (first, tree) if tree and not UNBUFFERED.search(text) else ():
        called = [function_named(text, name.rpartition(".")[2]) for name in (calls_of(around) if around else ())]
        calls = calls_in(around, *called)
        writes = [n.lineno for n in calls if written.search(dotted(n.func)) and keyword(n, "file") is None]
        flushes = [getattr(keyword(each, "flush"), "value", None) is True for each in calls]
        if any(flushes) or any(FLUSHES.search(dotted(each.func)) for each in calls):
            return 0
        if writes:
            return max((n for n in writes if n <= line), default=min(writes))
    return 0


def keyword(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument of a call, by its name or by its place; None if it was not passed."""
    named = next((each.value for each in call.keywords if each.arg == name), None)
    if named is None and place is not None and place < len(call.args):
        return call.args[place]
    return named


def assignments(text: str, name: str) -> Iterator[ast.expr]:
    """Yield the values that a file assigns or appends to a name or attribute, and the iterables of loops over it."""
    last = name.rpartition(".")[2]
    for node in nodes_in(ast.AST, parse(text)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if last_name(target).removesuffix("[]") == last:
                    yield node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for each, value in zip(target.elts, node.value.elts, strict=False):
                        if last_name(each) == last:
                            yield value
        elif isinstance(node, ast.Call) and last_name(node.func) == "append" and node.args:
            if dotted(node.func).removesuffix(".append").rpartition(".")[2] == last:
                yield node.args[0]
        elif isinstance(node, (ast.For, ast.comprehension)) and dotted(node.target) == name:
            yield node.iter


def origin(text: str, call: ast.Call) -> str:
    """Return the top-level module from which the file imports a called name; "" if it does not import it."""
    root = dotted(call.func).partition(".")[0]
    for node in nodes_in((ast.Import, ast.ImportFrom), parse(text)):
        for name in node.names:
            if root == (name.asname or name.name.partition(".")[0]):
                return (getattr(node, "module", None) or name.name).partition(".")[0]
    return ""
