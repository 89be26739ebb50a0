"""Reads and writes of shared variables: does an episode read what another one has written in between?

Episodes may share an attribute and still not see one another's values, because they take turns: each sets it, uses it
and is done with it before it lets go of a lock. What is changed cannot show this, but what is read does.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from types import CodeType, FrameType
from typing import Any

from clew.stress.frames import Code, told
from clew.stress.steps import Episode, current_episode

READS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"))
WRITES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"))


class Uses:
    """Traces, while entered, where episodes read and write attributes and globals of some names.

    Only functions of the user's code that mention such a name are traced. Names are not objects: another object's
    attribute of the same name counts, too. Threads that exist already are not traced. Nothing is traced beside a
    debugger.
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

        Args:
            name: Name of an attribute or global.
            matters: True if episodes were seen to depend on one another. A variable that nobody was seen to read is
                then not excused: it may have been read in a way that is not traced.
        """
        return name in self._writers and name not in self.crossed and (name in self._read or not matters)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._operations(frame.f_code):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._traced
        return None

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        operation = self._operations(frame.f_code).get(frame.f_lasti) if event == "opcode" else None
        episode = current_episode()
        if operation is None or episode is None:
            return self._traced
        name, writes = operation
        if writes:
            self.wrote(name, episode)
            return self._traced
        self._read.add(name)
        last = self._last.get(name)
        if last is not episode and last is not None and episode in self._writers[name]:
            line = told((frame.f_code, frame.f_lineno))
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
