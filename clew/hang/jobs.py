"""Finds the processes of a job: below a launcher, beside a given process, or of any torch job of this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from clew.errors import LaunchError
from clew.hang import proc
from clew.hang.roles import LAUNCHER


def python(pid: int) -> bool:
    """Return whether a process looks like Python."""
    target = proc.link_of(proc.PROC / str(pid) / "exe") or " ".join(proc.command_of(pid)[:1])
    return "python" in target.rpartition("/")[2]


def job_key(pid: int) -> tuple[str, str] | None:
    """Return what the ranks of one job share: the address and port at which they meet; None outside a torch job."""
    environment = proc.environment_of(pid)
    if "RANK" not in environment or "MASTER_PORT" not in environment:
        return None
    return environment.get("MASTER_ADDR", ""), environment["MASTER_PORT"]


def with_peers(pids: Sequence[int]) -> list[int]:
    """Return all processes of the jobs that these belong to: descendants, other ranks, and local servers they talk to.

    Raises:
        LaunchError: One of them does not exist.
    """
    for pid in pids:
        if proc.stat_of(pid) is None:
            raise LaunchError(f"Cannot look at process {pid}: there is no such process on this machine.")
    found = proc.below(list(pids))
    keys = {key for pid in found if (key := job_key(pid)) is not None}
    # All ranks of a launcher are below it: others with the same port belong to another launch.
    if keys and not {*pids} & {*launchers()}:
        ranks = [pid for pid in proc.all_pids() if pid not in found and job_key(pid) in keys]
        found += [pid for pid in proc.below(ranks) if pid not in found]
    machine = proc.sockets_of_machine()
    wanted = {port for pid in found for port in proc.sockets_of(pid, machine)[1]}
    serving = {inode for inode, (state, local, _) in machine.items() if state == proc.LISTENING and local in wanted}
    if serving:
        links = {f"socket:[{inode}]" for inode in serving}
        servers = [pid for pid in proc.all_pids() if pid not in found and links & set(proc.descriptors_of(pid))]
        found += [pid for pid in proc.below(servers) if pid not in found]
    return found


def of_job(name: str) -> list[int]:
    """Return the processes on this machine of the torch job that meets at an address and port.

    Raises:
        LaunchError: There is none.
    """
    if found := listed().get(name):
        return found
    raise LaunchError(f"Cannot look at the job {name}: no process here has that MASTER_ADDR and MASTER_PORT.")


def listed() -> dict[str, list[int]]:
    """Return the torch jobs of this machine: the address at which the ranks meet, and the pids of the ranks."""
    jobs: dict[str, list[int]] = defaultdict(list)
    for pid in proc.all_pids():
        if (key := job_key(pid)) is not None and python(pid):
            jobs[":".join(key)].append(pid)
    return dict(jobs)


def launchers() -> list[int]:
    """Return the launchers of torch jobs on this machine, which may have started no rank yet."""
    return [
        pid
        for pid in proc.all_pids()
        if LAUNCHER.search(" ".join(proc.command_of(pid)[:4])) and python(pid) and job_key(pid) is None
    ]
