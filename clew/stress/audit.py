"""Python's audit events, passed to listeners. A hook of `sys` can never be removed, so there is only one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Listener = Callable[[str, tuple[Any, ...]], None]

_listeners: list[Listener] = []
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for listener in _listeners:
        listener(event, arguments)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call the listener at each event, in the thread in which the event happens."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
