"""Finds where CPython keeps things. The examined process's interpreter runs this file, so that the layout is the same.

`offsets()` looks for known values in this process's own memory and prints where they are, as JSON. It uses the standard
library only, and imports nothing of Clew.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from pathlib import Path

WORD = 8
LINE = 4242
"""First line of the probe's code: a number that occurs nowhere else in a code object."""


def words(address: int, size: int) -> list[int]:
    """Return the 64-bit words of this process's memory at an address."""
    data = bytes_at(address, size)
    return [int.from_bytes(data[place : place + WORD], "little") for place in range(0, len(data) - 7, WORD)]


def bytes_at(address: int, size: int) -> bytes:
    """Return bytes of this process's memory."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size)


def pointed(address: int) -> list[int]:
    """Return the five words at an address; [] if it is not mapped."""
    try:
        return words(address, 40)
    except (OSError, OverflowError, ValueError):
        return []


def find(address: int, size: int, value: int, what: str) -> int:
    """Return the offset of the first word with this value. Raises LookupError with `what` if there is none."""
    for place, word in enumerate(words(address, size)):
        if word == value:
            return place * WORD
    raise LookupError(what)


def runtime() -> dict:
    """Return the file that holds _PyRuntime, its place there, and the offsets that lead from it to sys.modules."""
    address = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    first: dict[str, int] = {}
    holder = ""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            # Zero-initialised variables lie in an unnamed mapping, right behind that of their file.
            path = line.split(None, 5)[5].strip() if len(line.split(None, 5)) > 5 else holder
            first.setdefault(path, start)
            if start <= address < end:
                file = path or holder
            holder = path or holder
    ctypes.pythonapi.PyInterpreterState_Get.restype = ctypes.c_void_p
    interpreter = ctypes.pythonapi.PyInterpreterState_Get()
    return {
        "file": file,
        "distance": address - first[file],
        "interpreter": find(address, 4096, interpreter, "interpreter"),
        "modules": find(interpreter, 400_000, id(sys.modules), "sys.modules"),
    }


def frames(loop: asyncio.AbstractEventLoop) -> dict:
    """Return where a suspended coroutine keeps its code, place, stack and awaited object, and code keeps its names."""
    space: dict = {}
    text = "\n" * (LINE - 1) + "async def probe(first, second):\n    await first\n"
    exec(compile(text, "/probe/file.py", "exec"), space)
    awaited, marker = asyncio.Future(loop=loop), object()
    coroutine = space["probe"](awaited, marker)
    coroutine.send(None)
    code, size = coroutine.cr_code, 400
    memory = words(id(coroutine), size)
    first = memory.index(id(awaited)) * WORD
    assert memory[first // WORD + 1] == id(marker)
    base = id(code)
    # The word that points at the current instruction, f_lasti bytes after the start of the bytecode.
    place = next(
        n for n, word in enumerate(memory) if 0 < word - coroutine.cr_frame.f_lasti - base < 400 and word != base
    )
    stack = next(n for n in range(first // WORD + 2, len(memory)) if memory[n] == id(coroutine.cr_await)) * WORD
    height = (stack - first) // WORD + 1
    data = bytes_at(id(coroutine), first)
    # The number of locals and stack entries in use is a 32-bit integer shortly before them.
    tops = [n for n in range(first - 24, first, 4) if int.from_bytes(data[n : n + 4], "little") == height]
    wanted = [id(tuple), 2, id(sys.intern("first")), id(sys.intern("second"))]
    names = next(n * WORD for n, word in enumerate(words(base, 300)) if pointed(word)[1:] == wanted)
    data = bytes_at(base, 300)
    lines = [n for n in range(16, 296, 4) if int.from_bytes(data[n : n + 4], "little") == LINE]
    return {
        "code": memory.index(base) * WORD,
        "locals": first,
        "place": place * WORD,
        "instructions": memory[place] - coroutine.cr_frame.f_lasti - base,
        "top": tops[-1],
        "file": find(base, 300, id(code.co_filename), "file"),
        "name": find(base, 300, id(code.co_qualname), "name"),
        "table": find(base, 300, id(code.co_linetable), "table"),
        "names": names,
        "line": lines[0],
    }


def tasks() -> dict:
    """Return where a task keeps its coroutine and the future it waits for, and where a future keeps its outcome."""
    found: dict = {}

    async def main() -> None:
        waited = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await waited

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        found["coroutine"] = find(id(task), 400, id(task.get_coro()), "coroutine")
        found["loop"] = find(id(task), 400, id(asyncio.get_running_loop()), "loop")
        found["waiter"] = find(id(task), 400, id(waited), "waiter")
        found["task_name"] = find(id(task), 400, id(task.get_name()), "name")
        failed, error = asyncio.get_running_loop().create_future(), ValueError("probe")
        before = words(id(failed), 200)
        failed.set_exception(error)
        found["exception"] = find(id(failed), 200, id(error), "exception")
        changed = [n for n, word in enumerate(words(id(failed), 200)) if word != before[n] and word != id(error)]
        found["state"] = next(n for n in changed if n * WORD > found["exception"]) * WORD
        data = bytes_at(id(failed), 200)
        failed.exception()
        read = bytes_at(id(failed), 200)
        found["unread"] = next(n for n in range(16, 200) if (data[n], read[n]) == (1, 0))
        waited.set_result(None)
        await task

    asyncio.run(main())
    return found


def tracebacks() -> dict:
    """Return where an exception keeps its traceback, and a traceback its next entry, its code and its instruction."""

    def fail() -> None:
        raise ValueError("probe")

    try:
        fail()
    except ValueError as error:
        kept = error
    trace = kept.__traceback__
    assert trace is not None and trace.tb_next is not None
    frame = find(id(trace), 64, id(trace.tb_frame), "tb_frame")
    data, code = bytes_at(id(trace), frame + 32), id(trace.tb_frame.f_code)
    # A frame points to the interpreter's own one, which has the code.
    inner = next(n for n, word in enumerate(words(id(trace.tb_frame), 64)) if n > 1 and code in pointed(word))
    return {
        "traceback": find(id(kept), 100, id(trace), "traceback"),
        "next": find(id(trace), 64, id(trace.tb_next), "tb_next"),
        "frame": frame,
        "inner": inner * WORD,
        "code": pointed(words(id(trace.tb_frame), 64)[inner]).index(code) * WORD,
        "instruction": next(
            n for n in range(frame + WORD, frame + 24, 4) if int.from_bytes(data[n : n + 4], "little") == trace.tb_lasti
        ),
    }


def shared_keys() -> int:
    """Return where a class keeps the names of its instances' attributes."""

    class Probe:
        def __init__(self) -> None:
            self.clew_probe = 1

    kept = Probe()
    name = id(sys.intern("clew_probe"))
    for place, word in enumerate(words(id(type(kept)), 1000)):
        keys = pointed(word)
        if keys and 3 <= keys[1] & 0xFF <= 8:
            index_bytes = 1 << (keys[1] >> 8 & 0xFF)
            if pointed(word + 32 + index_bytes)[:1] == [name]:
                return place * WORD
    raise LookupError("shared keys")


def text_offset() -> int:
    """Return where an ASCII string keeps its characters."""
    word = "clewprobe" * 3
    data = b"".join(each.to_bytes(8, "little") for each in words(id(word), 96))
    return data.index(word.encode())


def offsets() -> dict:
    """Return all offsets. Raises LookupError, ValueError or AssertionError if this Python has another layout."""
    loop = asyncio.new_event_loop()
    try:
        return {
            "version": list(sys.version_info[:3]),
            "text": text_offset(),
            "shared_keys": shared_keys(),
            "runtime": runtime(),
            "frame": frames(loop),
            "task": tasks(),
            "traceback": tracebacks(),
        }
    finally:
        loop.close()


if __name__ == "__main__":
    print(json.dumps(offsets()))
