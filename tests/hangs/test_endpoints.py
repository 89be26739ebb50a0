"""Ends of pipes and sockets that processes wait for, in real processes and in snapshots made by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from clew.hang import endpoints, proc
from clew.hang.dumps import Merge
from clew.hang.judge import judge
from clew.hang.observed import Frame, Look, Process, Snapshot, Thread, snapshot_from
from clew.hang.verdict import Verdict
from tests.hangs.test_judge import rank

READS = "import os, sys; os.read(int(sys.argv[1]), 1)"
POLLS = "import select, sys; p = select.poll(); p.register(int(sys.argv[1]), select.POLLIN); p.poll()"


@contextmanager
def reading(descriptor: int, script: str = READS) -> Iterator[Process]:
    """Yield a process that reads or polls a descriptor of this one."""
    command = [sys.executable, "-c", script, str(descriptor)]
    with subprocess.Popen(command, pass_fds=[descriptor]) as program:
        deadline = time.monotonic() + 30
        while not endpoints.awaited(program.pid, [program.pid], {}) and time.monotonic() < deadline:
            time.sleep(0.02)
        threads = (Thread(name="MainThread", os_id=program.pid),)
        yield Process(pid=program.pid, looks=(Look(at=0.0, threads=threads),))
        program.kill()


pytestmark = pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the kernel hides system calls")


@pytest.mark.parametrize("script", [READS, POLLS])
def test_a_reader_of_a_pipe_waits_for_its_writer(script: str) -> None:
    reads, writes = os.pipe()
    here = Process(pid=os.getpid())
    with reading(reads, script) as one:
        os.close(reads)
        reader, writer = endpoints.with_ends([one, here], proc.sockets_of_machine())
    os.close(writes)
    ((thread, own, other),) = reader.awaits
    assert thread == one.pid and own.replace("r ", "w ") == other
    assert (reader.ends, writer.ends) == ((), (other,))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return server.accept()[0], theirs


@pytest.mark.parametrize("tcp", [False, True])
def test_a_reader_of_a_socket_waits_for_its_peer(tcp: bool) -> None:
    ours, theirs = tcp_pair() if tcp else socket.socketpair()
    with reading(theirs.fileno()) as one:
        theirs.close()
        reader, writer = endpoints.with_ends([one, Process(pid=os.getpid())], proc.sockets_of_machine())
        inode = os.fstat(ours.fileno()).st_ino
    ours.close()
    if not tcp and reader.awaits[0][2] == endpoints.UNKNOWN:
        pytest.skip("the kernel does not show the peers of Unix sockets")
    assert reader.awaits[0][2] == f"socket:[{inode}]" and writer.ends == (f"socket:[{inode}]",)


def test_what_nobody_has_read_of_a_socket_is_known() -> None:
    ours, theirs = socket.socketpair()
    with reading(theirs.fileno()) as one:
        here = Process(pid=os.getpid())
        before, _ = endpoints.with_ends([one, here], proc.sockets_of_machine())
        theirs.send(b"an answer")
        after, _ = endpoints.with_ends([one, here], proc.sockets_of_machine())
    ours.close()
    theirs.close()
    if after.awaits[0][2] == endpoints.UNKNOWN:
        pytest.skip("the kernel does not show the peers of Unix sockets")
    assert before.unread == () and after.unread == (after.awaits[0][1],)


def test_a_client_that_nobody_has_accepted_waits_for_whoever_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        with reading(theirs.fileno()) as one:
            theirs.close()
            reader, listener = endpoints.with_ends([one, Process(pid=os.getpid())], proc.sockets_of_machine())
        end = f"l socket:[{os.fstat(server.fileno()).st_ino}]"
    assert reader.awaits[0][2] == end and listener.ends == (end,) and not reader.ends


def test_the_child_is_known_whose_end_is_waited_for() -> None:
    script = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child, deadline = int(parent.stdout.readline()), time.monotonic() + 30
        while not (found := endpoints.awaited_child(parent.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
    assert found == child and endpoints.awaited_child(os.getpid()) == 0


def waiting(pid: int, parent: int, line: int, own: str, other: str, *ends: str) -> Process:
    """Return a process that reads one end and holds others, at a line of SOURCE (0: in a program outside SOURCE)."""
    frame = Frame(function="work", file="envs.py" if line else "<string>", line=line or 1)
    thread = Thread(name="MainThread", os_id=pid, frames=(frame,))
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(thread,)) for n in range(6))
    return Process(
        pid=pid, parent=parent, command=("python",), looks=looks, waits_in="anon_pipe_read",
        pipes=tuple({end[2:] for end in ends if "pipe" in end}), awaits=((pid, own, other),), ends=ends,
    )  # fmt: skip


def envs() -> list[Process]:
    """Return a main process with three workers, each with a program; the second worker and its program are stuck.

    Worker n has the socket 10 + n to main's socket 20 + n, the pipe 30 + n to its program, and 40 + n from it. Forks
    hold copies of the sockets of main.
    """
    found = [waiting(100, 1, 1, "socket:[21]", "socket:[11]", *(f"socket:[{n}]" for n in (10, 11, 12, 20, 21, 22)))]
    for n in range(3):
        ends = [f"socket:[{each}]" for each in (10, 11, 12, 20, 21, 22)] + [f"w pipe:[{30 + n}]", f"r pipe:[{40 + n}]"]
        awaited = (f"socket:[{10 + n}]", f"socket:[{20 + n}]")
        if n == 1:
            awaited = ("r pipe:[41]", "w pipe:[41]")
        found.append(waiting(101 + n, 100, 3 if n == 1 else 2, *awaited, *ends))
        held = (f"r pipe:[{30 + n}]", f"w pipe:[{40 + n}]")
        found.append(waiting(201 + n, 101 + n, 0, f"r pipe:[{30 + n}]", f"w pipe:[{30 + n}]", *held))
    return found


SOURCE = "answers = link.recv_bytes()\norder = link.recv_bytes()\nline = self.program.stdout.readline()\n"


def judged(processes: list[Process]) -> Verdict:
    return judge(Snapshot(processes=tuple(processes), seconds=3.0, sources={"envs.py": SOURCE}))


def test_an_idle_pair_beside_a_stuck_pair_is_not_blamed() -> None:
    verdict = judged(envs())
    assert (verdict.pattern, verdict.pids, verdict.sites) == ("external wait", (102, 202), ("envs.py:3",))
    assert "They wait for one another." in verdict.explanation


def test_a_socket_whose_peer_is_not_known_leads_to_no_program() -> None:
    unknown = [
        replace(each, awaits=tuple((n, own, "" if "socket" in own else other) for n, own, other in each.awaits))
        for each in envs()
    ]
    assert judged(unknown).pids == (102, 202)


def test_processes_whose_descriptors_were_not_seen_may_wait_for_one_another() -> None:
    pair = [replace(each, awaits=(), ends=()) for each in envs() if each.pid in (102, 202)]
    verdict = judged(pair)
    assert verdict.pids == (102, 202) and "They may wait for one another." in verdict.explanation


def test_idle_workers_of_a_waiting_rank_are_not_blamed() -> None:
    """Each worker holds copies of what its rank has for the workers before it, as after forks."""
    ours = [f"socket:[{20 + n}]" for n in range(3)]
    first = rank(0, 5, "all_reduce")
    workers = [
        waiting(201 + n, first.pid, 2, f"socket:[{10 + n}]", ours[n], f"socket:[{10 + n}]", *ours[: n + 1])
        for n in range(3)
    ]
    verdict = judged([replace(first, ends=tuple(ours)), rank(1, 8), *workers])
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (1,))


def test_reports_of_nodes_keep_who_waits_for_whom_when_they_are_merged() -> None:
    merge = Merge()
    for host in ("a", "b"):
        processes = tuple(replace(each, host=host, awaited_child=201) for each in envs())
        merge.add_text(json.dumps({"snapshot": Snapshot(processes=processes).as_dict()}))
    for one in merge.snapshot([]).processes:
        assert {thread for thread, _, _ in one.awaits} == {one.threads[0].os_id}
        assert one.awaited_child - one.pid in {201 - each.pid for each in envs()}


def test_the_ends_survive_json() -> None:
    snapshot = Snapshot(processes=tuple(envs()))
    assert snapshot_from(json.loads(json.dumps(snapshot.as_dict()))) == snapshot
