"""Judging processes that wait for programs without Python, with snapshots made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clew.hang.judge import Verdict, judge
from clew.hang.observed import Frame, Look, Process, Snapshot, Thread
from clew.hang.roles import with_ranks
from tests.hangs.test_judge import SCRIPT, rank

WAITS = """import subprocess
def build():
    return subprocess.run("cc -c kernel.c; true", shell=True)
while program.poll() is None:
    time.sleep(1)
"""


def waits_for_program(line: int = 3, call: str = "_try_wait", **known) -> Process:
    """Return a rank that waits for a child process at a line of WAITS, in each of six looks."""
    library = [Frame(function=f"Popen.{call}", file="/usr/lib/python3.12/subprocess.py", line=1)] if call else []
    thread = Thread(name="MainThread", os_id=100, frames=(*library, Frame(function="build", file="w.py", line=line)))
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(thread,)) for n in range(6))
    waits = "do_wait" if call else "hrtimer_nanosleep"
    process = Process(pid=100, rank=0, world=2, looks=looks, waits_in=waits, command=("python",))
    return replace(process, **known)


def program(pid: int, parent: int, name: str, *, state: str = "S", **per_s: float) -> Process:
    """Return a native program with rank 0's environment, seen in six looks; `per_s` is how fast its counters rise."""
    error = "no Python was found in this process (state S, 0.0 s of CPU time)"
    looks = []
    for at in (0.5 * n for n in range(6)):
        counters = {each: at * rise if each.endswith("_s") else int(at * rise) for each, rise in per_s.items()}
        looks.append(Look(at=at, state=state, error=error, **counters))  # type: ignore[arg-type]
    return Process(pid=pid, parent=parent, rank=0, world=2, looks=tuple(looks), command=(f"/usr/bin/{name}", "-c"))


def judged_with(*programs: Process, waiting: Process | None = None) -> Verdict:
    every = (waiting or waits_for_program(), rank(1, 9, "barrier"), *programs)
    return judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": SCRIPT, "w.py": WAITS}))


@pytest.mark.parametrize(
    ("rises", "words"),
    [
        ({"cpu_s": 0.98}, "whose child cc1 (pid 202) computes: 0.98 s of CPU time per second"),
        ({"cpu_s": 0.02, "state": "R"}, "whose child cc1 (pid 202) computes: 0.02 s of CPU time per second"),
        ({"read": 20_000, "written": 20_000}, "whose child cc1 (pid 202) moves data: 40,000 bytes per second"),
        ({"children_cpu_s": 0.6, "children_faults": 900}, "whose child cc1 (pid 202) computes: 0.60 s"),
    ],
)
def test_a_rank_is_slow_while_the_program_that_its_child_has_started_works(rises, words) -> None:
    verdict = judged_with(program(201, 100, "sh"), program(202, 201, "cc1", **rises))
    assert (verdict.pattern, verdict.ranks, verdict.exit_code) == ("slow", (0,), 0)
    assert f"waits for sh (pid 201), {words}" in verdict.explanation
    assert not verdict.notes, "a program without Python is no process that could not be read"


@pytest.mark.parametrize(
    "rises",
    [
        {},
        {"cpu_s": 0.01, "switches": 200},
        {"written": 60},
        {"children_cpu_s": 0.1, "children_faults": 9_000, "read": 600_000},  # a shell that calls `sleep` in a loop
        {"state": "D"},
    ],
)
def test_a_rank_is_at_fault_while_the_program_that_it_waits_for_does_nothing(rises) -> None:
    verdict = judged_with(program(201, 100, "sh", **{**rises, "state": "S"}), program(202, 201, "head", **rises))
    assert verdict.exit_code != 0
    if rises.get("state") != "D":
        assert (verdict.pattern, verdict.ranks, verdict.sites) == ("external wait", (0,), ("w.py:3",))


def test_a_rank_that_polls_a_program_that_computes_is_slow_and_one_that_sleeps_beside_it_is_not() -> None:
    busy = program(201, 100, "cc1", cpu_s=0.98)
    assert judged_with(busy, waiting=waits_for_program(5, "")).pattern == "slow"
    assert judged_with(busy, waiting=rank(0, 8)).pattern == "missing rank"


def test_a_pipe_counts_only_if_the_program_that_computes_has_it() -> None:
    reads = waits_for_program(call="", waits_in="anon_pipe_read", pipes=("pipe:[1]",))
    busy = program(201, 100, "cc1", cpu_s=0.98)
    assert judged_with(replace(busy, pipes=("pipe:[1]",)), waiting=reads).pattern == "slow"
    assert judged_with(replace(busy, pipes=("pipe:[2]",)), waiting=reads).pattern == "external wait"


def test_a_python_program_below_a_shell_is_a_child_of_the_one_that_started_the_shell() -> None:
    inner = waits_for_program(4, "", pid=300, parent=201, looks=rank(200, 8).looks)
    found = with_ranks((waits_for_program(), program(201, 100, "sh"), inner), {})
    assert [(each.pid, each.parent, role) for each, role in found] == [
        (100, 0, "rank"), (201, 100, "idle"), (300, 100, "other"),
    ]  # fmt: skip


def test_a_program_that_works_beside_the_child_that_is_awaited_does_not_count() -> None:
    idle = replace(rank(1, 9), pid=300, parent=100, rank=None, world=None)
    busy = program(201, 100, "raylet", cpu_s=0.4)
    assert judged_with(busy).exit_code == 0
    assert judged_with(busy, idle).exit_code != 0, "it may be either"
    assert judged_with(busy, idle, waiting=waits_for_program(awaited_child=201)).exit_code == 0
    assert judged_with(busy, waiting=waits_for_program(awaited_child=300)).exit_code != 0
