"""Reads from a process's memory what no stack shows: asyncio's tasks, process groups, ended threads and children."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from math import prod

from clew.hang import proc
from clew.hang.memory import MOST, Memory, Unreadable
from clew.hang.observed import PROGRAM, Frame, Group, Inside, Thread

MOST_TASKS = 1_000
MOST_ITEMS = 100
"""Number of items of a container that are looked at: reading a million takes seconds."""
DEEPEST = 40
CYTHON_AWAITS = 64
"""Offset, in a coroutine that Cython has compiled, of what it awaits."""
TORN = (Unreadable, KeyError, ValueError)
"""Exceptions of reading an object that has changed meanwhile, or is not what was expected."""
C10D = "torch.distributed.distributed_c10d"
POOLED = re.compile(r"\w*PoolWorker-\d+|(ThreadPoolExecutor-\d+|asyncio)_\d")
"""Names of the processes and threads of pools, which end them when the pool is closed."""


def tasks_of(pid: int) -> tuple[Thread, ...]:
    """Return the tasks of asyncio in a process; none if its memory cannot be read."""
    with suppress(*TORN, OSError), Memory(pid) as memory:
        return tuple(tasks(memory))
    return ()


def inside(pid: int, threads: tuple[Thread, ...] = ()) -> Inside:
    """Return what the memory of a process says about groups, threads and children; nothing if it cannot be read."""
    with suppress(*TORN, OSError), Memory(pid) as memory:
        held = _held(memory, threads)
        started = {child[0]: child for child in [*children(memory), *_programs(memory, held)]}
        return Inside(
            groups=groups(memory),
            ended_threads=tuple(ended_threads(memory)),
            children=tuple(started.values()),
            failed_jobs=tuple(_failed_jobs(memory, held)),
        )
    return Inside()


def _held(memory: Memory, threads: tuple[Thread, ...]) -> set[int]:
    """Return the objects that the user's frames hold: variables, attributes of `self`, and the first items of both."""
    held: list[int] = []
    for frame in (frame for thread in threads for frame in thread.user_frames):
        held += frame.addresses.values()
        with suppress(*TORN):
            held += memory.module("__main__").values() if frame.name == "<module>" else ()
            held += memory.attributes(frame.addresses["self"]).values()
    for address in set(held):
        with suppress(Unreadable):
            kind = memory.type_name(address)
            if kind in ("list", "tuple"):
                held += memory.items(address, MOST_ITEMS)
            elif kind == "set":
                held += islice(memory.members(address), MOST_ITEMS)
            elif kind == "dict":
                held += chain.from_iterable(islice(memory.entries(address), MOST_ITEMS))
    return set(held)


def _failed_jobs(memory: Memory, held: set[int]) -> Iterator[tuple[str, str, str]]:
    """Yield the function, exception and place of each job of a pool of threads that failed without anybody noticing."""
    for address in held:
        with suppress(*TORN):
            error = memory.attributes(address)["_exception"] if memory.full_type_name(address) == "Future" else 0
            frames = raised_at(memory, error) if error and memory.type_name(error) != "NoneType" else ()
            own = [each for each in frames if each.of_user]
            # The pool has caught it in its own run(). Once result() has raised it again, the user's code is outermost.
            if own and own[-1:] != [*frames[-1:]]:
                yield own[-1].name, memory.type_name(error), own[0].site


def _programs(memory: Memory, held: set[int]) -> Iterator[tuple[int, str, int]]:
    """Yield pid, name and exit code of ended subprocesses among objects that the user's frames hold."""
    for address in held:
        with suppress(*TORN):
            if memory.type_name(address) == "Popen":
                values = memory.attributes(address)
                if memory.show(values["returncode"]) != "None":
                    yield memory.integer(values["pid"]), "program", memory.integer(values["returncode"])


def _referents(memory: Memory, weak_set: int) -> Iterator[int]:
    """Yield what a WeakSet holds."""
    for reference in memory.members(memory.attributes(weak_set)["data"]):
        with suppress(Unreadable):
            target = memory.word(reference + 16)
            if memory.type_name(target) != "NoneType":
                yield target


def tasks(memory: Memory) -> Iterator[Thread]:
    """Yield asyncio's tasks as threads: their frames from the innermost await outwards."""
    place = memory.layout["task"]
    module = memory.module("asyncio.tasks")
    every = module.get("_all_tasks") or module.get("_scheduled_tasks")
    if not every:
        return
    for number, task in enumerate(_referents(memory, every)):
        if number >= MOST_TASKS:
            return
        with suppress(*TORN):
            state, error = memory.int32(task + place["state"]), memory.word(task + place["exception"])
            name = memory.show(memory.word(task + place["task_name"])).strip("'")
            waiter = memory.word(task + place["waiter"])
            coroutine = coroutine_frames(memory, memory.word(task + place["coroutine"]))
            # Read the numbers now: a moment later, the memory of a list may hold something else.
            frames = tuple(_frame_with_numbers(memory, frame) for frame in coroutine)
            kind = memory.type_name(waiter) if waiter else ""
            woken = kind in ("Future", "Task") and memory.int32(waiter + place["state"]) != 0
            if woken:  # a loop that runs no more leaves its tasks behind
                thread = memory.attributes(memory.word(task + place["loop"])).get("_thread_id")  # uvloop has another
                woken = thread is not None and memory.show(thread) != "None"
            ended = "" if state == 0 else memory.type_name(error) if error else "done"
            with suppress(*TORN):
                frames = (ended and error and raised_at(memory, error)) or frames
            # Skip tasks that ended without an error, and one that runs now: its frames are those of the thread.
            if ended in ("", "done") and (state or not frames):
                continue
            name = f"task {name}"
            asked = bool(ended) and memory.bytes_at(task + place["unread"], 1) == b"\0"
            yield Thread(
                name=name,
                os_id=0,
                task=True,
                ended=ended,
                asked=asked,
                waiter=kind,
                woken=woken,
                frames=frames,
                at=task,
            )


def coroutine_frames(memory: Memory, address: int) -> list[Frame]:
    """Return the frames of a suspended coroutine, the innermost first."""
    place, found = memory.layout["frame"], list[Frame]()
    for _ in range(3 * DEEPEST):  # three times: other objects stand between two frames
        if not address or len(found) == DEEPEST:
            break
        kind = memory.type_name(address)
        if kind == "coroutine" and "cython" in memory.full_type_name(address):  # as around the methods of Ray's actors
            address = memory.word(address + CYTHON_AWAITS)
            continue
        if kind in ("async_generator_asend", "coroutine_wrapper"):
            address = memory.word(address + 16)
            continue
        if kind not in ("coroutine", "generator", "async_generator"):
            break
        top = memory.int32(address + place["top"])
        if top <= 0:  # it runs now, so its frames are a thread's; or it has ended, and they are gone
            return []
        found.append(_frame(memory, address))
        address = memory.word(address + place["locals"] + 8 * (top - 1))  # it awaits what is on top of its stack
    return found[::-1]


def _frame(memory: Memory, coroutine: int) -> Frame:
    place = memory.layout["frame"]
    code = memory.word(coroutine + place["code"])
    values, addresses = dict[str, str](), dict[str, int]()
    for n, name in enumerate(memory.items(memory.word(code + place["names"]))):
        with suppress(Unreadable):
            value = memory.word(coroutine + place["locals"] + 8 * n)
            if value:
                key = memory.text(name)
                addresses[key] = value
                values[key] = memory.show(value)[:300]
    instruction = memory.word(coroutine + place["place"]) - code - place["instructions"]
    return replace(_place(memory, code, instruction), locals=values, addresses=addresses)


def _place(memory: Memory, code: int, instruction: int) -> Frame:
    """Return the function, file and line of an instruction of a code object."""
    place = memory.layout["frame"]
    table = memory.word(code + place["table"])
    lines = memory.bytes_at(table + 32, memory.count(table + 16))
    return Frame(
        function=memory.text(memory.word(code + place["name"])),
        file=memory.text(memory.word(code + place["file"])),
        line=line_of(lines, memory.int32(code + place["line"]), instruction),
    )


def raised_at(memory: Memory, error: int) -> tuple[Frame, ...]:
    """Return the frames through which an exception has come, the one that raised it first, without the middle ones."""
    place, entries = memory.layout["traceback"], list[int]()
    entry = memory.word(error + place["traceback"])
    while entry and len(entries) < MOST:
        entries.append(entry)
        entry = memory.word(entry + place["next"])
    del entries[DEEPEST // 2 : -DEEPEST // 2]
    inner = (memory.word(memory.word(each + place["frame"]) + place["inner"]) for each in entries)
    codes = [memory.word(each + place["code"]) for each in inner]
    lasts = [memory.int32(each + place["instruction"]) for each in entries]
    return tuple(_place(memory, code, last) for code, last in zip(codes[::-1], lasts[::-1], strict=True))


def line_of(table: bytes, first: int, instruction: int) -> int:
    """Return the line of an instruction from a code object's table of locations.

    CPython 3.11 and 3.12 describe the table in Objects/locations.md.
    """
    # The code of an entry: 0-9 stay on the line, 10-12 go down by 0-2, 13-14 by a signed varint, 15 has no line. The
    # first byte of each entry has bit 7 set.
    line, offset, at = first, 0, 0
    while at < len(table):
        head = table[at]
        code, size = head >> 3 & 15, ((head & 7) + 1) * 2
        at += 1
        if code in (10, 11, 12):
            line += code - 10
        elif code in (13, 14):
            number = 0
            for place, byte in enumerate(table[at:]):
                number |= (byte & 63) << 6 * place
                if not byte & 64:
                    break
            line += -(number >> 1) if number & 1 else number >> 1
        while at < len(table) and not table[at] & 128:
            at += 1
        if offset <= instruction < offset + size:
            return line
        offset += size
    return line


def groups(memory: Memory) -> tuple[Group, ...]:
    """Return the process groups of torch, with this process's rank in each."""
    module = memory.module(C10D)
    if not {"_pg_names", "_pg_group_ranks", "_world"} <= module.keys():
        return ()
    default = memory.attributes(module["_world"]).get("_default_pg", 0)
    names = {group: memory.text(name) for group, name in memory.entries(module["_pg_names"])}
    found = []
    for group, ranks in memory.entries(module["_pg_group_ranks"]):
        order = {memory.integer(value): memory.integer(key) for key, value in memory.entries(ranks)}
        members = tuple(order[n] for n in sorted(order))
        own = _own_rank(memory, group, len(members))
        found.append(
            Group(
                at=group,
                name="world" if group == default else names.get(group, "?"),
                members=members,
                rank=members[own] if own is not None else None,
            )
        )
    return tuple(found)


def _own_rank(memory: Memory, group: int, size: int) -> int | None:
    """Return this process's rank within a group, or None if it is not found.

    torch's C++ object has rank_ and size_ beside each other, behind the pointer store_. Their place differs between
    versions of torch, so it is searched for.
    """
    with suppress(Unreadable):
        pointer = memory.word(group + 16)
        for offset in range(16, 64, 4):
            own, world = memory.int32(pointer + offset), memory.int32(pointer + offset + 4)
            if world == size and 0 <= own < size and memory.word(pointer + offset - 8) > 1 << 20:
                return own
    return None


def ended_threads(memory: Memory) -> Iterator[str]:
    """Yield the names of Python threads that have ended but are still referenced.

    Those of the parent also count as ended in a process that it forked. Their numbers are lower than its own pid,
    unless pids have started again from 1.
    """
    module, pid = memory.module("threading"), proc.pid_within(memory.pid)
    if not {"_dangling", "_active"} <= module.keys():
        return
    active = {memory.integer(key) for key, _ in memory.entries(module["_active"])}
    for thread in _referents(memory, module["_dangling"]):
        with suppress(Unreadable, KeyError):
            values = memory.attributes(thread)
            name = memory.text(values["_name"])
            ran = memory.show(values["_ident"]) not in ("None", *map(str, active))
            if ran and memory.integer(values["_native_id"]) > pid and not POOLED.match(name):
                yield name


def children(memory: Memory) -> Iterator[tuple[int, str, int]]:
    """Yield pid, name and exit code of the children of `multiprocessing` that have been reaped."""
    module = memory.module("multiprocessing.process")
    for process in _referents(memory, module["_dangling"]) if "_dangling" in module else ():
        with suppress(*TORN):
            values = memory.attributes(process)
            popen = memory.attributes(values["_popen"])
            name, code = memory.text(values["_name"]), memory.show(popen["returncode"])
            if code != "None" and not (POOLED.match(name) and int(code) == -signal.SIGTERM):
                yield memory.integer(popen["pid"]), name, int(code)


def shape_of(memory: Memory, tensor: int) -> list[int]:
    """Return the sizes of a contiguous tensor: in torch's C++ object, strides that fit them come after them."""
    # torch's SizesAndStrides: the number of dimensions, room for 5 sizes, room for 5 strides; the number of elements
    # comes later. Where all this lies differs between versions of torch.
    for holder in (16, 24):
        with suppress(Unreadable):
            data = memory.bytes_at(memory.word(tensor + holder), 256)
            found = [int.from_bytes(data[n : n + 8], "little", signed=True) for n in range(0, 256, 8)]
            for n, count in enumerate(found[:20]):
                sizes, strides = found[n + 1 : n + 1 + count], found[n + 6 : n + 6 + count]
                fits = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
                if 1 <= count <= 5 and min(sizes) >= 1 and strides == fits and prod(sizes) in found[n + 11 :]:
                    return sizes
    raise Unreadable("no contiguous tensor")


CONTAINERS = ("list", "dict", "set", "deque", "tuple", "Counter", "defaultdict", "OrderedDict")
MOST_NUMBERS = 120
OF_TORCH = re.compile(r"_\w*hooks\w*$|_(parameters|buffers|modules|non_persistent_buffers_set)$")
"""Attributes of modules and optimizers of torch that tell nothing about progress."""


def with_numbers(pid: int, threads: tuple[Thread, ...]) -> tuple[Thread, ...]:
    """Return threads whose user frames also show numbers that their locals lead to: these tell whether work goes on.

    Added are the integer attributes of `self` (self.step), integers in small dicts (self.stats.rejected), lengths of
    containers (len(groups)), and a script's own variables.
    """
    with suppress(Unreadable, OSError), Memory(pid) as memory:
        return tuple(replace(t, frames=tuple(_frame_with_numbers(memory, f) for f in t.frames)) for t in threads)
    return threads


def _frame_with_numbers(memory: Memory, frame: Frame) -> Frame:
    numbers: dict[str, str] = {}
    if frame.file.endswith("torch/distributed/distributed_c10d.py"):
        for name in ("tensor", "input", "input_tensor", "output", "output_tensor"):
            with suppress(Unreadable, KeyError):
                numbers[f"shape({name})"] = str(shape_of(memory, frame.addresses[name]))
        return replace(frame, locals={**numbers, **frame.locals})
    if not frame.of_user and frame.file != PROGRAM:
        return frame
    frame = _without_cells(memory, frame)
    with suppress(*TORN):
        roots = dict(frame.addresses)
        if frame.name == "<module>":
            roots |= memory.module("__main__")
        for name, address in roots.items():
            if len(numbers) < MOST_NUMBERS and not name.startswith("__"):
                numbers |= _numbers_of(memory, name, address, 2 if name == "self" else 1)
    return replace(frame, locals={**numbers, **frame.locals})


def _without_cells(memory: Memory, frame: Frame) -> Frame:
    """Return a frame with what its cells hold: the variables that it shares with functions inside it."""
    addresses, shown = dict(frame.addresses), dict(frame.locals)
    for name, address in frame.addresses.items():
        with suppress(Unreadable, ValueError):
            if memory.type_name(address) == "cell" and (held := memory.word(address + 16)):
                addresses[name], shown[name] = held, memory.show(held)
    return replace(frame, locals=shown, addresses=addresses)


def _numbers_of(memory: Memory, name: str, address: int, depth: int) -> dict[str, str]:
    with suppress(*TORN):
        kind = memory.type_name(address)
        if kind in ("int", "float"):
            return {name: memory.show(address)}
        if kind in CONTAINERS:
            place = 24 if kind == "set" else 16
            found = {f"len({name})": str(memory.count(address + place))}
            if kind in ("dict", "Counter", "defaultdict") and memory.count(address + 16) <= 20:
                for key, value in memory.named(address).items():
                    if memory.type_name(value) == "int":
                        found[f"{name}.{key}"] = memory.show(value)
            return found
        if kind == "SemLock":  # of multiprocessing: how often this process has acquired it, and the maximum
            return {f"{name}.count": str(memory.int32(address + 32))} if memory.int32(address + 36) == 1 else {}
        if depth and kind not in ("module", "type", "function", "Logger"):
            found, attributes = {}, memory.attributes(address)
            of_torch = not attributes.keys().isdisjoint(("_forward_hooks", "param_groups"))
            for key, value in attributes.items():
                if len(found) < MOST_NUMBERS and not (of_torch and OF_TORCH.match(key)):
                    found |= _numbers_of(memory, f"{name}.{key}", value, depth - 1)
            return found
    return {}
