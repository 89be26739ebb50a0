"""Data that is collected about a job: plain values only, so that it can be written as JSON and read elsewhere."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import PurePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

PIDS_PER_NODE = 10_000_000
"""Offset between the pids of merged nodes, because two nodes may use the same pid."""
NO_PYTHON = "no Python was found"
"""Beginning of the error in a look at a program that is not Python."""
INSTALLED = re.compile(
    r"^<|/(site|dist)-packages/|/lib/python3|/torch/(_\w+|autograd|distributed|multiprocessing|nn|utils)/"
)
PROGRAM = "<string>"
"""File of the frames of a program that is given to `python -c`."""


def installed(file: str) -> bool:
    """Return whether a file belongs to Python, to torch or to another installed package."""
    return INSTALLED.search(file) is not None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One Python frame of a stack."""

    function: str
    """Qualified name, such as Queue.get."""
    file: str
    line: int
    locals: dict[str, str] = field(default_factory=dict)
    """Local variables by name, as text."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Address of each local variable's object."""

    @property
    def name(self) -> str:
        """Return the function's name without its class."""
        return self.function.rpartition(".")[2]

    @property
    def site(self) -> str:
        """Return the place as file:line."""
        return f"{PurePath(self.file).name}:{self.line}"

    @property
    def of_user(self) -> bool:
        """Return whether this is the user's own code."""
        return not installed(self.file)


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread, with its frames from the innermost outwards."""

    name: str
    os_id: int
    active: bool = False
    frames: tuple[Frame, ...] = ()
    task: bool = False
    """True for a task of asyncio, whose frames are those of its coroutine."""
    ended: str = ""
    """Outcome of a task that has ended: done, or the class of its exception."""
    asked: bool = False
    """True for a task whose exception somebody has asked for, and may have handled."""
    waiter: str = ""
    """Class of what a task awaits, such as Future, Task or _GatheringFuture."""
    woken: bool = False
    """True for a task that awaits a Future or Task that is done, so that its running event loop could resume it."""
    at: int = 0
    """Address of the task."""

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """Return the frames of the user's own code."""
        return tuple(frame for frame in self.frames if frame.of_user)


@dataclass(frozen=True, kw_only=True)
class Group:
    """One process group of torch."""

    at: int
    """Address of the object."""
    name: str
    """"world" for the default group."""
    members: tuple[int, ...]
    rank: int | None = None
    """Global rank of this process, from its place in this group; None if that was not found."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a collective, as torch's flight recorder has it."""

    group: str
    """Name of the group; "world" for the default one."""
    number: int
    """Number of the call within its group, from 1."""
    op: str
    sizes: str
    """Sizes of the tensors that it was called with."""
    ended: bool


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Counts of the collectives that a rank has launched in one communicator of NCCL, as NCCL's RAS reports them.

    A collective counts once the host has launched it, whether or not the GPU has run it.
    """

    communicator: str
    """Hash that names it."""
    size: int
    """Number of its ranks."""
    counts: tuple[tuple[str, int], ...]
    """Count of each collective, such as AllReduce. Messages between two ranks are not counted."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Facts that were read in a process's memory. Empty if it could not be read."""

    groups: tuple[Group, ...] = ()
    ended_threads: tuple[str, ...] = ()
    children: tuple[tuple[int, str, int], ...] = ()
    """Pid, name and exit code of children that have been reaped."""
    failed_jobs: tuple[tuple[str, str, str], ...] = ()
    """Function, exception and place of the failed jobs of thread pools whose results nobody has asked for."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of one process at one moment."""

    at: float
    """Seconds, from a clock that only increases."""
    state: str = "?"
    """Letter of /proc/PID/stat: R, S, D, T (stopped), t (traced), Z (zombie), X (gone)."""
    switches: int = 0
    """Voluntary context switches of the main thread."""
    cpu_s: float = 0.0
    written: int = 0
    """Bytes that the process and its ended children have written so far, to any file or pipe."""
    read: int = 0
    """Bytes that the process and its ended children have read so far."""
    children_cpu_s: float = 0.0
    """CPU seconds of the children that have ended and that it has waited for."""
    children_faults: int = 0
    """Page faults of these children: the number rises whenever one ends."""
    threads: tuple[Thread, ...] = ()
    error: str = ""
    """Reason why the stack could not be read."""

    def main(self, pid: int) -> Thread | None:
        """Return the main thread of the process with this pid; another thread if the main one was not read."""
        first = self.threads[0] if self.threads else None
        return next((thread for thread in self.threads if thread.os_id == pid), first)


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of the job, with everything that was seen of it."""

    pid: int
    host: str = ""
    parent: int = 0
    command: tuple[str, ...] = ()
    cwd: str = ""
    rank: int | None = None
    world: int | None = None
    local_world: int | None = None
    """Number of ranks that the launcher started on this node."""
    looks: tuple[Look, ...] = ()
    waits_in: str = ""
    """Kernel function in which the main thread sleeps (wchan)."""
    listens: tuple[int, ...] = ()
    """TCP ports on which it listens."""
    peers: tuple[int, ...] = ()
    """TCP ports at the other end of its connections."""
    pipes: tuple[str, ...] = ()
    awaits: tuple[tuple[int, str, str], ...] = ()
    """Pipes and sockets that threads read, write or poll now: the thread, its end, and the other end. An end is
    `r pipe:[1]`, `w pipe:[1]` or `socket:[2]`. The other end of a socket is `l socket:[3]`, the listening socket, until
    somebody accepts the connection, and "" if it is not known."""
    ends: tuple[str, ...] = ()
    """Ends that it has open and for which a thread of some process waits."""
    unread: tuple[str, ...] = ()
    """Ends in `awaits` that are Unix sockets whose other end has not read all that was written."""
    awaited_child: int = 0
    """Pid of the child whose exit the main thread waits for; 0 for no child, for any, or if /proc hides it."""
    gpus: tuple[str, ...] = ()
    """Devices of NVIDIA GPUs that it has opened, such as /dev/nvidia0."""
    files: tuple[str, ...] = ()
    """Inodes of the files that it has locked."""
    inherits: tuple[tuple[str, int], ...] = ()
    """Inodes in `files` whose lock a fork handed on, and the pid that took it and has closed the file since."""
    wants: tuple[str, ...] = ()
    """Inodes of the files that it waits to lock; if there are none, of its open files that others have locked."""
    outside: tuple[str, ...] = ()
    """Processes outside of the job that hold what it waits for."""
    exit: str = ""
    """Exit status of a process that has ended."""
    old_error: str = ""
    """Last line of its output if that is an exception from before the watch; otherwise empty."""
    doing: str = ""
    """Activity that Clew's status file names."""
    waits: tuple[dict[str, Any], ...] = ()
    """Clew's own named waits."""
    name: str = ""
    """Name that the process has in a Clew run."""
    tasks: tuple[str, ...] = ()
    """Stacks of its asyncio tasks, as text."""
    native: tuple[str, ...] = ()
    """Frames of the main thread with those of C and C++, the innermost first."""
    alike: tuple[tuple[int, int, str], ...] = ()
    """Rank, pid and host of further ranks that were seen in the same state; see `clew.hang.reduce`."""
    inside: Inside = Inside()
    calls: tuple[Call, ...] = ()
    """Collectives on record in torch's flight recorder, oldest first; empty if it cannot be read."""
    launched: tuple[Launched, ...] = ()
    answers: dict[str, str] = field(default_factory=dict)
    """Answers of the process to HTTP requests, if it is a server: health, is_paused, metrics (moving or still)."""

    @property
    def last(self) -> Look:
        """Return the newest look."""
        return self.looks[-1] if self.looks else Look(at=0.0)

    @property
    def first(self) -> Look:
        """Return the oldest look."""
        return self.looks[0] if self.looks else self.last

    @property
    def wakeups(self) -> int:
        """Return how often the main thread was woken up during the whole watch."""
        return self.last.switches - self.first.switches

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Return the threads of the newest look that has any."""
        return next((look.threads for look in reversed(self.looks) if look.threads), ())

    @property
    def running(self) -> tuple[Thread, ...]:
        """Return the threads, without tasks that have ended: these keep frames, but do nothing any more."""
        return tuple(thread for thread in self.threads if not thread.ended)

    @property
    def main(self) -> Thread | None:
        """Return the main thread as it was seen last; another thread if the main one was not read."""
        return replace(self.last, threads=self.threads).main(self.pid)

    @property
    def main_frames(self) -> tuple[Frame, ...]:
        """Return the frames of the main thread as it was seen last; () if no stack was read."""
        return self.main.frames if self.main else ()

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """Return the main thread's frames that are of the user's own code."""
        return self.main.user_frames if self.main else ()

    @property
    def of_ray(self) -> bool:
        """Return whether this is a worker of Ray, which runs an actor or a task."""
        return "ray::" in "".join(self.command[:1])

    @property
    def label(self) -> str:
        """Return how a report names the process."""
        pid = f"pid {self.pid % PIDS_PER_NODE}" + (f" on {self.host}" if self.pid > PIDS_PER_NODE and self.host else "")
        if self.rank is not None:
            return f"rank {self.rank} ({pid})"
        name = self.name or (f"Ray's {self.command[0].strip().removeprefix('ray::')}" if self.of_ray else "")
        return f"{name} ({pid})" if name else pid


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that was collected about one job."""

    processes: tuple[Process, ...]
    seconds: float = 0.0
    """Time over which the processes were watched."""
    notes: tuple[str, ...] = ()
    """Limits of this snapshot: processes that could not be read, files that were not understood."""
    unseen: tuple[int, ...] = ()
    """Ranks that may live on nodes of which nothing was seen, so that their absence means nothing."""
    absent: tuple[str, ...] = ()
    """Nodes that gave no report."""
    machine: tuple[str, ...] = ()
    """Lines in which GPUs and NCCL report about themselves, and lines about the newest files and logs of the job."""
    sources: dict[str, str] = field(default_factory=dict)
    """Text of the users' source files in the stacks, by path."""

    @property
    def alike(self) -> set[int]:
        """Return the ranks that are only represented by another one; see `Process.alike`."""
        return {rank for process in self.processes for rank, _, _ in process.alike}

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as values that JSON can hold."""
        return asdict(self)


def snapshot_from(value: dict[str, Any]) -> Snapshot:
    """Return the snapshot that `Snapshot.as_dict` wrote. Raises ValueError for anything else.

    Fields that this version of Clew does not know are left out, and those that are missing get their defaults.
    """
    try:
        return _adapter().validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@cache
def _adapter() -> TypeAdapter[Snapshot]:
    return TypeAdapter(Snapshot)  # building it takes 30 ms
