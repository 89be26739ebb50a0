"""NCCL's RAS: its answer, recorded on a GPU with NCCL 2.28.9, and what the judge makes of it."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from clew.hang.collect import describe
from clew.hang.gpus_and_nccl import RAS_VARIABLE, parse_ras, with_ras
from clew.hang.judge import judge
from clew.hang.observed import Launched, Process, Snapshot, snapshot_from
from clew.hang.reduce import reduced, to_judge
from tests.hangs.test_judge import judged, on_gpu, rank

ANSWER = """OK
{
  "nccl_version": "2.28.9",
  "communicators": [
    {
      "hash": "0xbb5f7baff6567995",
      "size": 3,
      "ranks": [
        {"rank": 0, "host": "127.0.0.1", "pid": %(pid)d,
          "collective_counts": {"Broadcast": 0, "AllReduce": 102}},
        {"rank": 1, "host": "127.0.0.1", "pid": 676,
          "collective_counts": {"Broadcast": 0, "AllReduce": 4}}
      ],
      "missing_ranks": [
        {
          "rank": 2,
          "host": "127.0.0.1",
          "pid": 697,
          "cuda_dev": 0,
          "nvml_dev": 0
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        }
      ]
    }
  ],
  "ras": {"collection_time_sec": 0.000, "timeouts_count": 0}
}
"""
"""Recorded answer, less the fields that nobody reads. The missing comma is NCCL's."""
TEXT = "NCCL version 2.24.3 compiled with CUDA 12.6\n\nJob summary\n"


class _Ras(socketserver.StreamRequestHandler):
    """Answers as NCCL does; one that knows no JSON gives an error."""

    def handle(self) -> None:
        asked = [line.strip() for line in iter(self.rfile.readline, b"verbose status\n")]
        answer: str = self.server.answer  # type: ignore[attr-defined]
        if asked and not answer.startswith("OK"):
            answer = "ERROR: unknown command\n"
        self.wfile.write(answer.encode())


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return a list; the processes that a test puts in are killed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for each in started:
        with each:
            each.kill()


def idle(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that sleeps, and wait until it runs: before, /proc may not have its environment."""
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def asked(answer: str, ranks: list[subprocess.Popen[bytes]]) -> Snapshot:
    """Return what RAS, at a port of the rank's own, says about one rank."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Ras) as server:
        environment = {**os.environ, RAS_VARIABLE: f"localhost:{server.server_address[1]}"}
        ranks.append(idle(environment))
        server.answer = answer.replace("%(pid)d", str(ranks[0].pid))  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            return with_ras(Snapshot(processes=(describe(ranks[0].pid),)))
        finally:
            server.shutdown()


def test_ras_is_asked_where_a_rank_has_it_listen(ranks) -> None:
    seen = asked(ANSWER, ranks)
    launched = Launched(communicator="0xbb5f7baff6567995", size=3, counts=(("AllReduce", 102), ("Broadcast", 0)))
    assert seen.processes[0].launched == (launched,)
    (line,) = seen.machine
    assert "AllReduce: rank 0: 102; rank 1: 4, rank 2 (pid 697) does not answer" in line


def test_a_nccl_that_knows_no_json_is_shown_as_it_answers(ranks) -> None:
    seen = asked(TEXT, ranks)
    assert seen.machine == ("NCCL: NCCL version 2.24.3 compiled with CUDA 12.6", "NCCL: Job summary")
    assert seen.processes[0].launched == ()


ODD = ['{"communicators": [{"hash": 1}]}', '{"communicators": 7}', ANSWER.replace("102", "null"), '{"a":' * 100_000]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", *ODD], ids=range(8))
def test_an_answer_that_is_something_else_says_nothing(text) -> None:
    assert parse_ras(text) == ([], [])


@pytest.mark.parametrize("address", ["", "nowhere", "localhost:", "localhost:99999", "[::1]:1", "localhost:²", "..:1"])
def test_an_address_at_which_nothing_can_listen_says_nothing(ranks, address) -> None:
    environment = {**os.environ, RAS_VARIABLE: address}
    ranks.append(idle(environment))
    assert with_ras(Snapshot(processes=(describe(ranks[0].pid),))).machine == ()


def test_two_names_of_one_listener_are_asked_once_each_and_counted_once(ranks) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Ras) as server:
        for host in ("localhost", "127.0.0.1"):
            environment = {**os.environ, RAS_VARIABLE: f"{host}:{server.server_address[1]}"}
            ranks.append(idle(environment))
        server.answer = ANSWER.replace("%(pid)d", str(ranks[0].pid))  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = with_ras(Snapshot(processes=tuple(describe(each.pid) for each in ranks)))
        server.shutdown()
    assert [len(each.launched) for each in seen.processes] == [1, 0] and len(seen.machine) == 1


def test_a_pid_of_two_nodes_is_left_out(ranks) -> None:
    twice = ANSWER.replace("676", "%(pid)d")
    assert asked(twice, ranks).processes[0].launched == ()


def launched(process: Process, size: int = 3, **counts: int) -> Process:
    return replace(process, launched=(Launched(communicator="0x1", size=size, counts=tuple(sorted(counts.items()))),))


def test_a_rank_that_came_to_the_barrier_by_fewer_calls_is_at_fault() -> None:
    ranks = [launched(rank(n, 9, "barrier", world=3), AllReduce=4 if n == 1 else 102) for n in range(3)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (1,))
    assert "rank 0, 2: 102 AllReduce; rank 1: 4 AllReduce" in verdict.explanation
    assert judged(*ranks[:2], replace(ranks[2], launched=())).pattern == "same collective everywhere"  # not all seen


@pytest.mark.parametrize(("line", "counts", "pattern", "odd"), [
    (15, (102, 4, 102), "cleanup deadlock", (1,)),
    (15, (4, 4, 102), "collective mismatch", (2,)),  # the one that is ahead has not failed
    (9, (102, 4, 102), "collective mismatch", (1,)),
])  # fmt: skip
def test_a_rank_that_came_to_its_cleanup_by_fewer_calls_is_in_a_cleanup_deadlock(line, counts, pattern, odd) -> None:
    ranks = [launched(rank(n, line, "barrier", world=3), AllReduce=count) for n, count in enumerate(counts)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks, verdict.structural) == (pattern, odd, False)


def test_a_rank_that_waits_in_another_communicator_is_not_the_one_that_is_missing() -> None:
    def both(number: int, line: int, tp: int, world: int) -> Process:
        counts = (("0x1", 4, world), ("0x2" if number > 1 else "0x3", 2, tp))
        each = tuple(Launched(communicator=name, size=n, counts=(("AllReduce", k),)) for name, n, k in counts)
        return replace(on_gpu(number, line), world=4, launched=each)

    verdict = judged(both(0, 11, 8, 5), both(1, 11, 8, 5), both(2, 11, 8, 4), both(3, 10, 7, 4))
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (3,))


def test_ranks_that_wait_for_their_gpus_have_launched_other_collectives() -> None:
    ranks = [launched(replace(on_gpu(n), world=3), AllReduce=5, Broadcast=n == 2) for n in range(3)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (2,))
    alike = [launched(replace(on_gpu(n), world=3), AllReduce=5) for n in range(3)]
    assert judged(*alike).pattern == "undetermined"


def test_a_rank_that_waits_for_its_gpu_elsewhere_and_has_launched_less_is_the_one_that_is_missing() -> None:
    behind = launched(on_gpu(1, line=11), size=2, AllReduce=4)
    verdict = judged(launched(on_gpu(0), size=2, AllReduce=5), behind)
    assert (verdict.pattern, verdict.ranks, verdict.sites) == ("missing rank", (1,), ("train.py:11",))


def test_what_ranks_have_launched_travels_in_a_report() -> None:
    seen = Snapshot(
        processes=tuple(launched(rank(n, 9, "barrier", world=5), size=5, AllReduce=n % 2) for n in range(5))
    )
    again = snapshot_from(json.loads(json.dumps(reduced(seen).as_dict())))
    assert {each.rank: each.launched for each in to_judge(again).processes} == {
        each.rank: each.launched for each in seen.processes
    }
    assert judge(to_judge(again)).ranks == (1, 3)
