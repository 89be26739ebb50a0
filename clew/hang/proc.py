"""Looks at processes through /proc: state, progress, parents and children, sockets, and what blocks them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
LISTENING, ESTABLISHED = "0A", "01"


def said_of(pid: int, name: str) -> str:
    """Return what /proc says of a process, such as its "stat". Raises OSError if it is gone or may not be read."""
    # A process may have any bytes as its name, also half a character: the kernel cuts names.
    return (PROC / str(pid) / name).read_text(errors="replace")


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status by name; empty if the process is gone."""
    with suppress(OSError):
        return dict(re.findall(r"^(\w+):[ \t]*(.*)$", said_of(pid, "status"), re.M))
    return {}


def pid_within(pid: int) -> int:
    """Return the pid that a process has in its own pid namespace, such as a container's."""
    return int(status_of(pid).get("NSpid", str(pid)).split()[-1])


def stat_of(pid: int) -> tuple[str, int, float] | None:
    """Return state, parent and CPU seconds of a process; None if it is gone."""
    if not (fields := _stat_fields(pid)):
        return None
    return fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, the state; [] if the process is gone."""
    with suppress(OSError):
        return said_of(pid, "stat").rpartition(") ")[2].split()
    return []


def exit_of(pid: int) -> str:
    """Return how a zombie has ended, such as "by signal 9"; empty if the process lives or is gone."""
    fields = _stat_fields(pid)
    if not fields or fields[0] not in "ZX":
        return ""
    status = int(fields[49])  # field 52 of proc(5), in the form of wait(2)
    killed = status & 0x7F
    return f"by signal {killed}" if killed else f"with exit code {status >> 8}"


def switches_of(pid: int) -> int:
    """Return the voluntary context switches of a process's main thread; 0 if they cannot be read."""
    return int(status_of(pid).get("voluntary_ctxt_switches", 0))


def ended_children_of(pid: int) -> tuple[float, int]:
    """Return CPU seconds and page faults of the children that a process has waited for; zeros if it is gone."""
    if not (fields := _stat_fields(pid)):
        return 0.0, 0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK"), int(fields[8])


def bytes_of(pid: int) -> tuple[int, int]:
    """Return the bytes that a process and its ended children have read and written; zeros if /proc hides them."""
    with suppress(OSError):
        found = dict(re.findall(r"^([rw])char: (\d+)", said_of(pid, "io"), re.M))
        return int(found.get("r", 0)), int(found.get("w", 0))
    return 0, 0


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it may not be read."""
    with suppress(OSError):
        entries = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return {}


def command_of(pid: int) -> tuple[str, ...]:
    """Return the command line of a process; empty if it is gone."""
    with suppress(OSError):
        return tuple((PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    return ()


def link_of(path: Path) -> str:
    """Return where a link in /proc points; empty if it cannot be read."""
    with suppress(OSError):
        return str(path.readlink())
    return ""


def all_pids() -> list[int]:
    """Return the pids of this machine, or of this container."""
    return sorted(int(path.name) for path in PROC.iterdir() if path.name.isdigit())


def children_of() -> dict[int, list[int]]:
    """Return the children of each process."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid in all_pids():
        if (stat := stat_of(pid)) is not None:
            children[stat[1]].append(pid)
    return children


def below(pids: list[int], without: int = 0) -> list[int]:
    """Return these processes and all their descendants, parents first, except process `without` and those below it."""
    children, found, waiting = children_of(), list[int](), list(pids)
    while waiting:
        pid = waiting.pop(0)
        if pid not in found and pid != without:
            found.append(pid)
            waiting += children[pid]
    return found


def blocked_in(pid: int) -> str:
    """Return the kernel function in which the main thread sleeps; "" if it runs, or if /proc does not say."""
    wchan = ""
    with suppress(OSError):
        wchan = said_of(pid, "wchan").strip()
    return "" if wchan == "0" else wchan


def descriptors_of(pid: int) -> list[str]:
    """Return where the open file descriptors of a process point."""
    try:
        return [link_of(path) for path in (PROC / str(pid) / "fd").iterdir()]
    except OSError:
        return []


def sockets_of_machine() -> dict[str, tuple[str, int, int]]:
    """Return state, local port and remote port of each TCP socket, by inode.

    Sockets without an inode (not accepted yet, or in TIME_WAIT) have the key `0 LOCAL REMOTE`, with their ports.
    """
    found: dict[str, tuple[str, int, int]] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                local, remote = (int(words[place].rpartition(":")[2], 16) for place in (1, 2))
                found[words[9] if words[9] != "0" else f"0 {local} {remote}"] = (words[3], local, remote)
    return found


def sockets_of(pid: int, machine: dict[str, tuple[str, int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ports on which a process listens, and the remote ports of its connections."""
    mine = [
        machine[found[1]]
        for link in descriptors_of(pid)
        if (found := re.match(r"socket:\[(\d+)\]", link)) and found[1] in machine
    ]
    listens = {local for state, local, _ in mine if state == LISTENING}
    return tuple(sorted(listens)), tuple(sorted({remote for state, _, remote in mine if state == ESTABLISHED}))


class FileLock(NamedTuple):
    """A lock on a file."""

    pid: int
    inode: int
    held: bool
    """True if that process has the lock, False if it waits for it."""
    taker: int = 0
    """Pid of the process that took the lock, and has closed the file since; 0 if this one took it."""


def locks_of_machine() -> list[FileLock]:
    found = []
    with suppress(OSError, ValueError, IndexError):
        for line in (PROC / "locks").read_text().splitlines():
            # 1: -> FLOCK  ADVISORY  WRITE 4711 08:02:1835 0 EOF; the arrow marks a waiting process
            words = [word for word in line.split()[1:] if word != "->"]
            found.append(FileLock(int(words[3]), int(words[4].rpartition(":")[2]), "->" not in line))
    return found


def with_heirs(locks: Sequence[FileLock], pids: Collection[int]) -> list[FileLock]:
    """Return the locks. One that its process has no longer open belongs to those of `pids` that inherited it.

    A lock by flock() belongs to the open file. A forked process shares it, and it lasts until both have closed it. A
    lock of an open file description (F_OFD_SETLK) names no process: it belongs to whoever has it.
    """
    shown = {pid: _locked_through(pid) for pid in {*pids, *(lock.pid for lock in locks)}} if locks else {}
    found = []
    for lock in locks:
        at = lock.pid, lock.inode
        kept = not lock.held or at in shown[lock.pid]
        taker = max(lock.pid, 0)
        heirs = [] if kept else [FileLock(pid, lock.inode, True, taker) for pid in pids if at in shown[pid]]
        found += heirs or [lock]
    return found


def _locked_through(pid: int) -> set[tuple[int, int]]:
    """Return the locks that the open descriptors of a process have: the pid that took each, and the file's inode."""
    said = (re.findall(r"^lock:.* (-?\d+) \w+:\w+:(\d+) ", text, re.M) for text in descriptors_info(pid).values())
    return {(int(taker), int(inode)) for each in said for taker, inode in each}


def descriptors_info(pid: int) -> dict[str, str]:
    """Return what the kernel says about each open descriptor of a process, by its number. No file is touched."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for path in (PROC / str(pid) / "fdinfo").iterdir():
            with suppress(OSError):
                found[path.name] = path.read_text()
    return found


def open_files_of(pid: int) -> set[int]:
    """Return the inodes of the files that a process has open (Linux 5.14 and newer)."""
    said = (re.search(r"^ino:\s*(\d+)", text, re.M) for text in descriptors_info(pid).values())
    return {int(each[1]) for each in said if each}


def pipes_of(pid: int, flags: int) -> set[str]:
    """Return the pipes that a process reads (os.O_RDONLY) or writes (os.O_WRONLY), other than its standard input."""
    said = {number: re.search(r"flags:\s*(\d+)", text) for number, text in descriptors_info(pid).items()}
    fitting = [n for n, each in said.items() if n != "0" and each and int(each[1], 8) & os.O_ACCMODE == flags]
    links = {link_of(PROC / str(pid) / "fd" / number) for number in fitting}
    return {link for link in links if link.startswith("pipe:")}


def writers_of(pipes: set[str]) -> list[int]:
    """Return the processes of this machine that can write to one of these pipes."""
    return [pid for pid in all_pids() if pipes_of(pid, os.O_WRONLY) & pipes] if pipes else []
