"""Reads Python objects in the memory of another process, which keeps running. Nothing is written or called there.

Only CPython 3.11 and 3.12 are supported. A value that changes meanwhile can be torn: expect `Unreadable`.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from clew.hang import proc

PAGE = 4096
MOST = 100_000
"""Number of entries above which a container is considered torn."""
MANAGED = 1 << 4
"""Flag of classes whose instances keep their attributes before the object (Py_TPFLAGS_MANAGED_DICT)."""
CALIBRATE_S = 20.0
VERSIONS = ((3, 11), (3, 12))


class Unreadable(Exception):
    """Raised when memory cannot be read, or does not hold what was expected."""


@lru_cache(maxsize=64)
def layout_of(program: str) -> dict[str, Any] | None:
    """Return the offsets that a Python program finds in itself; None if its version is not supported."""
    script = Path(__file__).with_name("python_layout.py")
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        # The program is started with the rights of the caller, so another user must not be able to replace it.
        if "python" not in Path(program).name or Path(program).stat().st_uid not in (0, os.getuid()):
            return None
        ended = subprocess.run(
            [program, "-I", "-S", str(script)], capture_output=True, text=True, timeout=CALIBRATE_S, check=True
        )
        found = json.loads(ended.stdout)
        return found if tuple(found["version"][:2]) in VERSIONS else None
    return None


class Memory:
    """Memory of one process. Each page is read only once, so all reads of it see the same bytes."""

    def __init__(self, pid: int) -> None:
        layout = layout_of(proc.link_of(proc.PROC / str(pid) / "exe"))
        if layout is None:
            raise Unreadable("unknown version of Python")
        self.pid, self.layout = pid, layout
        self.pages: dict[int, bytes] = {}
        self.is_312 = tuple(layout["version"][:2]) >= (3, 12)
        try:
            self.file = os.open(proc.PROC / str(pid) / "mem", os.O_RDONLY)
        except OSError as error:
            raise Unreadable(str(error)) from error

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)

    def bytes_at(self, address: int, size: int) -> bytes:
        """Return bytes. Raises Unreadable if they are not mapped."""
        if not 0 < address < 1 << 47 or not 0 <= size <= 8 * MOST:
            raise Unreadable(hex(address))
        data = b""
        for number in range(address // PAGE, (address + size - 1) // PAGE + 1):
            if number not in self.pages:
                try:
                    self.pages[number] = os.pread(self.file, PAGE, number * PAGE)
                except OSError as error:
                    raise Unreadable(hex(address)) from error
            data += self.pages[number]
        start = address % PAGE
        if len(data) < start + size:
            raise Unreadable(hex(address))
        return data[start : start + size]

    def word(self, address: int) -> int:
        """Return an unsigned word of 64 bits."""
        return int.from_bytes(self.bytes_at(address, 8), "little")

    def int32(self, address: int) -> int:
        """Return a signed number of 32 bits."""
        return int.from_bytes(self.bytes_at(address, 4), "little", signed=True)

    def count(self, address: int) -> int:
        """Return the size of a container. Raises Unreadable if it cannot be one."""
        size = self.word(address)
        if size > MOST:
            raise Unreadable("too many entries")
        return size

    def type_name(self, address: int) -> str:
        """Return the name of an object's class, without its module."""
        return self.full_type_name(address).rpartition(".")[2]

    def full_type_name(self, address: int) -> str:
        """Return the name of an object's class, with its module if the class is written in C."""
        # Offsets that 3.11 and 3.12 share are written out: an object's class is at 8, a class's tp_name at 24.
        name = self.bytes_at(self.word(self.word(address + 8) + 24), 80)
        return name.partition(b"\0")[0].decode(errors="replace")

    def text(self, address: int) -> str:
        """Return an ASCII string, or "<text>" for any other string. Raises Unreadable if it is no string."""
        if self.type_name(address) != "str":
            raise Unreadable("no string")
        if not self.bytes_at(address + 32, 1)[0] & 0x40:
            return "<text>"
        length = min(self.count(address + 16), 1000)
        return self.bytes_at(address + self.layout["text"], length).decode("ascii", "replace")

    def integer(self, address: int) -> int:
        """Return an int of up to 60 bits."""
        # 3.12 has the number of digits above three tag bits, whose value 2 means negative. In 3.11 it has the sign.
        tag = int.from_bytes(self.bytes_at(address + 16, 8), "little", signed=True)
        digits = tag >> 3 if self.is_312 else abs(tag)
        negative = (tag & 3) == 2 if self.is_312 else tag < 0
        if digits > 2:
            raise Unreadable("large number")
        value = sum(self.int32(address + 24 + 4 * n) << (30 * n) for n in range(digits))
        return -value if negative else value

    def items(self, address: int, most: int = MOST) -> list[int]:
        """Return the addresses in a tuple or list, or the first `most` of them."""
        kind = self.type_name(address)
        if kind not in ("tuple", "list"):
            raise Unreadable(f"{kind} is neither a tuple nor a list")
        start = address + 24 if kind == "tuple" else self.word(address + 24)
        return [self.word(start + 8 * n) for n in range(min(self.count(address + 16), most))]

    def members(self, address: int) -> Iterator[int]:
        """Yield the addresses in a set."""
        table, size = self.word(address + 40), self.count(address + 32) + 1
        entries = ((self.word(table + 16 * n), self.word(table + 16 * n + 8)) for n in range(size))
        return (key for key, digest in entries if key and digest != (1 << 64) - 1)

    def entries(self, address: int) -> Iterator[tuple[int, int]]:
        """Yield the addresses of keys and values of a dict."""
        return self._entries(self.word(address + 32), self.word(address + 40))

    def _entries(self, keys: int, values: int) -> Iterator[tuple[int, int]]:
        _, index_bytes, kind = self.bytes_at(keys + 8, 3)
        used = self.count(keys + 24)
        start = keys + 32 + (1 << min(index_bytes, 24))
        for n in range(used):
            if kind:  # only strings as keys: entries without the hash
                key, value = self.word(start + 16 * n), self.word(start + 16 * n + 8)
            else:
                key, value = self.word(start + 24 * n + 8), self.word(start + 24 * n + 16)
            if values:
                value = self.word(values + 8 * n)
            if key and value:
                yield key, value

    def named(self, address: int) -> dict[str, int]:
        """Return the addresses of a dict's values by key, for keys that are strings."""
        return {self.text(key): value for key, value in self.entries(address) if self.type_name(key) == "str"}

    def attributes(self, address: int) -> dict[str, int]:
        """Return the addresses of an instance's attributes by name; empty if it has none, or is an exception."""
        if not self.word(self.word(address + 8) + 168) & MANAGED:
            return {}
        # 3.12 has one word before the object, for the values if it is odd, else for a dict. 3.11 has a word for each.
        if self.is_312:
            tagged = self.word(address - 24)
            values, own = (tagged + 1, 0) if tagged & 1 else (0, tagged)
        else:
            values, own = self.word(address - 32), self.word(address - 24)
        if values:
            keys = self.word(self.word(address + 8) + self.layout["shared_keys"])
            return {self.text(key): value for key, value in self._entries(keys, values)}
        return self.named(own) if own else {}

    def module(self, name: str) -> dict[str, int]:
        """Return the addresses of a module's variables by name; empty if the process has not imported it."""
        found = self.modules.get(name)
        return self.named(self.word(found + 16)) if found else {}

    @cached_property
    def modules(self) -> dict[str, int]:
        """Return the addresses of the modules by name."""
        place = self.layout["runtime"]
        with (proc.PROC / str(self.pid) / "maps").open() as maps:
            starts = [int(line.partition("-")[0], 16) for line in maps if line.rstrip().endswith(" " + place["file"])]
        if not starts:
            raise Unreadable("no Python")
        interpreter = self.word(min(starts) + place["distance"] + place["interpreter"])
        return self.named(self.word(interpreter + place["modules"]))

    def show(self, address: int) -> str:
        """Return an object as text, as py-spy shows it."""
        kind = self.type_name(address)
        if kind == "NoneType":
            return "None"
        if kind == "bool":
            return str(bool(self.integer(address)))
        if kind == "int":
            return str(self.integer(address))
        if kind == "float":
            return repr(struct.unpack("<d", self.bytes_at(address + 16, 8))[0])
        if kind == "str":
            return repr(self.text(address))
        return f"<{kind} at 0x{address:x}>"
