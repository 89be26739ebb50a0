"""State that episodes share: objects that outlive an episode and that several episodes change.

A fact needs two episodes that overlap in time. Either one writes a value and the other replaces it while the first
still runs; or both change one list, and their requests or results differ because of it. What may be intended (a
counter, a log, a cache, a pool that hands the same objects out again) is a suspicion, and so is a value that no episode
was seen to read after another had replaced it: perhaps they take turns.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Literal

from clew.stress.agent_steps import Episode
from clew.stress.frames import Code
from clew.stress.requests import plain
from clew.stress.variables import Sources, Uses
from clew.stress.verdict import Verdict, grouped, listed

DEPTH = 3
"""Maximum depth to which objects within objects are examined."""

WIDTH = 256
"""Maximum number of entries per object whose contents are examined, too. All entries themselves are compared."""

MANY = 4096
"""Maximum number of entries of a dictionary that is examined; a larger one is taken for a table."""

NO_SOURCES = Sources()

_PLAIN = (str, int, float, bool, bytes, type(None))

ChangeKind = Literal["set", "added", "removed", "changed"]
"""Kinds of change:

- set: a value replaced another
- added, removed: a key or an attribute; any change of a set counts as added
- changed: a list
"""


@dataclass(frozen=True, kw_only=True)
class ObjectChange:
    """One change, made in a step of an episode, to an object that outlives the episode."""

    name: str
    """Name of the object, such as agent, agent.messages or module.CACHE."""
    top: str
    """Name of the attribute or global that is this object or contains it. Each gets at most one finding."""
    key: str
    """Key of the dictionary entry, or name of the attribute; empty for a list or a set."""
    kind: ChangeKind
    value: str
    """The new value if it is plain (at most 80 characters), otherwise its type."""
    number: float | None
    """The new value if it is a number."""
    reused: bool
    """True if the new last element of a list had been in it before, or if the list became shorter: perhaps a pool."""
    episode: Episode
    at: float = field(default_factory=time.monotonic)

    @property
    def place(self) -> tuple[str, str]:
        """Name and key: an attribute, an entry, or an object as a whole."""
        return self.name, self.key

    @property
    def variable(self) -> str:
        """Name of the attribute or global, without the name of its owner."""
        return _variable(self.top)

    @property
    def inside(self) -> bool:
        """True if the object that the variable holds was changed; False if the variable got another object."""
        return self.name.startswith(self.top)


def _variable(name: str) -> str:
    return re.sub(r"\[.*", "", name).rpartition(".")[2]


class State:
    """State that outlives an episode, compared after each step.

    It consists of the attributes of the agent and its classes, the globals of its modules, the defaults of arguments
    and of context variables, and what inner functions share with their outer ones.
    """

    def __init__(self, agent: object, code: Code) -> None:
        self._code = code
        self._roots = list(_roots(agent, code))
        modules = (sys.modules.get(name) for name, _ in self._roots)
        self.sources = Sources(
            files=sorted({file for module in modules if (file := getattr(module, "__file__", None))}),
            classes={each.__qualname__ for each in type(agent).__mro__},
        )
        self._lock = threading.Lock()
        self._seen: dict[str, set[int]] = defaultdict(set)
        """IDs of the objects that were in each list."""
        self._tops: dict[str, str] = {}
        """Attribute or global that is or contains each object, by the object's name."""
        self._before = self._held()
        self.changes: list[ObjectChange] = []

    def stepped(self, episode: Episode) -> None:
        """Attribute all changes since the last step to this episode."""
        with self._lock:
            now = self._held()
            for name in now.keys() & self._before.keys():
                self._compare(name, self._before[name], now[name], episode)
            self._before = now

    def place_of(self, text: str) -> str:
        """Return the attribute or global that holds a plain text, and the line that changes it; "" if none holds it."""
        for name, held in self._held().items():
            entries = held.items() if isinstance(held, dict) else enumerate(held[1]) if isinstance(held, tuple) else ()
            for key, value in entries:
                if isinstance(value, str) and text in plain(value):
                    holder = self._tops.get(name) or full_name(name, repr(key))
                    lines = self.sources.lines_that_change(_variable(holder))
                    return f"{holder}, changed at {lines[0]}" if lines else holder
        return ""

    def _compare(self, name: str, before: Any, now: Any, episode: Episode) -> None:
        def note(key: str, kind: ChangeKind, value: Any, reused: bool = False) -> None:
            number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
            shown = repr(value)[:80] if isinstance(value, _PLAIN) else type(value).__qualname__
            top = self._tops.get(name) or full_name(name, key)
            self.changes.append(
                ObjectChange(
                    name=name, top=top, key=key, kind=kind, value=shown, number=number, reused=reused, episode=episode
                )
            )

        if isinstance(now, dict) and isinstance(before, dict):
            for key in now.keys() - before.keys():
                note(repr(key), "added", now[key])
            for key in before.keys() - now.keys():
                note(repr(key), "removed", None)
            for key in now.keys() & before.keys():
                if not _same(before[key], now[key]):
                    note(repr(key), "set", now[key])
        elif isinstance(now, tuple) and isinstance(before, tuple):
            (length, last), (length_before, last_before) = now, before
            if length != length_before or not all(map(_same, last, last_before)):
                newest = last[-1] if last else None
                self._seen[name] |= set(map(id, last_before))
                note("", "changed", newest, reused=length < length_before or id(newest) in self._seen[name])
        elif isinstance(now, frozenset) and now != before:
            note("", "added", None)

    def _held(self) -> dict[str, Any]:
        """Return what each object holds, by the object's name, as a shallow copy.

        Attributes are a dictionary, a list is a tuple (length, last elements), a set is a frozenset of `id`s.
        """
        held: dict[str, Any] = {}
        looked: set[int] = set()
        for name, values in self._roots:
            self._add_held(name, values, held, 0, "", looked)
        return held

    def _add_held(self, name: str, value: Any, held: dict[str, Any], depth: int, top: str, looked: set[int]) -> None:
        """Add to `held` what an object holds, and what the objects within it hold.

        `top` is the attribute or global that contains the object ("" if it is one itself), `depth` its depth below a
        root. `looked` has the IDs of the objects that were added before, perhaps under another name.
        """
        if depth > DEPTH or id(value) in looked:
            return
        looked.add(id(value))
        if isinstance(value, ContextVar):  # its default is one object for all
            try:
                value = Context().run(value.get)
            except LookupError:
                return
        self._tops[name] = top
        if isinstance(value, (list, deque)):  # its last elements are enough: most changes are at the end
            held[name] = (len(value), tuple(value)[-8:] if isinstance(value, deque) else tuple(value[-8:]))
        elif isinstance(value, set):
            held[name] = frozenset(map(id, list(value)))
        elif (entries := self._entries(value, depth)) is not None:
            held[name] = entries
            for key, each in list(entries.items())[:WIDTH]:
                if not isinstance(each, _PLAIN):
                    inner = f"{name}.{key}" if depth == 0 or not isinstance(value, dict) else f"{name}[{key!r}]"
                    self._add_held(inner, each, held, depth + 1, top or inner, looked)

    def _entries(self, value: Any, depth: int) -> dict[Any, Any] | None:
        """Return the entries of a root or a dictionary, or the attributes of an object; None if it is not examined."""
        if isinstance(value, dict) and len(value) > MANY:
            return None
        if depth == 0:
            return {key: _contents(each) for key, each in dict(value).items() if _is_data(key, each)}
        if isinstance(value, dict):
            return dict(value)
        return _attributes(value) if self._is_users_object(value) else None

    def _is_users_object(self, value: Any) -> bool:
        if isinstance(value, (type, ModuleType, FunctionType)):
            return False
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        return bool(file and self._code.is_user(file))


def _roots(agent: object, code: Code) -> Iterator[tuple[str, Any]]:
    """Yield named dictionaries: attributes of the agent and classes, globals of modules, and what functions keep."""
    if hasattr(agent, "__dict__"):
        yield "self" if "agent" in sys.modules else "agent", agent.__dict__  # "agent" is then the module's name
    own = sys.modules[type(agent).__module__]
    package = own.__name__.rpartition(".")[0]
    bases = {each.__module__ for each in type(agent).__mro__}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        file = vars(module).get("__file__")
        beside = bool(package) and name.startswith(package + ".")
        imported = any(each is module for each in vars(own).values())
        if file and code.is_user(file) and (name in bases or beside or imported):
            yield name, vars(module)
            yield from _kept(name, vars(module), code)
            for each in list(vars(module).values()):
                if isinstance(each, type) and each.__module__ == name:
                    yield f"{name}.{each.__qualname__}", each.__dict__
                    yield from _kept(f"{name}.{each.__qualname__}", each.__dict__, code)


def _kept(name: str, attributes: Mapping[str, Any], code: Code) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects that functions keep between calls: defaults of arguments, and variables of outer functions."""
    for function in list(attributes.values()):
        function = function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
        for wrapped in ("", " (wrapped)", " (wrapped twice)"):  # by decorators
            if not isinstance(function, FunctionType):
                break
            title = f"{name}.{function.__name__}{wrapped}"
            arguments = inspect.signature(function, follow_wrapped=False).parameters.values()
            defaults = {each.name: each.default for each in arguments if each.default is not each.empty}
            if held := {key: value for key, value in defaults.items() if not isinstance(value, _PLAIN)}:
                yield f"{title}'s default", held
            if function.__closure__ and code.is_user(function.__code__.co_filename):
                yield (
                    f"{title}'s outer variable",
                    dict(zip(function.__code__.co_freevars, function.__closure__, strict=True)),
                )
            function = vars(function).get("__wrapped__")


def _contents(value: Any) -> Any:
    """Return the value of a variable. One that inner functions share with outer ones is in a cell, which stays."""
    return value.cell_contents if isinstance(value, CellType) else value


def _attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, also those that its class keeps in slots."""
    slots = {
        name: slot
        for each in reversed(type(value).__mro__)
        for name, slot in vars(each).items()
        if isinstance(slot, MemberDescriptorType)
    }
    found = dict(getattr(value, "__dict__", {}))
    for name, slot in slots.items():
        with suppress(AttributeError):  # it has no value yet
            found[name] = slot.__get__(value)
    return found


def _is_data(key: Any, value: Any) -> bool:
    if isinstance(value, CellType):
        return value != CellType() and _is_data(key, value.cell_contents)  # an empty cell has no contents
    dunder = isinstance(key, str) and key.startswith("__")
    return not dunder and not isinstance(value, (type, ModuleType, FunctionType, property, classmethod, staticmethod))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)


def full_name(name: str, key: str) -> str:
    """Return the full name of an entry of the object with this name."""
    return f"{name}[{key}]" if key and not key.startswith("'") else f"{name}.{key[1:-1]}" if key else name


def suspects(changes: Sequence[ObjectChange]) -> set[str]:
    """Return the variables whose values episodes replace while another runs."""
    several_rows = _several_rows(changes)
    return {
        made[0].variable
        for made in grouped(changes, lambda change: change.place).values()
        if _replace(made) and _overlapping(made) and not _suspicion(made, several_rows, matters=True)
    }


def judge_changes(
    changes: Sequence[ObjectChange],
    *,
    matters: bool,
    rewards_differ: bool = False,
    sources: Sources = NO_SOURCES,
    uses: Uses | None = None,
) -> list[Verdict]:
    """Return one verdict for each object, facts first and suspicions last.

    Args:
        matters: True if episodes were seen to depend on one another.
        rewards_differ: True if rewards did. Then objects that episodes change one after another are suspected, too: a
            reward may depend on those before it, such as on their mean.
        sources: Names the lines that change an object.
        uses: Reads and writes of the suspects. None: they were not traced.
    """
    several_rows = _several_rows(changes)
    by_top: dict[str, list[tuple[str, Verdict]]] = defaultdict(list)
    for (name, key), made in grouped(changes, lambda change: change.place).items():
        pair = _overlapping(made)
        if pair is None and (not rewards_differ or len({change.episode.id for change in made}) < 2):
            continue
        variable, full = made[0].variable, full_name(name, key)
        suspicion = _suspicion(made, several_rows, matters)
        if not suspicion and uses is not None and _replace(made) and uses.take_turns(variable, matters=matters):
            suspicion = "perhaps in turns: none was seen to read what another had left there"
        lines = sources.lines_that_change(variable)
        evidence = [*([_overlap(*pair)] if pair else []), f"changed by {listed(change.episode.id for change in made)}"]
        if uses is not None and variable in uses.crossed:
            evidence.insert(len(evidence) - 1, uses.crossed[variable])
        if lines[1:]:
            evidence.append(f"also changed at {', '.join(lines[1:4])}")
        what = f"{full} is changed by episodes that run at the same time"
        if pair is None:
            what, suspicion = f"{full} is changed by one episode after another", "perhaps what their rewards depend on"
        what += f", {suspicion}" if suspicion else "; each sees the other's"
        where = f"{full}, changed at {lines[0]}" if lines else full
        verdict = Verdict(kind="shared", what=what, where=where, evidence=evidence, certain=not suspicion)
        by_top[made[0].top].append((full, verdict))
    verdicts = []
    for top, entries in by_top.items():
        (_, verdict), *others = sorted(entries, key=lambda entry: not entry[1].certain)
        if others:
            names = ", ".join(name for name, _ in others[:3]) + (", …" if len(others) > 3 else "")
            verdict.evidence.append(f"{len(others)} more of {top} changed as well: {names}")
        verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: not verdict.certain)


def _overlap(first: ObjectChange, second: ObjectChange) -> str:
    one, other = first.episode.id, second.episode.id
    if first.kind == second.kind == "set":
        return f"{one} left {first.value} there, and {other} put {second.value} in its place while {one} still ran"
    return f"{one} changed it, and {other} did so while {one} still ran"


def _replace(made: Sequence[ObjectChange]) -> bool:
    """Return whether each change replaces a value. What is added to a list leaves the others' values in it."""
    return all(change.kind == "set" for change in made)


def _several_rows(changes: Sequence[ObjectChange]) -> bool:
    return any(change.episode.data != changes[0].episode.data for change in changes)


def _overlapping(made: Sequence[ObjectChange]) -> tuple[ObjectChange, ObjectChange] | None:
    """Return two successive changes by different episodes, the second made while the first episode still ran."""
    for a, b in itertools.pairwise(made):
        if a.episode is not b.episode and b.at < a.episode.finished:
            return a, b
    return None


def _suspicion(made: Sequence[ObjectChange], several_rows: bool, matters: bool) -> str:
    """Return why the changes of one object may be intended; empty if they may not."""
    kinds = {change.kind for change in made}
    if _counts(made, matters):
        return "perhaps a counter or a statistic"
    if kinds <= {"added", "removed"}:
        return "perhaps a cache"
    if made[0].key and several_rows and all(change.episode.data == made[0].episode.data for change in made):
        return "perhaps a cache that was filled twice"
    if all(change.kind == "changed" and change.reused for change in made[len(made) // 4 :]):
        return "perhaps a pool"
    return "perhaps a log" if kinds == {"changed"} and not matters else ""


def _counts(made: Sequence[ObjectChange], matters: bool) -> bool:
    """Return whether the changes may be those of a counter or a statistic, which are numbers."""
    numbers = [change.number for change in made if change.number is not None]
    if len(numbers) < len(made):
        return False
    if made[0].kind == "changed" or isinstance(numbers[0], float):
        return True
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    if all(abs(step) == 1 for step in steps):
        return True
    back = min(numbers) - max(numbers)  # after the last of some things in turn comes the first
    if len(steps) > 2 and 1 in steps and all(step in (1, back) for step in steps):
        return True
    return not matters and all(step > 0 for step in steps)
