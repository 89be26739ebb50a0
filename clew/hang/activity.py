"""Says what a thread is doing: its operation, the process group, and the line of the user's code that called it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from clew.hang import expressions, source
from clew.hang.observed import Frame, Process, Thread, installed

C10D = "torch/distributed/distributed_c10d.py"
INITIALISING = {"init_process_group", "rendezvous", "_store_based_barrier", "_create_c10d_store"}
NEW_GROUP = {"new_group", "_new_group_with_tag", "split_group"}
PARALLEL = re.compile(
    r"torch/nn/parallel/distributed\.py$|torch/distributed/(utils|fsdp|_composable|tensor|_functional|optim/zero)"
)
SYNCHRONISES = re.compile(r"sync|verify|wait|all_gather|reduce|broadcast|__init__")
COLLECTIVES = {
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "barrier", "all_to_all",
    "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced",
    "all_gather_single", "all_gather_list",
}  # fmt: skip
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
BLOCKED_CALLS = {
    "sleep": "sleep", "acquire": "lock", "open": "file", "flock": "file", "lockf": "file", "input": "stdin",
    "accept": "network", "recv": "network", "recv_bytes": "pipe", "connect": "network", "sendall": "network",
    "waitpid": "process", "pause": "sleep", "sigwait": "sleep", "select": "network", "poll": "network",
    "breakpoint": "stdin", "set_trace": "stdin",
}  # fmt: skip
"""Calls without a Python frame of their own, and the kind of wait that each is."""
DEVICE_CALLS = {"item", "tolist", "cpu", "numpy", "to", "synchronize", "nonzero", "float", "int", "bool", "print"}
"""Calls that wait until a GPU has computed a value, and that keep a core busy meanwhile."""
DATABASE = ("execute", "executemany", "executescript", "commit")
"""Calls in which SQLite sleeps and keeps trying to lock its file."""
KERNEL = {
    "wait_for_partner": "file",
    "anon_pipe_read": "pipe", "pipe_read": "pipe", "pipe_wait": "pipe", "anon_pipe_write": "pipe", "pipe_write": "pipe",
    "hrtimer_nanosleep": "sleep", "do_wait": "process", "flock_lock_inode_wait": "file", "wait_woken": "network",
    "unix_stream_read_generic": "network", "inet_csk_accept": "network", "locks_lock_inode_wait": "file",
    "n_tty_read": "stdin", "posix_lock_inode_wait": "file",
}  # fmt: skip
"""Functions of the kernel in which a process sleeps, and the kind of wait that each is."""
Patterns = tuple[tuple[str, str, str], ...]
"""Patterns of library frames: file, whole name of the function ("" for any), kind of wait."""
LIBRARY: Patterns = (
    (r"/pdb\.py$|/bdb\.py$", "", "stdin"),
    (r"/socket\.py$", "accept", "network"),
    (r"torch/utils/data/dataloader\.py$", "_try_get_data|_get_data|_next_data|_shutdown_workers", "data_loader"),
    (r"torch/distributed/rpc/", "", "rpc"),
    (r"/subprocess\.py$", "_wait|wait|communicate|_try_wait", "process"),
    (r"multiprocess(ing)?/popen_\w+\.py$", "wait|poll", "process"),
    (r"torch/multiprocessing/spawn\.py$", "join", "process"),
    (r"multiprocess(ing)?/managers\.py$", "acquire|__enter__", "lock"),
    (r"multiprocess(ing)?/managers\.py$", "wait|wait_for", "signal"),
    (r"multiprocess(ing)?/managers\.py$", "", "queue"),
    (r"multiprocess(ing)?/queues\.py$|(^|/)queue\.py$", "get", "queue"),
    (r"multiprocess(ing)?/queues\.py$|/queue\.py$", "put", "queue_full"),
    (r"(^|/)queue\.py$", "join", "condition"),
    (r"ray/_private/worker\.py$", "get_objects|wait", "ray"),
    (r"ray/_private/worker\.py$", "main_loop", "queue"),
    (r"multiprocess(ing)?/pool\.py$", "get|wait|next|join", "pool"),
    (r"concurrent/futures/process\.py$", "shutdown", "pool"),
    (r"concurrent/futures/\w+\.py$", "result|wait|exception|as_completed", "future"),
    (r"urllib3/connectionpool\.py$|httpcore/_sync/connection_pool\.py$",
     "_get_conn|wait_for_connection", "connections"),
    (r"(urllib|http/client|http|requests|urllib3|httpx\w*|httpcore\w*|aiohttp)(/\w+)*\.py$",
     "readinto|_read_status|begin|getresponse|urlopen|request|create_connection|read|connect|send", "http"),
    (r"/(socket|ssl)\.py$", "readinto|create_connection|read|connect|send", "network"),
    (r"/grpc/_channel\.py$", "_blocking|_next|result", "http"),
    (r"multiprocess(ing)?/connection\.py$", r"_?send\w*", "queue_full"),
    (r"multiprocess(ing)?/connection\.py$", "", "pipe"),
    (r"/selectors\.py$", "select", "select"),
    (r"/threading\.py$", "_wait_for_tstate_lock|join|_shutdown", "thread"),
    (r"multiprocess(ing)?/synchronize\.py$", "wait|wait_for", "signal"),
    (r"multiprocess(ing)?/synchronize\.py$", "", "lock"),
    (r"/threading\.py$", "_wait", "barrier"),
    (r"/threading\.py$", "wait|wait_for|acquire|__enter__", "condition"),
    (r"filelock/", "", "file"),
)  # fmt: skip
"""The first that matches any frame wins, so special cases come before general ones: a multiprocessing queue also has
frames of a connection."""
JOBS = {"_worker": "concurrent/futures/thread.py", "_run_function": "torch/distributed/rpc/internal.py"}
"""Functions that run what another thread or rank has asked for, and their files."""
DISTRIBUTED = ("collective", "send", "recv", "init", "new_group", "destroy", "store")
"""Kinds of activity in which a rank waits for other ranks."""
IDLE = ("thread", "condition", "barrier", "signal", "queue", "select", "process", "future", "sleep", "pool")
"""Kinds of activity in which a main thread may only be waiting for another thread, which does the work."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Operation that one thread is in, and the place that called it."""

    kind: str
    """collective, send, recv, init, new_group, destroy, queue, lock, sleep, compute, …"""
    op: str = ""
    group: str = ""
    """Name of the process group as the user's code calls it; "world" for the default one."""
    members: tuple[int, ...] | None = None
    """Ranks of the group; None for the default group, or if they are not known."""
    peers: tuple[int, ...] = ()
    """Ranks that a send or recv waits for."""
    sends: tuple[int, ...] = ()
    """Ranks to which a batch of messages sends, while it receives from `peers`."""
    tag: str = ""
    """Tag of a send or recv."""
    shape: tuple[int, ...] = ()
    """Sizes of the tensor that a collective or message was called with."""
    root: str = ""
    """Source or destination that a collective was called with."""
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    """Source line."""
    branch: str = ""
    """"alone" or "side" if the line is in a branch that only some ranks run, else ""; see `source.branch_of_rank`."""
    cleanup: str = ""
    """Cleanup that the line belongs to, see `source.in_cleanup`, or "destroy" for destroy_process_group; else empty."""
    in_loop: bool = False
    """True if an event loop runs this code: it blocks everything else on that loop."""
    idle_loop: bool = False
    """True if the event loop is idle: it waits for an event that wakes up one of its coroutines."""
    target: str = ""
    """Receiver of the blocked call, such as `results` of results.get()."""
    counters: dict[str, int] = field(default_factory=dict)
    thread: str = ""
    task: bool = False
    """True for a coroutine of asyncio that waits."""
    is_job: bool = False
    """True for a function that a thread pool runs, or that a rank runs for another rank (RPC)."""
    dispatches: bool = False
    """True in a function that hands results to those who wait for them in other tasks or threads."""
    heartbeat: bool = False
    """True in a loop that only sleeps and reports. Nobody waits for it."""
    periodic: bool = False
    """True in a `while` that pauses in each round, see `source.periodic`."""

    woken: bool = False
    """True for a task that its event loop could resume at once, see `observed.Thread.woken`."""

    @property
    def of_user(self) -> bool:
        """Return whether the innermost place that is known is in the user's own code."""
        return bool(self.file) and not installed(self.file)

    @property
    def blocks_loop(self) -> bool:
        """Return whether an event loop runs this and can run nothing else meanwhile."""
        return self.in_loop and not self.idle_loop

    @property
    def site(self) -> str:
        """Return the user's call site as file:line."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""

    @property
    def place(self) -> str:
        """Return the user's call site with its line of source, if that is known."""
        return f"{self.site}: {self.text}" if self.text else self.site

    def loop_in(self, sources: Mapping[str, str]) -> source.Loop | None:
        """Return the innermost loop around the place, within its function."""
        return source.loop_at(sources.get(self.file, ""), self.line)


WORKS = re.compile(r"\.len\([^)]*(pending|work|handle|future|req|flight|outstanding)", re.I)
"""Matches names in `Activity.counters` that are lengths of lists of unfinished asynchronous operations."""
LENGTH = re.compile(r"\.len\([\w.]+\)$")
"""Matches names in `Activity.counters` that are lengths of collections."""
LOOP_COUNTER = re.compile(r"\.(self\.)?(\w*step\w*|it|iter\w*|i|n|epoch|batch\w*|micro\w*|idx|index)$")
"""Matches names in `Activity.counters` that count the rounds of a loop."""


def counters_of(frames: tuple[Frame, ...]) -> dict[str, int]:
    """Return the integer locals of the user's frames, by frame and name: they show loops that advance."""
    values = ((f"{f.name}.{name}", text) for f in frames if f.of_user for name, text in f.locals.items())
    return {name: int(text) for name, text in values if re.fullmatch(r"-?\d{1,15}", text)}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of a thread in the user's code, with the data that is needed to read it."""

    process: Process
    thread: Thread
    user: Frame
    """Innermost frame of the user's code, or the outermost frame if there is none."""
    sources: Mapping[str, str]
    names: dict[str, Any]
    """Integers that expressions of the user's code may use."""

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.thread.frames

    @property
    def inside(self) -> tuple[Frame, ...]:
        """Return the library frames that the user's code has called; all frames if none of them is the user's."""
        return self.frames[: self.frames.index(self.user)] if self.user.of_user else self.frames

    @property
    def text(self) -> str:
        """Return the source of the user's file."""
        return self.sources.get(self.user.file, "")

    def members_of(self, group: str) -> tuple[int, ...] | None:
        """Return the ranks of the group with this name; None if no source file says which they are."""
        every = (new_group_members(text, group, self.names) for text in self.sources.values())
        return next((members for members in every if members is not None), None)


def _cleanup(frames: Sequence[Frame], sources: Mapping[str, str]) -> str:
    """Return the cleanup that a stack is in, see `source.in_cleanup`; "" if it is in none.

    A function with an everyday name (`source.EVERYDAY_NAMES`) does not count if a loop calls it, nor does `__del__` in
    a loop that deletes something.
    """
    for place, frame in enumerate(frames):
        if frame.name == "_exit_wrapper" and frame.locals.get("exc_type") != "None":  # a callback of an ExitStack
            return "__exit__"
        word = source.in_cleanup(sources.get(frame.file, ""), frame.line)
        callers = [each for each in frames[place + 1 :] if each.of_user]
        looped = [source.loop_at(sources.get(each.file, ""), each.line) for each in callers]
        if word == "__del__" and any(looped[:1]) and source.deletes(sources.get(callers[0].file, ""), callers[0].line):
            continue  # a loop deletes an object in each round
        if word and not (source.EVERYDAY_NAMES.match(word) and any(looped)):
            return word
    return ""


def activity_of(process: Process, thread: Thread, sources: Mapping[str, str], world: int | None = None) -> Activity:
    """Return what a thread of a process is doing. `sources` has source texts by path, `world` the number of ranks."""
    frames = thread.frames
    if not frames:
        return Activity(kind="unknown", thread=thread.name)
    user = next(iter(thread.user_frames), frames[-1])
    text = sources.get(user.file, "")
    # asyncio's loop has Python frames. uvloop's has none: only asyncio/runners.py is there, as the innermost frame
    # while the loop is idle, and further out while it runs the user's code.
    runs = any(f.file.endswith("asyncio/events.py") and f.name == "_run" for f in frames)
    asyncio = any(f.file.endswith("asyncio/base_events.py") for f in frames)
    uvloop = any(f.file.endswith("uvloop/__init__.py") for f in frames)
    runner = [f.file.endswith("asyncio/runners.py") for f in frames]
    # The selector is the loop's own if its loop, or nest_asyncio's, has called it: subprocess has a selector, too.
    within = itertools.takewhile(lambda frame: frame.file.endswith("selectors.py"), frames)
    caller = frames[len([*within]) :][:1] if frames[0].file.endswith("selectors.py") else ()
    idle = any(f.name == "_run_once" or f.file.endswith("asyncio/base_events.py") for f in caller)
    base = Activity(
        kind="unknown",
        file=user.file,
        line=user.line,
        function=user.name,
        text=re.sub(r"\s{2,}#.*", "", line_of(text, user.line)),
        branch=next((b for f in frames if (b := source.branch_of_rank(sources.get(f.file, ""), f.line))), ""),
        cleanup=_cleanup(frames, sources),
        in_loop=(runs and (asyncio or uvloop)) or (any(runner) and not runner[0] and not asyncio),
        idle_loop=idle or (runner[0] and not thread.active),
        counters=counters_of(frames),
        thread=thread.name,
        task=thread.task,
        woken=thread.woken,
        is_job=any(f.file.endswith(JOBS.get(f.name, "-")) for f in frames),
        dispatches=source.dispatches(text, user.line),
        heartbeat=source.heartbeat(text, user.line),
        periodic=source.periodic(text, user.line),
    )
    if thread.task:
        return _coroutine(base, thread, user, text)
    names = names_for(process, frames, text, world)
    place = Place(process=process, thread=thread, user=user, sources=sources, names=names)
    # DDP, for example, imports modules on first use: its frames are on the stack then, but no collective has begun.
    if importing(thread):
        return _native(base, place)
    if found := _distributed(base, place):
        return found
    if base.idle_loop:
        return replace(base, kind="select")
    return _first_match(LIBRARY, base, place.inside, place.text) or _native(base, place)


def importing(thread: Thread) -> bool:
    """Return whether a thread imports a module: it loads files and runs code, and waits for nobody."""
    inner = itertools.takewhile(lambda frame: not frame.of_user, thread.frames)
    return any(frame.file.startswith("<frozen importlib") for frame in inner)


COROUTINES: Patterns = (
    (r"asyncio/tasks\.py$", "sleep", "sleep"),
    (r"asyncio/(tasks|taskgroups|timeouts)\.py$|anyio/.*", "_wait|wait_for|gather|__aexit__|_wait_for_one", "tasks"),
    (r"asyncio/queues\.py$", "get", "queue"),
    (r"asyncio/queues\.py$", "put|join", "queue_full"),
    (r"aiohttp/connector\.py$|httpcore/_async/connection_pool\.py$",
     "_wait_for_available_connection|wait_for_connection", "connections"),
    (r"/(aiohttp|httpx\w*|httpcore\w*|grpc|websockets)/", "", "http"),  # before asyncio's locks, in which they wait
    (r"asyncio/(locks|mixins)\.py$", "", "condition"),
    (r"asyncio/subprocess\.py$|asyncio/base_subprocess\.py$", "", "process"),
    (r"asyncio/threads\.py$", "", "future"),
    (r"asyncio/(streams|base_events|selector_events|sslproto)\.py$", "", "http"),
)  # fmt: skip
"""Patterns of frames of coroutines."""
STREAM = r"\.std(in|out|err)\b"
"""Matches an attribute that is a pipe to or from a program."""
SERVING = re.compile(r"/(aiohttp/web\w*|uvicorn/.*|starlette/.*|hypercorn/.*)\.py$|asyncio/runners\.py$")
"""Files of coroutines that wait for requests, which is no fault."""


def _coroutine(base: Activity, thread: Thread, user: Frame, text: str) -> Activity:
    """Return what a coroutine waits for."""
    if thread.ended:
        return replace(base, kind="unknown")
    inside = thread.frames[: thread.frames.index(user)]
    keeps_alive = re.search(r"\bEvent\(\)\.wait\(\)", base.text)  # nobody else has this event, so nobody could set it
    if keeps_alive or any(frame.name == "serve_forever" for frame in inside):
        return replace(base, kind="select", op="serve_forever")
    if not thread.user_frames and any(SERVING.search(f.file) for f in thread.frames):
        return replace(base, kind="unknown")
    starts_program = any(re.search(r"asyncio/subprocess\.py$", frame.file) for frame in inside)
    if thread.waiter in ("Task", "_GatheringFuture") and not starts_program:  # communicate() gathers tasks of its own
        return replace(base, kind="tasks")
    found = _first_match(COROUTINES, base, inside, text) or replace(base, kind="future")
    if found.op == "wait_for" and re.search(r"wait_for\(\s*[\w.]+\.get\(\)", base.text):
        return replace(found, kind="queue", op="get", target=receiver(text, base.line, "get"))
    # asyncio reads sockets and programs through the same streams. A program's is an attribute such as proc.stdout: in
    # this line, or in a call that passes it to this function.
    if found.kind == "http" and (re.search(STREAM, base.text) or re.search(rf"\b{user.name}\(.*{STREAM}", text)):
        return replace(found, kind="process")
    return found


def line_of(text: str, line: int) -> str:
    """Return one line of a source text, stripped."""
    lines = text.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def names_for(process: Process, frames: tuple[Frame, ...], text: str, world: int | None) -> dict[str, Any]:
    """Return the integers that the user's expressions may use, by name: constants, locals, the rank and `world`."""
    names: dict[str, Any] = expressions.constants(text)
    if process.rank is not None:
        names["rank"] = process.rank
    if world is not None:
        names |= {"world_size": world, "world": world, "WORLD_SIZE": world}
    for frame in reversed(frames):  # the outermost first, so that an inner local hides an outer one of the same name
        if frame.of_user:
            names |= {k: int(v) for k, v in frame.locals.items() if re.fullmatch(r"-?\d{1,9}", v)}
    return names


def _distributed(base: Activity, place: Place) -> Activity | None:
    """Return the operation of torch.distributed that a thread is in, or None."""
    inside = place.inside
    functions = {frame.name for frame in inside}
    if functions & INITIALISING or any(frame.file.endswith("torch/distributed/rendezvous.py") for frame in inside):
        return replace(base, kind="init", op="init_process_group")
    if functions & NEW_GROUP:
        return replace(base, kind="new_group", op="new_group")
    c10d = [frame for frame in inside if frame.file.endswith(C10D)]
    if any(frame.name == "destroy_process_group" for frame in c10d):
        return replace(base, kind="destroy", op="destroy_process_group", cleanup=base.cleanup or "destroy")
    if called := [frame for frame in c10d if frame.name in COLLECTIVES | POINT_TO_POINT]:
        return _called(base, called[-1], place)  # all_gather_object, for example, calls all_gather: take the outer one
    if any("p2p" in frame.name and "/distributed/pipelining/" in frame.file for frame in inside):
        return replace(base, kind="recv", op="batch_isend_irecv", group="world")
    # DDP starts its collectives from C++, within the backward pass: no Python frame names them.
    if "_engine_run_backward" in functions and any(re.search("torch/nn/parallel|fsdp", f.file) for f in place.frames):
        return replace(base, kind="collective", op="backward", group="world")
    name = next((f.name for f in inside if PARALLEL.search(f.file) and SYNCHRONISES.search(f.name)), None)
    return replace(base, kind="collective", op=name.strip("_"), group="world") if name else None


def _called(base: Activity, frame: Frame, place: Place) -> Activity:
    """Return the collective or message that a function of torch.distributed stands for."""
    group, members = group_in_memory(frame, place.process) or group_of(frame, place)
    # Ranks may rightly call these with different shapes: a pickled object has any size, and splits may be uneven.
    alike = "_object" not in frame.name and not frame.name.startswith("all_to_all")
    found = replace(base, op=frame.name, group=group, members=members, shape=shape_in(frame) if alike else ())
    if frame.name not in POINT_TO_POINT:
        return replace(found, kind="collective", root=_rank_in(frame, "src", "dst", "group_src", "group_dst"))
    kind, end = ("send", "dst") if "send" in frame.name else ("recv", "src")
    peer = _rank_in(frame, end, f"group_{end}")
    return replace(found, kind=kind, peers=(int(peer),) if peer else (), tag=frame.locals.get("tag", ""))


def _rank_in(frame: Frame, *names: str) -> str:
    """Return the first of these local variables that is a number; "" if none is."""
    return next((value for name in names if (value := frame.locals.get(name, "")).isdigit()), "")


def shape_in(frame: Frame) -> tuple[int, ...]:
    """Return the shape of the tensor that was passed to a torch call; () if it was not read."""
    for name in ("tensor", "input_tensor", "input", "output_tensor", "output"):
        if sizes := re.findall(r"\d+", frame.locals.get(f"shape({name})", "")):
            return tuple(int(size) for size in sizes)
    return ()


def group_in_memory(frame: Frame, process: Process) -> tuple[str, tuple[int, ...] | None] | None:
    """Return the name and ranks of the group passed to a torch call, read from memory; None if it is not there."""
    address = frame.addresses.get("group", 0)
    group = next((group for group in process.inside.groups if group.at == address), None)
    if group is not None and group.name != "world":
        return f"{group.name} of ranks {list(group.members)}", group.members
    passes_none = bool(process.inside.groups) and frame.locals.get("group") == "None"
    return ("world", None) if group is not None or passes_none else None


def group_of(frame: Frame, place: Place) -> tuple[str, tuple[int, ...] | None]:
    """Return the name of the group that a collective was called with, and its ranks if the source says which."""
    callers = [each for each in place.frames[place.frames.index(frame) + 1 :] if each.of_user]
    if not callers:
        return "world", None
    text = place.sources.get(callers[0].file, "")
    calls = source.calls_at(text, callers[0].line)
    call = next((each for each in calls if source.last_name(each.func) == frame.name), None)
    passed = source.keyword(call, "group") if call is not None else None
    if call is not None and passed is None:
        arguments = call.args if frame.name.endswith("barrier") else call.args[1:]  # the first one is the tensor
        named = [each for each in arguments if isinstance(each, (ast.Name, ast.Attribute))]
        groups = [each for each in named if re.search(r"group|pg\b|_pg|mesh", source.dotted(each))]
        if not groups:
            return "world", None
        passed = groups[-1]
    address = frame.addresses.get("group", 0)
    # The source may create the group under a different name than the one that is passed. Other variables of the callers
    # that hold the same object are its aliases.
    aliases = [source.dotted(passed)] if passed is not None else []
    for each in callers:
        aliases += [name for name, at in each.addresses.items() if at == address and name not in aliases]
    whole = ("group.WORLD", "GroupMember.WORLD")
    if not aliases or frame.locals.get("group") == "None" or any(alias.endswith(whole) for alias in aliases):
        return "world", None
    for alias in aliases:
        if (members := place.members_of(alias)) is not None:
            return alias.rpartition(".")[2], members
    return aliases[-1].rpartition(".")[2], None


def new_group_members(text: str, name: str, names: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the ranks of `name = new_group(RANKS)`; None if they do not follow from the source and `names`."""
    integers = {**expressions.constants(text), **names}
    for value in source.assignments(text, name):
        if isinstance(value, ast.Call) and source.last_name(value.func) == "new_group":
            ranks = source.keyword(value, "ranks", 0)
            if ranks is None:
                return tuple(range(integers["world_size"])) if "world_size" in integers else None
            try:
                if isinstance(ranks, ast.Name) and ranks.id not in integers:
                    ranks = next(source.assignments(text, ranks.id), ranks)
                found = expressions.evaluate(ranks, integers)
            except (expressions.Unknown, TypeError, ValueError):
                continue
            if isinstance(found, list) and all(isinstance(each, int) for each in found):
                return tuple(sorted(set(found)))
    return None


def _first_match(patterns: Patterns, base: Activity, inside: Sequence[Frame], text: str) -> Activity | None:
    """Return the wait of the first pattern that matches any of these frames; None if no pattern does."""
    for file, function, kind in patterns:
        for frame in inside:
            if re.search(file, frame.file) and (not function or re.fullmatch(function, frame.name)):
                # The acquire() of a semaphore calls the wait() of its condition.
                op = "acquire" if kind == "condition" and "acquire" in {f.name for f in inside} else frame.name
                return replace(base, kind=kind, target=receiver(text, base.line, inside[-1].name), op=op)
    return None


def receiver(text: str, line: int, method: str = "") -> str:
    """Return the object whose method a line calls, such as `results` in results.get() or in `with results:`.

    Args:
        text: Source of the file.
        line: The line.
        method: Name of the method that runs: in rows.append(results.get()), it may be that of the inner call.
    """
    names = [source.dotted(call.func) for call in source.calls_at(text, line) if method != "__enter__"]
    running = [name for name in names if name.endswith(f".{method}")]
    return (running or names)[0].rpartition(".")[0] if names else entered_at(text, line)


def entered_at(text: str, line: int) -> str:
    """Return the last object that a `with` at this line enters, as text; "" if no `with` begins there."""
    around = [n for n in source.enclosing(text, line) if isinstance(n, (ast.With, ast.AsyncWith)) and n.lineno == line]
    objects = [item.context_expr for each in around[-1:] for item in each.items]
    # In `with open(path) as file, lock:`, a thread waits for the lock, not for the call.
    named = [each for each in objects if not isinstance(each, ast.Call)] or objects
    return ast.unparse(named[-1]) if named else ""


def _native(base: Activity, place: Place) -> Activity:
    """Return what a thread does if no library frame explains it: it computes, or is in a native call.

    The surest sign decides: a call at its line without a frame of its own, then what the kernel says, then names in
    its source.
    """
    process, thread = place.process, place.thread
    calls = source.calls_at(place.text, place.user.line)
    names = [source.dotted(call.func) for call in calls]
    if place.frames[0] is place.user:
        for name, call in zip(names, calls, strict=True):
            if found := _without_frame(base, name, call, place):
                return found
    # `waits_in` and the state belong to the main thread. `waits_in` was read only once, after the last look, so it says
    # nothing about a main thread that was still running in this look.
    main = thread.os_id == process.pid
    runs = main and process.last.state == "R"
    kernel = KERNEL.get(process.waits_in, "") if main and not runs else ""
    if (kernel == "sleep" or not thread.active) and (found := _blocked_call(base, names, kernel, place.text)):
        return found
    # `with lock:` acquires in C, without a Python frame. It shows as a `with` at the line and a futex in the kernel.
    entered = entered_at(place.text, place.user.line)
    if entered and not thread.active and (not main or process.waits_in.startswith("futex")):
        return replace(base, kind="lock", op="with", target=entered)
    if kernel:
        return replace(base, kind=kernel, op=process.waits_in)
    if not thread.active and any("_engine_run_backward" in frame.name for frame in place.frames):
        return replace(base, kind="collective", op="backward", group="world")
    if process.gpus and (waits := [name for name in names if name.rpartition(".")[2] in DEVICE_CALLS]):
        return replace(base, kind="device", op=waits[0])
    if thread.active or runs:
        return replace(base, kind="compute")
    reads = any(reader == thread.os_id and end.startswith("r pipe") for reader, end, _ in process.awaits)
    return replace(base, kind="pipe" if reads else "unknown")


def _without_frame(base: Activity, name: str, call: ast.Call, place: Place) -> Activity | None:
    """Return the wait that a call's name stands for, if such calls have no Python frame of their own; else None."""
    owner, _, method = name.rpartition(".")
    sleeps, text = not place.thread.active, place.text
    match method:
        case "wait" if sleeps and (work := _work(base, call, place)):
            return work
        case "to_here":
            return replace(base, kind="rpc", op=method)
        case "wait" if "rpc_async" in text:
            return replace(base, kind="rpc", op=method)
        case "get" if sleeps and owner and not (call.args or call.keywords):  # of a SimpleQueue
            return replace(base, kind="queue", target=owner, op=method)
        case "read" | "readline" | "readlines" if sleeps and owner.endswith(("stdout", "stderr")):
            return replace(base, kind="pipe", target=owner, op=method)
        case "get" | "wait" if "store" in owner.lower() or re.search(rf"\b{re.escape(owner)} *=.*Store\(", text):
            return replace(base, kind="store", target=owner, op=method)
        case "TCPStore":  # its constructor waits for its server and, as a rule, for all of its members
            return replace(base, kind="store", op=method)
        case "destroy_process_group":
            return replace(base, kind="destroy", op=method, cleanup=base.cleanup or "destroy")
    return None


def _blocked_call(base: Activity, names: Sequence[str], kernel: str, text: str) -> Activity | None:
    """Return the wait of the first call that is known to block and does not contradict the kernel's wait, or None."""
    for name in names:
        owner, _, method = name.rpartition(".")
        if method in DATABASE and (kernel == "sleep" or "sqlite" in text):
            return replace(base, kind="file", op=method)
        kind = BLOCKED_CALLS.get(method)
        # If the line only sleeps, the kernel's wait for the network was read at another moment.
        only_sleeps = kind == "sleep" and kernel == "network" and len(names) == 1
        if kind and (kernel in ("", kind) or kind in ("network", "pipe", "file") or only_sleeps):
            return replace(base, kind=kind, op=name, target=owner)
    return None


def _work(base: Activity, call: ast.Call, place: Place) -> Activity | None:
    """Return the operation behind `work.wait()`: the call that made the work, by its name in the source."""
    name = source.dotted(call.func).removesuffix(".wait")
    made = _calls_that_made(name, call, place.text)
    if not made:
        is_work = "Work" in place.user.locals.get(name, "")
        return replace(base, kind="collective", op="wait", group="?") if is_work else None
    one = _nearest(made, place)
    op = source.last_name(one.func)
    passed = source.keyword(one, "group")
    group, members = "world", None
    if passed is not None and not source.dotted(passed).endswith("group.WORLD"):
        group = source.last_name(passed)
        members = place.members_of(group)
    if op == "batch_isend_irecv":
        messages = _messages_of(one, place)
        received = [each for each in messages if each.args and source.dotted(each.args[0]).endswith("irecv")]
        sent = [each for each in messages if each not in received] if received else []
        peers, sends = (_peers(each, place) for each in (received or messages, sent))
        return replace(base, kind="recv" if received else "send", op=op, group=group, peers=peers, sends=sends)
    if op in POINT_TO_POINT:
        way = "send" if "send" in op else "recv"
        peer = _peer(source.keyword(one, "dst" if way == "send" else "src", 1), place)
        return replace(base, kind=way, op=op, group=group, peers=() if peer is None else (peer,))
    return replace(base, kind="collective", op=op, group=group, members=members)


def _nearest(calls: list[ast.Call], place: Place) -> ast.Call:
    """Return the last of some calls before a thread's line, if possible within the same function."""
    before = [each for each in calls if each.lineno <= place.user.line] or calls
    scope = source.enclosing_function(place.text, place.user.line)
    near = [each for each in before if source.enclosing_function(place.text, each.lineno) is scope] or before
    return near[-1]


def _peer(node: ast.expr | None, place: Place) -> int | None:
    """Return the rank that an argument names, or None if its value is not known."""
    with suppress(expressions.Unknown, TypeError, ValueError):
        value = expressions.evaluate(node, place.names) if node is not None else None
        return value if isinstance(value, int) else None
    return None


def _peers(messages: list[ast.Call], place: Place) -> tuple[int, ...]:
    """Return the ranks that P2POp(...) calls name; () if one of them is not known."""
    peers = [_peer(source.keyword(each, "peer", 2), place) for each in messages]
    return tuple(sorted({each for each in peers if each is not None})) if None not in peers else ()


def _messages_of(call: ast.Call, place: Place) -> list[ast.Call]:
    """Return the P2POp(...) calls of a batch_isend_irecv.

    They are looked for in the call itself, then in the function that waits, then in the line that called it.
    """
    around = source.enclosing_function(place.text, place.user.line)
    outer = [frame for frame in place.frames[place.frames.index(place.user) + 1 :] if frame.of_user]
    lines = [each for f in outer[:1] for each in source.calls_at(place.sources.get(f.file, ""), f.line)]
    every = (source.calls_in(call), source.calls_in(around), lines)
    made = ([each for each in calls if source.dotted(each.func).endswith("P2POp")] for calls in every)
    return next((found for found in made if found), [])


def _calls_that_made(name: str, waiting: ast.Call, text: str) -> list[ast.Call]:
    """Return the calls of torch.distributed whose result may have this name. `waiting` is the call that waits for it.

    Names are followed back through assignments: w.wait() leads to w = works[-1], and this to
    works.append(dist.isend(...)).
    """
    chain, seen = [name.removesuffix("()").removesuffix("[]")], set[str]()
    made: list[ast.Call] = []
    while chain and not made:
        one = chain.pop(0)
        if one in seen:
            continue
        seen.add(one)
        direct = waiting.func.value if isinstance(waiting.func, ast.Attribute) else None
        if _begins_work(one) and isinstance(direct, ast.Call):  # dist.all_reduce(..., async_op=True).wait()
            made.append(direct)
        for value in source.assignments(text, one):
            made += [each for each in source.calls_in(value) if _begins_work(source.dotted(each.func))]
            if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
                chain.append(source.dotted(value).removesuffix("[]"))
            chain += [source.dotted(each) for each in source.nodes_in(ast.Name, value)][:6]
    return made


def _begins_work(name: str) -> bool:
    return name.rpartition(".")[2] in COLLECTIVES | POINT_TO_POINT


def activities(process: Process, sources: Mapping[str, str], world: int | None) -> list[Activity]:
    """Return what the threads of a process are doing, the one that matters first.

    That is the main thread, unless it only waits and another thread is in an operation of torch.distributed
    other than that of a store.
    """
    threads = sorted(process.threads, key=lambda thread: thread.os_id != process.pid)
    every = [activity_of(process, thread, sources, world) for thread in threads]
    if not every:
        return []
    if every[0].kind in IDLE and not every[0].in_loop:
        for other in every[1:]:
            if other.kind in DISTRIBUTED and other.kind != "store":
                rest, main, found = [each for each in every if each is not other], every[0], other
                if not other.of_user:  # a library's: the line that waits for it says more
                    found = replace(other, file=main.file, line=main.line, function=main.function, text=main.text)
                return [found, *rest]
    return every
