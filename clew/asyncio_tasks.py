"""Writes the stacks of all asyncio tasks of this process when `clew hang` asks with a signal.

A waiting coroutine is on no thread's stack, so py-spy and the like cannot see it from outside. The handler runs on the
main thread between two bytecode instructions: while that thread is blocked in C code, the signal has no effect. It
costs nothing until somebody asks.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from clew.printing import visible

DUMP_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None
"""Signal that `clew hang` sends to ask for the stacks. Nothing else is known to use it; None where real-time signals do
not exist."""

MAX_FRAMES = 32
"""Maximum number of frames written for one task."""

MAX_STACKS = 200
"""Maximum number of different stacks written."""


def write_tasks_on_signal(path: Path, waits: Callable[[], list[dict[str, Any]]]) -> None:
    """Install a signal handler that writes tasks and waits to `path`. Does nothing outside the main thread.

    `waits` returns this process's waits. It runs in the signal handler, so it must not take a lock.
    """
    if DUMP_SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    pid, writing = os.getpid(), False

    def write(number: int, frame: FrameType | None) -> None:
        nonlocal writing
        if os.getpid() != pid or writing:  # a forked child inherits the handler; a second signal may interrupt it
            return
        writing = True
        try:
            report = {"pid": pid, "at": time.time(), "tasks": tasks_here(), "waits": waits()}
            beside = path.with_name(f".{path.name}.{pid}")
            beside.write_text(json.dumps(report))
            beside.replace(path)
        except Exception as error:  # otherwise it would be raised in whatever the main thread is doing
            with suppress(OSError):  # `print` would take locks, which the main thread may hold
                os.write(2, visible(f"Cannot write {path}: {error}\n").encode())
        finally:
            writing = False

    signal.signal(DUMP_SIGNAL, write)
    signal.siginterrupt(DUMP_SIGNAL, False)  # system calls that it interrupts are restarted and do not fail


def tasks_here() -> list[str]:
    """Return the stack of each asyncio task in the event loops that `_loops` finds. Equal stacks become one entry."""
    loops = {id(loop): loop for loop in _loops()}
    stacks = Counter(_stack(task) for loop in loops.values() for task in asyncio.all_tasks(loop))
    return [f"{count} x {stack}" if count > 1 else stack for stack, count in stacks.most_common(MAX_STACKS)]


def _loops() -> list[asyncio.AbstractEventLoop]:
    """Return the running event loops that can be found: this thread's, and asyncio's own in other threads.

    A uvloop in another thread has no Python frame, so it is not found.
    """
    found = list[asyncio.AbstractEventLoop]()
    with suppress(RuntimeError):
        found.append(asyncio.get_running_loop())
    for frame in sys._current_frames().values():
        outer: FrameType | None = frame
        while outer is not None:
            if outer.f_code.co_name == "run_forever":
                loop = outer.f_locals.get("self")
                if isinstance(loop, asyncio.AbstractEventLoop):
                    found.append(loop)
            outer = outer.f_back
    return found


def _stack(task: asyncio.Task[Any]) -> str:
    """Return a task's stack, outermost frame first, and the type of the object that it waits for."""
    lines, awaited = list[str](), task.get_coro()
    while awaited is not None and len(lines) < MAX_FRAMES:
        code, frame, inner = suspended(awaited)
        if code is None or frame is None:
            break
        lines.append(f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})")
        awaited = inner
    if awaited is not None and type(awaited).__name__ != "FutureIter":  # the iterator of a plain future
        lines.append(f"waits for {type(awaited).__qualname__}")
    return "\n".join(lines)


def suspended(awaited: Any) -> tuple[CodeType | None, FrameType | None, Any]:
    """Return code, frame and awaited object of a coroutine, a generator or an asynchronous generator.

    If another thread is running it, the awaited object is None. Reading `cr_await` would then crash Python 3.11, which
    takes something in the running frame for the awaited object. There must be no call between the check and the read,
    because a call lets other threads run.
    """
    if type(awaited).__name__ == "async_generator_asend":  # of `async for`: it hides the generator that it runs
        awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
    if hasattr(awaited, "cr_frame"):
        inner = None if awaited.cr_running else awaited.cr_await
        return awaited.cr_code, awaited.cr_frame, inner
    if hasattr(awaited, "gi_frame"):
        inner = None if awaited.gi_running else awaited.gi_yieldfrom
        return awaited.gi_code, awaited.gi_frame, inner
    if hasattr(awaited, "ag_frame"):
        frame = awaited.ag_frame  # ag_running is also True while it is suspended; then its frame has no caller
        inner = None if frame is None or frame.f_back is not None else awaited.ag_await
        return awaited.ag_code, frame, inner
    return None, None, None
