"""torch's flight recorder: read from ranks that run, and compared between ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clew.hang.flight import calls_of, parse_record
from clew.hang.judge import judge
from clew.hang.observed import Call, Process, Snapshot, snapshot_from
from clew.hang.reduce import reduced, to_judge
from clew.launch.ranks import rank_variables
from clew.processes import SOCKET_VARIABLE, free_port
from tests.hangs.test_judge import judged, rank

JOINED = """
import time
from torch import distributed as dist
from clew.training.ranks import Ranks
with Ranks.joined() as ranks:
    time.sleep(600 * ranks.rank)
    print("ready", flush=True)
    dist.all_reduce(__import__("torch").ones(3, 2))
"""


def call(number: int, op: str = "all_reduce", sizes: str = "[[4]]", ended: bool = True, group: str = "world") -> Call:
    return Call(group=group, number=number, op=op, sizes=sizes, ended=ended)


def with_calls(process: Process, *calls: Call) -> Process:
    return replace(process, calls=calls)


def test_the_ranks_of_a_trainer_serve_what_they_have_called(tmp_path: Path) -> None:
    port, sockets = free_port(), [str(tmp_path / f"{n}.sock") for n in (0, 1)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOINED],
            env={**os.environ, **rank_variables(n, 2, port), SOCKET_VARIABLE: sockets[n]},
            stdout=subprocess.PIPE,
        )
        for n in (0, 1)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stdout.readline()
        deadline = time.monotonic() + 30
        while len(first := calls_of(sockets[0])) < 2:
            assert time.monotonic() < deadline, first
            time.sleep(0.05)
        second = calls_of(sockets[1])
    finally:
        for each in ranks:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
    assert first == (call(1, "barrier", "[]"), call(2, sizes="[[3, 2]]", ended=False))
    assert second == first[:1]


def test_a_socket_without_a_server_gives_no_calls(tmp_path: Path) -> None:
    assert calls_of("") == calls_of(str(tmp_path / "none.sock")) == ()


@pytest.mark.parametrize("text", ["[]", "nonsense", '{"entries": [1]}', '{"entries": [{"is_p2p": false}]}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_record(text)


def test_ranks_in_one_collective_that_came_there_by_other_calls_have_parted() -> None:
    same = (call(1), call(2), call(3, ended=False))
    other = (call(1), call(2, "broadcast"), call(3, ended=False))
    ranks = [with_calls(rank(n, 5, "all_reduce", world=3), *(other if n == 1 else same)) for n in range(3)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (1,))
    assert "at call 2 of group world: rank 0, 2: all_reduce of [4]; rank 1: broadcast of [4]" in verdict.explanation


def test_calls_that_are_the_same_change_no_verdict() -> None:
    ranks = [with_calls(rank(n, 5, "all_reduce"), call(1), call(2, ended=False)) for n in (0, 1)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("same collective everywhere", ())
    assert any("rank 0-1: in call 2, all_reduce of [4]" in line for line in verdict.evidence)


def test_a_missing_rank_is_told_with_its_last_call() -> None:
    waiting = with_calls(rank(0, 5, "all_reduce"), call(1), call(2, ended=False))
    verdict = judged(waiting, with_calls(rank(1, 8), call(1)))
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (1,))
    assert any("rank 1: past call 1" in line for line in verdict.evidence)


def test_a_rank_that_came_by_other_calls_is_not_represented_by_one_in_the_same_place() -> None:
    same, other = (call(1), call(2, ended=False)), (call(1, "broadcast"), call(2, ended=False))
    ranks = [with_calls(rank(n, 5, "all_reduce", world=8), *(other if n == 6 else same)) for n in range(8)]
    seen = reduced(Snapshot(processes=tuple(ranks), seconds=3.0))
    assert 6 in {process.rank for process in seen.processes} and len(seen.processes) == 3
    assert judge(to_judge(seen)).ranks == (6,)


def test_calls_travel_in_a_report() -> None:
    seen = Snapshot(processes=(with_calls(rank(0, 5, "all_reduce"), call(1, ended=False)),))
    assert snapshot_from(json.loads(json.dumps(seen.as_dict()))).processes == seen.processes
