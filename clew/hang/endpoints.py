"""Finds the processes at the other end of the pipe or socket that a thread reads, writes or polls at the moment.

Two processes can share several pipes. Only the descriptor in the system call says which of them a thread waits for.
"""

from __future__ import annotations

import os
import platform
import re
import select
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from clew.hang.observed import Process
from clew.hang.proc import ESTABLISHED, LISTENING, PROC, link_of, said_of

READING = {"x86_64": (0, 19, 45, 47), "aarch64": (63, 65, 207, 212)}
"""Numbers of the system calls read, readv, recvfrom and recvmsg, whose first argument is the descriptor."""
WRITING = {"x86_64": (1, 20, 44, 46), "aarch64": (64, 66, 206, 211)}
"""Numbers of the system calls write, writev, sendto and sendmsg."""
POLLING = {"x86_64": (7, 271), "aarch64": (73,)}
"""Numbers of the system calls poll and ppoll, whose arguments are an array of `struct pollfd` and its length. Python
calls them for sockets with a timeout, `multiprocessing.connection.wait` and `subprocess.communicate`."""
POLLED = 16
"""Maximum number of descriptors in a poll. A call that polls more is not looked at."""
WAITING = {"x86_64": 61, "aarch64": 260}
"""Number of the system call wait4, whose first argument is the child; -1 means any."""
UNKNOWN = ""
"""Other end of a socket whose peer could not be found."""
SOCK_DIAG, BY_FAMILY, DUMP_REQUEST = 4, 20, 0x301
DONE, ERROR = 3, 2
PEER, QUEUED = 2, 4
"""Attributes UNIX_DIAG_PEER and UNIX_DIAG_RQLEN of the kernel's answer. The bits 1 << PEER and 1 << QUEUED ask for them
(UDIAG_SHOW_PEER and UDIAG_SHOW_RQLEN)."""
ANSWER_S = 1.0

Awaited = tuple[int, str, str]
"""Thread, the end that it reads, writes or polls, and the other end; see `Process.awaits`."""


def with_ends(processes: Sequence[Process], machine: Mapping[str, tuple[str, int, int]]) -> list[Process]:
    """Return processes with the ends that their threads await, the awaited ends that they hold, and awaited children.

    Args:
        processes: The processes, all on this machine.
        machine: TCP sockets, from `proc.sockets_of_machine`.
    """
    peers, unread = peers_of_sockets(machine)
    threads = ([thread.os_id for thread in each.threads if not thread.task] for each in processes)
    awaits = [awaited(each.pid, every, peers) for each, every in zip(processes, threads, strict=True)]
    wanted = {end for every in awaits for _, _, end in every if end}
    return [
        replace(
            process,
            awaits=every,
            ends=ends_of(process.pid, wanted),
            unread=tuple(sorted({own for _, own, other in every if other in unread})),
            awaited_child=awaited_child(process.pid),
        )
        for process, every in zip(processes, awaits, strict=True)
    ]


def awaited_child(pid: int) -> int:
    """Return the pid of the child whose exit the main thread waits for; 0 for none, for any, or if /proc hides it."""
    with suppress(OSError, ValueError, IndexError):
        words = said_of(pid, f"task/{pid}/syscall").split()
        if int(words[0]) == WAITING.get(platform.machine()):
            child = int(words[1], 16) & 0xFFFFFFFF
            return child if child < 1 << 31 else 0
    return 0


def awaited(pid: int, threads: Iterable[int], peers: Mapping[str, str]) -> tuple[Awaited, ...]:
    """Return the pipes and sockets that threads read, write or poll; a thread that /proc hides has no entry.

    Args:
        pid: The process.
        threads: Numbers of its threads.
        peers: The other end of each socket, from `peers_of_sockets`.
    """
    found: list[Awaited] = []
    for thread in threads:
        with suppress(OSError, ValueError, IndexError, struct.error):
            words = said_of(pid, f"task/{thread}/syscall").split()  # "running" if it is in no system call
            for number, reads in _descriptors(pid, int(words[0]), int(words[1], 16), int(words[2], 16)):
                link = link_of(PROC / str(pid) / "fd" / str(number))
                if link.startswith("pipe:"):
                    found.append((thread, *((f"r {link}", f"w {link}") if reads else (f"w {link}", f"r {link}"))))
                elif link.startswith("socket:"):
                    found.append((thread, link, peers.get(link, UNKNOWN)))
    return tuple(found)


def _descriptors(pid: int, call: int, first: int, second: int) -> list[tuple[int, bool]]:
    """Return the descriptors that a system call with these arguments waits for, and whether it reads each.

    Raises:
        OSError: The memory of the process cannot be read.
    """
    machine = platform.machine()
    if call in POLLING.get(machine, ()) and second <= POLLED:
        with (PROC / str(pid) / "mem").open("rb", buffering=0) as memory:
            memory.seek(first)
            polled = struct.iter_unpack("=ihh", memory.read(8 * second))  # descriptor, events, events that came
            return [(number, bool(events & select.POLLIN)) for number, events, _ in polled if number >= 0]
    reads = call in READING.get(machine, ())
    return [(first & 0xFFFFFFFF, reads)] if reads or call in WRITING.get(machine, ()) else []


def ends_of(pid: int, wanted: set[str]) -> tuple[str, ...]:
    """Return which of the wanted ends a process has open, such as `r pipe:[1]`, `socket:[2]` or `l socket:[3]`."""
    links, found = {end.rpartition(" ")[2] for end in wanted}, set[str]()
    with suppress(OSError):
        for path in (PROC / str(pid) / "fd").iterdir() if wanted else ():
            link = link_of(path)
            if link not in links:
                continue
            found |= {link, f"l {link}"}
            with suppress(OSError):
                flags = re.search(r"flags:\s*(\d+)", said_of(pid, f"fdinfo/{path.name}"))
                mode = int(flags[1], 8) & os.O_ACCMODE if flags else os.O_RDWR
                found |= {f"r {link}"} if mode != os.O_WRONLY else set()
                found |= {f"w {link}"} if mode != os.O_RDONLY else set()
    return tuple(sorted(found & wanted))


def peers_of_sockets(machine: Mapping[str, tuple[str, int, int]]) -> tuple[dict[str, str], set[str]]:
    """Return the other end of each connected socket, and the Unix sockets that hold what nobody has read.

    The other end is known if it is on this machine and the kernel reports it. As long as nobody has accepted a
    connection, it is the socket that listens: `l socket:[1]`.
    """
    ports = {(local, remote): inode for inode, (state, local, remote) in machine.items() if state == ESTABLISHED}
    listening = {local: inode for inode, (state, local, _) in machine.items() if state == LISTENING}
    found, unread = dict[str, str](), set[str]()
    for (local, remote), inode in ports.items():
        other = ports.get((remote, local), "")
        if other.isdigit():
            found[f"socket:[{inode}]"] = f"socket:[{other}]"
        elif other and remote in listening:
            found[f"socket:[{inode}]"] = f"l socket:[{listening[remote]}]"
    with suppress(OSError, struct.error, AttributeError):  # no netlink, or a kernel without UNIX_DIAG
        for one, (other, queued) in _unix_sockets().items():
            found[f"socket:[{one}]"] = f"socket:[{other}]"
            unread |= {f"socket:[{one}]"} if queued else set()
    return found, unread


def _unix_sockets() -> dict[int, tuple[int, int]]:
    """Return the peer of each connected Unix socket, and how many bytes it could read now, by inode.

    /proc/net/unix lists neither.

    Raises:
        OSError: The kernel does not answer.
    """
    found: dict[int, tuple[int, int]] = {}
    every = 0xFFFFFFFF
    # struct unix_diag_req: family, protocol, padding, states, inode, what to show, cookie
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, every, 0, 1 << PEER | 1 << QUEUED, every, every)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_S)
        kernel.send(struct.pack("=IHHII", 16 + len(request), BY_FAMILY, DUMP_REQUEST, 1, 0) + request)
        while True:
            data, at = kernel.recv(1 << 16), 0
            while at + 16 <= len(data):
                size, kind = struct.unpack_from("=IH", data, at)
                if kind in (DONE, ERROR) or size < 16:
                    return found
                inode = struct.unpack_from("=I", data, at + 20)[0]
                place = at + 32  # after the header, and struct unix_diag_msg
                shown = dict[int, int]()
                while place + 8 <= at + size:
                    length, name = struct.unpack_from("=HH", data, place)
                    if name in (PEER, QUEUED):
                        shown[name] = struct.unpack_from("=I", data, place + 4)[0]
                    place += max(4, (length + 3) & ~3)
                if PEER in shown:
                    found[inode] = shown[PEER], shown.get(QUEUED, 0)
                at += (size + 3) & ~3
