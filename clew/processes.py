"""Processes that die with their parent, and locks that die with their process.

Neither needs the dying process to clean up: when a parent gets SIGKILL, its children die, too, and a lock is free as
soon as its holder is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clew.errors import RecordError

PARENT_VARIABLE = "CLEW_PARENT_PID"
"""Environment variable in which the spawning process puts its own pid; see `die_with_parent`."""
SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
"""torch's variable for the socket on which a rank serves its flight recorder, for `clew hang`."""

PATIENCE_S = 2.0
"""Seconds that a killed process may need until it is gone and has released its locks."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have this process killed (SIGKILL) as soon as its parent is gone, for whatever reason.

    On Linux the kernel does it (prctl(2), PR_SET_PDEATHSIG), even while this process is stopped or spins in C code. To
    the kernel, the parent is the thread that started this process: that thread must not end before the parent does.
    Elsewhere a thread checks its parent four times a second.

    Args:
        parent_pid: The process that should be the parent; by default the one in `PARENT_VARIABLE`. Without either (a
            command typed in a terminal) nothing happens.
    """
    if parent_pid is None:
        named = os.environ.pop(PARENT_VARIABLE, None)
        if named is None:
            return
        parent_pid = int(named)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.25)
    os.kill(os.getpid(), signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Return in words how a process with this exit code of `subprocess` has ended."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def written_since(log: Path, begin: int) -> str:
    """Return what a log has from byte `begin` on. Before it, an earlier start may have written an error of its own."""
    return log.read_bytes()[begin:].decode(errors="replace")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hold_lock(path: Path, what: str, patience_s: float = PATIENCE_S) -> IO[str]:
    """Take an exclusive lock on `path`, held until the returned file is closed or this process ends.

    Args:
        what: The role that is locked, such as "trainer", for the message.
        patience_s: Seconds to wait for a process that is ending.

    Raises:
        RecordError: Another process has the lock. The message has its pid.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")  # not "w", which would wipe out the holder's pid
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise RecordError(
                f"another {what} (pid {holder}) already works on {path.parent.parent}. "
                f"A run directory has one {what}: end that process, or choose another trial=NAME."
            ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def is_lock_free(path: Path) -> bool:
    """Return True if nobody holds this lock; False if somebody does, or if that cannot be found out."""
    # a pid would say less: it may be another process by now, a zombie, or a number of another container
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or there is no such file, or it may not be read
        return False
    return True


@contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT, SIGTERM, SIGHUP and SIGALRM after the block, so that callers keep their own."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                if number == signal.SIGALRM:
                    signal.setitimer(signal.ITIMER_REAL, 0)  # `Interrupts` has set it
                signal.signal(number, handler)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
