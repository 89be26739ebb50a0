"""Collects what can be seen of a job from outside: py-spy's stacks and /proc, in parallel, each with a time limit.

Nothing pauses a process: py-spy reads its memory while it runs (`--nonblocking`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from clew.errors import LaunchError
from clew.hang import proc
from clew.hang.endpoints import with_ends
from clew.hang.engines import answers
from clew.hang.equal_stacks import Stack, stack_of
from clew.hang.files import awaited_locks
from clew.hang.flight import calls_of
from clew.hang.inside import inside, tasks_of, with_numbers
from clew.hang.jobs import python
from clew.hang.observed import NO_PYTHON, Frame, Look, Process, Snapshot, Thread
from clew.hang.programs import native
from clew.processes import SOCKET_VARIABLE

PERIOD_S = 0.5
"""Mean seconds between two looks at a process."""
DUMP_S = 5.0
"""Time limit in seconds for reading one process."""
NATIVE_S = 15.0
"""Time limit in seconds for reading the native frames of one process, during which it is paused."""
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_SIZE")
"""Variables in which launchers give the number of ranks on a node."""
AT_ONCE = 16
"""Number of processes that are read at the same time."""
LOCALS_SHOWN = 300
"""Characters of a local variable that are kept."""
LARGEST = 2_000_000
"""Source files of this number of bytes or more are not read."""
TRIES = 4
"""Number of attempts to read a stack: if the process runs meanwhile, the stack can be torn."""
FORKED = [("_bootstrap", "process.py"), ("_launch", "popen_fork.py")]
"""Innermost frame of multiprocessing in a child, and the one that forked it."""
UNREADABLE = ("permission denied", NO_PYTHON)
"""Beginnings of the errors of processes that will stay unreadable."""
Locks = Sequence[proc.FileLock]


def py_spy() -> str:
    """Return the path of the py-spy program.

    Raises:
        LaunchError: It is not installed.
    """
    beside = Path(sys.executable).with_name("py-spy")
    if beside.exists():
        return str(beside)
    with suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.distribution("py-spy")
        files = [file.locate() for file in installed.files or () if file.name == "py-spy"]
        for path in (*files, installed.locate_file("bin/py-spy")):  # the second is for `pip install --target`
            if Path(str(path)).exists():
                return str(path)
    if found := shutil.which("py-spy"):
        return found
    raise LaunchError("Cannot read stacks: py-spy is not installed. Install it with: pip install py-spy")


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Return the threads of one JSON dump of py-spy. Raises ValueError if it is something else."""
    return threads_from(json.loads(text))


def threads_from(value: Any) -> tuple[Thread, ...]:
    """Return the threads of a parsed JSON dump of py-spy. Raises ValueError if it is something else."""
    if not isinstance(value, list):
        raise ValueError("not a JSON dump of py-spy")
    try:
        return tuple(_thread(each) for each in value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a JSON dump of py-spy: {type(error).__name__}: {error}") from error


def _thread(value: dict) -> Thread:
    frames = tuple(
        Frame(
            function=str(each["name"]),
            file=str(each["filename"]),
            line=int(each["line"]),
            locals={local["name"]: str(local["repr"])[:LOCALS_SHOWN] for local in each.get("locals") or ()},
            addresses={local["name"]: int(local["addr"]) for local in each.get("locals") or ()},
        )
        for each in value["frames"]
    )
    # Frames outside of a fork are copies of the parent's: this process will never return to them.
    names = [(frame.name, PurePath(frame.file).name) for frame in frames]
    forked = (n for n in range(1, len(frames)) if names[n - 1 : n + 1] == FORKED)
    frames = frames[: next(forked, len(frames))]
    return Thread(
        name=value.get("thread_name") or "",
        os_id=value.get("os_thread_id") or value.get("thread_id") or 0,  # the first is null before Python 3.11
        active=bool(value.get("active")),
        frames=frames,
    )


def look_at(pid: int, program: str) -> Look:
    """Return the state of one process now. A process that cannot be read gives a look with an error."""
    stat, at = proc.stat_of(pid), time.monotonic()
    if stat is None:
        return Look(at=at, state="X", error="the process is gone")
    (read, written), (children_cpu_s, children_faults) = proc.bytes_of(pid), proc.ended_children_of(pid)
    look = Look(
        at=at,
        state=stat[0],
        switches=proc.switches_of(pid),
        cpu_s=stat[2],
        written=written,
        read=read,
        children_cpu_s=children_cpu_s,
        children_faults=children_faults,
    )
    if stat[0] == "Z":
        return replace(look, error="the process has ended (zombie)")
    error = ""
    for attempt in range(TRIES):
        command = [program, "dump", "--json", "--nonblocking", "--locals", "--pid", str(pid)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S, errors="replace")
        except subprocess.TimeoutExpired:
            return replace(look, error=f"py-spy gave no answer within {DUMP_S:.0f} s")
        if ended.returncode == 0:
            try:
                threads = parse_dump(ended.stdout)
            except ValueError as reason:
                error = str(reason)
                continue
            if any(thread.frames for thread in threads) or attempt == TRIES - 1:
                inner = proc.pid_within(pid)  # in a container, py-spy names the main thread by its number inside
                threads = tuple(
                    replace(each, os_id=pid) if each.os_id == inner or each.name == "MainThread" else each
                    for each in threads
                )
                files = (frame.file for thread in threads for frame in thread.frames)
                # The event loop's thread of a Ray actor may show a stack that it left long ago. Its name still tells.
                loops = any("asyncio" in each for each in (*files, *(thread.name.lower() for thread in threads)))
                return replace(look, threads=with_numbers(pid, threads) + (tasks_of(pid) if loops else ()))
        else:
            error = _reason(ended.stderr)
        if error.startswith(UNREADABLE) or (stat := proc.stat_of(pid)) is None:
            break
        time.sleep(0.02)
    known = f"state {look.state}, {look.cpu_s:.1f} s of CPU time"
    return replace(look, error=f"{error or 'py-spy found no Python frame'} ({known})")


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = " ".join(lines)[:300]
    if "ermission" in text:
        return "permission denied: run `clew hang` as the same user, or as root; in a container it needs SYS_PTRACE"
    if "Failed to find" in text and "python" in text.lower():
        return f"{NO_PYTHON} in this process"
    return text or "py-spy failed"


def watch(pids: Sequence[int], until: Callable[[Sequence[Process], float], bool]) -> tuple[Process, ...]:
    """Look at processes about twice a second until `until` says that enough was seen.

    Args:
        pids: The processes.
        until: Function of the processes so far and the seconds since the first look.
    """
    program = py_spy()
    first = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        processes = list(pool.map(describe, pids))
        while True:
            began = time.monotonic()
            looks = pool.map(lambda process: look_at(process.pid, program), processes)
            processes = [replace(p, looks=(*p.looks, look)) for p, look in zip(processes, looks, strict=True)]
            processes = _with_programs(processes, pids, program)
            if until(processes, time.monotonic() - first):
                break
            # Irregular, so that a loop with the same period is not always met at the same place.
            pause = PERIOD_S * (0.6 + 0.8 * (7 * len(processes[0].looks) % 11) / 11) if processes else PERIOD_S
            time.sleep(max(0.0, pause - (time.monotonic() - began)))
    machine = proc.sockets_of_machine()
    locks = proc.with_heirs(proc.locks_of_machine(), [process.pid for process in processes])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        processes = list(pool.map(lambda process: _with_waits(process, machine, locks), processes))
    processes = with_ends(processes, machine)
    return tuple(replace(process, outside=outside(process, processes, locks)) for process in processes)


def _with_programs(processes: list[Process], pids: Sequence[int], program: str) -> list[Process]:
    """Return the processes, adding native programs that have started meanwhile and dropping those that have ended.

    A compiler, for example, starts one program after another. None of them is at fault for having ended.
    """
    helpers = {each.pid for each in processes if native(each)}

    def has_done_its_part(each: Process) -> bool:
        if each.last.state not in "ZX":
            return False
        if each.parent in helpers:  # some end before they are known to be without Python
            return each.pid in helpers or not any(look.threads for look in each.looks)
        return each.pid in helpers and each.pid not in pids

    kept = [each for each in processes if not has_done_its_part(each)]
    known = {each.pid for each in processes} | {*pids}
    # This command may itself be below a process that it examines.
    below = proc.below(list(pids), without=os.getpid())
    started = [pid for pid in below if pid not in known and not python(pid)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        looked = list(pool.map(lambda pid: replace(describe(pid), looks=(look_at(pid, program),)), started))
    return kept + [each for each in looked if native(each)]


def outside(process: Process, job: Sequence[Process], locks: Locks) -> tuple[str, ...]:
    """Return processes outside the job that hold what a process of it waits for: a file's lock, or a dead child's pipe.

    Processes that a dead child has started may live on, and keep open the pipe that its parent reads.
    """
    pids = {each.pid for each in job}
    held = {file for each in job for file in each.files}
    wanted = {*process.wants} - held
    holders = [lock.pid for lock in locks if lock.held and lock.pid not in pids and str(lock.inode) in wanted]
    if process.inside.children or any(each.parent == process.pid and each.last.state == "Z" for each in job):
        holders += [pid for pid in proc.writers_of(proc.pipes_of(process.pid, os.O_RDONLY)) if pid not in pids]
    return tuple(f"pid {pid} ({' '.join(proc.command_of(pid))[:80]})" for pid in dict.fromkeys(holders))


def describe(pid: int) -> Process:
    """Return what does not change about a process: command, parent, and the rank in its environment."""
    stat, environment = proc.stat_of(pid), proc.environment_of(pid)
    return Process(
        pid=pid,
        host=socket.gethostname(),
        parent=stat[1] if stat else 0,
        command=proc.command_of(pid),
        cwd=proc.link_of(proc.PROC / str(pid) / "cwd"),
        rank=_number(environment.get("RANK")),
        world=_number(environment.get("WORLD_SIZE")),
        local_world=_number(next((environment[name] for name in LOCAL_WORLD if name in environment), None)),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _with_waits(process: Process, machine: dict[str, tuple[str, int, int]], locks: Locks) -> Process:
    listens, peers = proc.sockets_of(process.pid, machine)
    links = sorted(set(proc.descriptors_of(process.pid)))
    of_others = {lock.inode for lock in locks if lock.held and lock.pid != process.pid}
    own = [lock for lock in locks if lock.pid == process.pid]
    if of_others:
        of_others &= proc.open_files_of(process.pid)
    # /proc/locks lists processes that wait in flock(), but not those that retry, as SQLite and filelock do. Then any
    # open file that others have locked may be the one.
    awaited = {lock.inode for lock in own if not lock.held} | awaited_locks(process)
    return replace(
        process,
        exit=process.exit or proc.exit_of(process.pid),
        waits_in=proc.blocked_in(process.pid),
        listens=listens,
        peers=peers,
        pipes=tuple(link for link in links if link.startswith("pipe:")),
        gpus=tuple(link for link in links if re.fullmatch(r"/dev/nvidia\d+", link)),
        files=tuple(str(lock.inode) for lock in own if lock.held),
        inherits=tuple((str(lock.inode), lock.taker) for lock in own if lock.taker),
        wants=tuple(map(str, awaited or sorted(of_others))),
        inside=inside(process.pid, process.threads) if process.threads else process.inside,
        calls=calls_of(proc.environment_of(process.pid).get(SOCKET_VARIABLE, "")),
        answers=answers(process, listens, "".join(sources_of([process]).values())),
    )


def unseen_ranks(processes: Sequence[Process]) -> tuple[int, ...]:
    """Return the ranks on nodes where no process was seen, if the launcher says how many ranks each node has."""
    world = max((process.world or 0 for process in processes), default=0)
    # Launchers number the ranks node by node, so a node's ranks are one block of `local_world` numbers.
    blocks = {(p.rank // p.local_world, p.local_world) for p in processes if p.rank is not None and p.local_world}
    if not blocks:
        return ()
    there = {rank for block, size in blocks for rank in range(block * size, (block + 1) * size)}
    return tuple(rank for rank in range(world) if rank not in there)


def sources_of(processes: Sequence[Process]) -> dict[str, str]:
    """Return the text of the source files in the stacks, by path, except those of installed packages."""
    found: dict[str, str] = {}
    for process in processes:
        for frame in (frame for thread in process.threads for frame in thread.user_frames):
            path = Path(process.cwd, frame.file)
            with suppress(OSError, ValueError):
                if frame.file not in found and path.is_file() and path.stat().st_size < LARGEST:
                    found[frame.file] = path.read_text(errors="replace")
    return found


def snapshot(pids: Sequence[int], until: Callable[[Sequence[Process], float], bool]) -> Snapshot:
    """Return what can be seen of these processes from outside."""
    began = time.monotonic()
    processes = watch(pids, until)
    seconds = time.monotonic() - began
    return Snapshot(processes=processes, seconds=seconds, unseen=unseen_ranks(processes), sources=sources_of(processes))


def with_native(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with the native frames of one process of each class. Each of them is paused meanwhile."""
    program, chosen, notes = py_spy(), dict[Stack, Process](), list[str]()
    for process in snapshot.processes:
        main = process.main
        if main is not None and process.last.state not in "ZXTtD":  # py-spy would wait for a stopped one
            chosen.setdefault(stack_of(main), process)
    frames: dict[int, tuple[str, ...]] = {}
    for process in chosen.values():
        began = time.monotonic()
        command = [program, "dump", "--json", "--native", "--pid", str(process.pid)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=NATIVE_S, errors="replace")
            threads = parse_dump(ended.stdout) if ended.returncode == 0 else ()
        except (subprocess.TimeoutExpired, ValueError):
            threads = ()
        if main := next((thread for thread in threads if thread.os_id == process.pid), None):
            frames[process.pid] = tuple(f"{each.function} ({PurePath(each.file).name})" for each in main.frames)
            notes.append(f"{process.label} was paused for up to {time.monotonic() - began:.1f} s (--native)")
        else:
            notes.append(f"{process.label}: its native frames could not be read")
    processes = tuple(replace(each, native=frames.get(each.pid, ())) for each in snapshot.processes)
    return replace(snapshot, processes=processes, notes=(*snapshot.notes, *notes))
