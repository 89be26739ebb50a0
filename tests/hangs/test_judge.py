"""Judging and merging, with snapshots made by hand."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.hang import equal_stacks, source
from clew.hang.activity import C10D, JOBS, Activity, Place, activity_of, group_of, new_group_members, receiver
from clew.hang.advice import AGAIN, UNLESS
from clew.hang.counters import WAITING_NAMES
from clew.hang.engines import answers
from clew.hang.examine import enough, just_stopped
from clew.hang.judge import Verdict, judge
from clew.hang.observed import Frame, Group, Inside, Look, Process, Snapshot, Thread, snapshot_from
from clew.hang.reduce import reduced, to_judge
from clew.hang.report import Report
from clew.hang.roles import waits_for_work, with_ranks
from clew.hang.verdict import Actor
from clew.hang.waits_for import application_edges, sinks

SCRIPT = """import torch.distributed as dist
tp = dist.new_group([0, 1])
dp = dist.new_group(ranks=list(range(0, world_size, 2)))
def train(step):
    dist.all_reduce(x)
    dist.all_reduce(x, group=tp)
    dist.recv(x, src=1)
    time.sleep(1000)
    dist.barrier()
    total = loss.item()
    norm = total_norm.item()
    try:
        train(step)
    finally:
        dist.barrier()
    while True:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            compute(x)
"""


def rank(number: int, line: int, op: str = "", *, world: int = 2, state: str = "S", **values: str) -> Process:
    """Return a rank whose main thread is at a line of SCRIPT, within an operation of torch, in each of six looks."""
    user = Frame(function="train", file="train.py", line=line, locals={"step": "3"})
    torch = [Frame(function=op, file=f"/x/{C10D}", line=1, locals=values)] if op else []
    thread = Thread(name="MainThread", os_id=100 + number, frames=(*torch, user))
    looks = tuple(Look(at=0.5 * n, state=state, switches=7, threads=(thread,)) for n in range(6))
    waits = "hrtimer_nanosleep" if not op else "futex_do_wait"
    return Process(pid=100 + number, rank=number, world=world, looks=looks, waits_in=waits, command=("python",))


STILL = rank(0, 8).looks
"""Six looks at a rank that does not move."""


def judged(*ranks: Process) -> Verdict:
    return judge(Snapshot(processes=ranks, seconds=3.0, sources={"train.py": SCRIPT}))


def test_a_rank_that_sleeps_is_at_fault() -> None:
    verdict = judged(rank(0, 5, "all_reduce"), rank(1, 8))
    assert (verdict.pattern, verdict.ranks, verdict.sites) == ("missing rank", (1,), ("train.py:8",))
    assert verdict.exit_code == 1


def test_a_healthy_job_names_the_rank_that_all_others_wait_for() -> None:
    def training(number: int, line: int, op: str = "") -> Process:
        process = rank(number, line, op)
        looks = []
        for n, look in enumerate(process.looks):
            *inner, user = look.threads[0].frames
            frames = (*inner, replace(user, locals={"step": str(n)}))
            looks.append(replace(look, threads=(replace(look.threads[0], frames=frames),), switches=n))
        return replace(process, looks=tuple(looks))

    late = judged(training(0, 5, "all_reduce"), training(1, 18))
    assert late.pattern == "healthy" and "waited for rank 1 in a collective" in late.explanation
    assert "at train.py:18 in 6 of 6 looks" in late.explanation
    for even in ((5, "all_reduce"), (18, "")):
        assert "waited for" not in judged(training(0, *even), training(1, *even)).explanation


@pytest.mark.parametrize(
    "code, seconds, pattern",
    [
        ("for step in range(9):\n    work(step)\n    time.sleep(40)", "", "slow"),
        ("for each in rows:\n    work()\n    time.sleep(pause)", "12.5", "slow"),
        ("for each in rows:\n    work()\n    time.sleep(pause)", "3600", "missing rank"),
        ("for _ in range(600):\n    if done(): break\n    time.sleep(5)", "", "missing rank"),
        ("PAUSE = 40\nwork()\ntime.sleep(PAUSE)", "", "slow"),
        ("def load():\n    if done(): return\n    time.sleep(40); load()", "", "missing rank"),
        ("class A(B):\n  def load(self):\n    time.sleep(40); super().load()", "", "slow"),
        ("for each in rows:\n    work()\n    time.sleep(pause)", "", "missing rank"),
        ("while not ready():\n    work()\n    time.sleep(40)", "", "missing rank"),
        ("try:\n    work()\nexcept OSError: time.sleep(40)", "", "missing rank"),
    ],
)
def test_a_rank_in_one_short_sleep_is_slow(code: str, seconds: str, pattern: str) -> None:
    frame = Frame(function="load", file="load.py", line=3, locals={"pause": seconds})
    looks = tuple(replace(look, threads=(Thread(name="MainThread", os_id=101, frames=(frame,)),)) for look in STILL)
    late = replace(rank(1, 8), looks=looks)
    for op in ("all_reduce", "init_process_group"):
        snapshot = Snapshot(
            processes=(rank(0, 5, op), late), seconds=3.0, sources={"train.py": SCRIPT, "load.py": code}
        )
        expected = pattern if op == "all_reduce" or pattern == "slow" else "initialisation"
        assert (judge(snapshot).pattern, judge(snapshot).ranks) == (expected, (1,))


@pytest.mark.parametrize("other_line, pattern", [(4, "external wait"), (2, "slow")])
def test_a_main_thread_that_sleeps_does_not_hide_two_threads_that_lock_each_other_out(
    other_line: int, pattern: str
) -> None:
    text = "with a:\n    b.acquire()\nwith b:\n    a.acquire()\ntime.sleep(60)\n"
    threads = [
        main_in(at(5, "<module>")),
        Thread(name="one", os_id=101, frames=(at(2, "one"),)),
        Thread(name="two", os_id=102, frames=(at(other_line, "two"),)),
    ]
    assert watched(text, *[threads] * 6).pattern == pattern


def test_a_list_that_is_made_anew_in_each_round_does_not_grow() -> None:
    text = "for row in rows:\n    a = [go(x) for x in row]\n    b = [go(x) for x in row]\n    b.append(1)\n"
    assert source.made_anew(text, 2) == {"len(a)"}
    assert source.made_anew("a = [go(x) for x in row]", 1) == frozenset()
    assert source.made_anew("while jobs:\n    jobs = [job for job in jobs if not job.done()]\n", 2) == frozenset()


@pytest.mark.parametrize("event, pattern", [("stop", "slow"), ("batch_ready", "rollout blocked")])
def test_a_coroutine_that_sleeps_until_it_is_told_to_stop_is_slow(event: str, pattern: str) -> None:
    text = (
        f"async def main():\n    while True:\n        refresh()\n        await asyncio.wait_for({event}.wait(), 25)\n"
    )
    frames = (within("wait_for", "asyncio/tasks.py", timeout="25"), at(4, "main"))
    task = Thread(name="task Task-1", os_id=0, task=True, at=1, frames=frames)
    assert watched(text, *[[main_in(*LOOP), task]] * 6).pattern == pattern


def on_gpu(number: int, line: int = 10) -> Process:
    """Return a rank that keeps a core busy while it waits for its GPU, as CUDA does."""
    one = rank(number, line, state="R")
    looks = tuple(replace(look, cpu_s=look.at) for look in one.looks)
    return replace(one, looks=looks, gpus=("/dev/nvidia0",), waits_in="")


def test_a_rank_that_waits_for_its_gpu_may_wait_for_the_others_and_is_never_called_slow() -> None:
    verdict = judged(on_gpu(0), rank(1, 8))
    assert (verdict.pattern, verdict.ranks, verdict.sites) == ("missing rank", (1,), ("train.py:8",))
    for ranks in ((on_gpu(0), on_gpu(1)), (on_gpu(0), rank(1, 9, "barrier")), (replace(on_gpu(0), rank=None),)):
        verdict = judged(*ranks)
        assert (verdict.pattern, verdict.ranks, verdict.confidence) == ("undetermined", (), "low")
        assert "waits for its GPU at train.py:10" in verdict.explanation and "cuda-gdb -p 100" in verdict.next
    without = replace(on_gpu(0), gpus=(), rank=None)
    assert "computes at train.py:10" in judged(without).explanation


def test_only_the_missing_members_of_a_new_group_are_at_fault() -> None:
    making = [rank(n, 3, "new_group", world=4, ranks="[0, 1, 3]") for n in (0, 1)]
    verdict = judged(*making, rank(2, 5, "all_reduce", world=4), rank(3, 5, "all_reduce", world=4))
    assert (verdict.pattern, verdict.ranks) == ("initialisation", (3,))
    unknown = [rank(n, 3, "new_group", world=4, ranks="<range at 0x7f3c12>") for n in (0, 1)]
    assert judged(*unknown, rank(2, 5, "all_reduce", world=4), rank(3, 5, "all_reduce", world=4)).ranks == (2, 3)


@pytest.mark.parametrize(("tag", "blamed"), [("self.version", (1,)), ("7", (0, 1))])
def test_of_two_ranks_with_different_versions_as_tags_the_later_one_is_at_fault(
    tag: str, blamed: tuple[int, ...]
) -> None:
    """A constant says nothing about who is further on."""
    code = f"dist.send(x, dst=1, tag={tag})\ndist.recv(x, src=0, tag={tag})\n"
    ranks = rank(0, 1, "send", dst="1", tag="31"), rank(1, 2, "recv", src="0", tag="32")
    verdict = judge(Snapshot(processes=ranks, seconds=3.0, sources={"train.py": code}))
    assert (verdict.pattern, verdict.ranks) == ("send/receive cycle", blamed)
    assert "Their tags differ: 31 and 32." in verdict.explanation


def test_ranks_that_all_receive_in_different_loops_expect_different_numbers_of_messages() -> None:
    source = "for _ in range(n):\n    dist.recv(x, src=0)\nfor _ in range(n):\n    dist.recv(x, src=1)\n"

    def receiving(number: int, line: int, src: int) -> Process:
        return rank(number, line, "recv", src=f"{src}")

    branches = "if rank == 0:\n    for _ in range(n):\n        dist.recv(x, 1)\nelse:\n    for _ in range(n):\n        "
    branches += "dist.recv(x, 0)\n"
    apart = judge(Snapshot(processes=(receiving(0, 3, 1), receiving(1, 6, 0)), sources={"train.py": branches}))
    assert apart.pattern == "send/receive cycle"  # no rank has left a loop: each is in its own branch
    verdict = judge(Snapshot(processes=(receiving(0, 4, 1), receiving(1, 2, 0)), sources={"train.py": source}))
    assert (verdict.pattern, verdict.ranks) == ("pipeline micro-batch mismatch", (0, 1))
    assert "Rank 0 has left the loop at train.py:1. Rank 1 is still in it." in verdict.explanation


def test_a_rank_that_has_left_the_loop_of_a_function_is_at_fault() -> None:
    """Let rank 0 train in the loop of `epoch`, which rank 1 has left."""
    code = "def fit():\n    epoch()\n    report()\ndef epoch():\n    for batch in data:\n        step(batch)\n"
    code += "def report():\n    dist.all_gather(parts, x)\ndef step(batch):\n    dist.all_reduce(batch)\n"
    again = "def fit():\n  for n in range(9):\n    epoch()\n    report()\n" + code.partition("    report()\n")[2]

    def called(number: int, op: str, *places: tuple[str, int], n: int = 0) -> Process:
        one = rank(number, 5, op)
        frames = [one.looks[0].threads[0].frames[0]]
        frames += [Frame(function=name, file="train.py", line=line, locals={"n": f"{n}"}) for name, line in places]
        thread = Thread(name="MainThread", os_id=100 + number, frames=tuple(frames))
        return replace(one, looks=tuple(replace(look, threads=(thread,)) for look in one.looks))

    trains = called(0, "all_reduce", ("step", 10), ("epoch", 6), ("fit", 2))
    reports = called(1, "all_gather", ("report", 8), ("fit", 3))
    verdict = judge(Snapshot(processes=(trains, reports), seconds=3.0, sources={"train.py": code}))
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (1,))
    assert "Rank 1 has left the loop at train.py:5. Rank 0 is still in it." in verdict.explanation
    reports = called(1, "all_gather", ("report", 9), ("fit", 4), n=3)
    for n, ranks in ((3, (1,)), (4, (0, 1))):  # in the next round, rank 0 may have left the report out
        trains = called(0, "all_reduce", ("step", 11), ("epoch", 7), ("fit", 3), n=n)
        verdict = judge(Snapshot(processes=(trains, reports), seconds=3.0, sources={"train.py": again}))
        assert (verdict.pattern, verdict.ranks) == ("collective mismatch", ranks)


def test_an_idle_worker_that_a_rank_has_forked_is_idle_although_it_has_the_ranks_groups() -> None:
    """An idle actor of Ray is none: it has made its groups itself, and the other ranks may wait for it."""
    groups = Inside(groups=(Group(at=1, name="world", rank=0, members=(0, 1)),))
    worker = within("get", "multiprocessing/queues.py"), within("worker", "multiprocessing/pool.py")
    actor = Frame(function="main_loop", file="/x/site-packages/ray/_private/worker.py", line=1)
    assert waits_for_work(below(101, *worker, inside=groups)) and waits_for_work(below(101, actor))
    assert not waits_for_work(below(101, actor, inside=groups))


def test_a_job_that_has_ended_does_not_hang() -> None:
    def ended(number: int, code: str) -> Process:
        return replace(rank(number, 8, state="Z"), exit=f"with exit code {code}" if code else "")

    assert judged(ended(0, "0"), ended(1, "0")).pattern == "healthy"
    assert (judged(ended(0, ""), ended(1, "0")).pattern, judged(ended(0, "")).exit_code) == ("undetermined", 3)
    assert (judged(ended(0, "0"), ended(1, "1")).pattern, judged(ended(0, "1")).exit_code) == ("dead", 1)
    assert judged(rank(0, 5, "all_reduce"), ended(1, "0")).pattern == "dead"
    killed = judged(rank(0, 5, "all_reduce"), replace(ended(1, "1"), exit="by signal 9"))
    assert killed.pattern == "dead" and killed.next.startswith("Check whether the kernel killed it")
    helper = replace(rank(1, 8), rank=None, command=("resource_tracker",), pid=99)
    assert judged(replace(ended(0, "0"), rank=None), helper).pattern == "dead"
    half = Snapshot(processes=(ended(0, "0"), ended(1, "0")), unseen=(2, 3), notes=("node2 did not answer",))
    assert judge(half).pattern != "healthy" and judge(half).notes == half.notes


def test_a_loop_whose_deadline_moves_is_slow_and_one_that_computes_past_it_is_not() -> None:
    def computing(*until: float) -> Process:
        looks = []
        for n, value in enumerate(until):
            frame = Frame(function="train", file="train.py", line=19, locals={"until": f"{value}"})
            thread = Thread(name="MainThread", os_id=101, active=True, frames=(frame,))
            looks.append(Look(at=0.5 * n, state="R", switches=7, cpu_s=0.5 * n, threads=(thread,)))
        return replace(rank(1, 19), looks=tuple(looks), waits_in="")

    waiting = rank(0, 5, "all_reduce")
    moves, stays = computing(1.5, 1.5, 3.5, 3.5, 5.5, 5.5), computing(1.5, 1.5, 1.5, 1.5, 1.5, 1.5)
    assert (judged(waiting, moves).pattern, judged(waiting, moves).ranks) == ("slow", (1,))
    assert "its deadline until (in ms) went from 3500 to 5500" in judged(waiting, moves).explanation
    assert judged(waiting, stays).pattern == "cpu"


def test_a_group_waits_only_for_its_members() -> None:
    ranks = [rank(n, 9, "barrier", world=4) for n in (0, 1)]
    ranks += [rank(2, 5, "all_reduce", world=4), rank(3, 8, world=4)]
    assert judged(*ranks).ranks == (3,)
    pair = [rank(0, 6, "all_reduce", world=3), rank(1, 8, world=3), rank(2, 9, "barrier", world=3)]
    assert judged(*pair).ranks == (1,)


def test_a_rank_that_moves_and_that_nobody_waits_for_does_not_make_the_others_slow() -> None:
    looks = tuple(
        replace(look, threads=tuple(replace(t, frames=(at(19, step=str(n)),)) for t in look.threads))
        for n, look in enumerate(rank(2, 19, world=3, state="R").looks)
    )
    moves = replace(rank(2, 19, world=3, state="R"), looks=looks)
    verdict = judged(rank(0, 7, "recv", world=3, src="1"), rank(1, 6, "all_reduce", world=3), moves)
    assert verdict.exit_code == 1 and set(verdict.ranks) <= {0, 1}
    assert judged(rank(0, 5, "all_reduce", world=3), rank(1, 5, "all_reduce", world=3), moves).pattern == "slow"


def test_two_ranks_in_different_collectives_are_a_mismatch() -> None:
    verdict = judged(rank(0, 5, "all_reduce"), rank(1, 9, "barrier"))
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (0, 1))


def test_the_rank_in_the_rarer_collective_is_at_fault() -> None:
    ranks = [rank(n, 5, "all_reduce", world=4) for n in (0, 1, 3)]
    assert judged(*ranks, rank(2, 9, "barrier", world=4)).ranks == (2,)


@pytest.mark.parametrize(
    "keeps, guard, ranks, confidence",
    [
        ("self.got[name] = x", "with timer", (2,), "high"),
        ("self.other[name] = x", "with timer", (0,), "medium"),
        ("if mine(name): self.got[name] = x", "with timer", (0,), "medium"),
        ("self.got[name] = x", "if rank == 0", (0,), "high"),
    ],
)
def test_a_source_that_waits_for_one_that_left_out_its_broadcast_is_not_alone_for_that(
    keeps: str, guard: str, ranks: tuple[int, ...], confidence: str
) -> None:
    text = f"for name in names:\n    dist.broadcast(x, src=0)\n    {keeps}\n{guard}:\n    dist.broadcast(x, src=0)\n"
    others = [
        with_locals(rank(n, 6, "all_gather", world=3), **{"len(self.got)": length})
        for n, length in ((1, "10"), (2, "9"))
    ]
    source = rank(0, 5, "broadcast", world=3, src="0")
    sources = {"train.py": text + "dist.all_gather(xs, x)\n"}
    verdict = judge(Snapshot(processes=(source, *others), seconds=3.0, sources=sources))
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", ranks)
    assert verdict.confidence == confidence
    assert ("Or the others have received theirs in broadcast" in verdict.explanation) is (confidence == "medium")
    assert ("rank 2 has received less than others in broadcast" in verdict.explanation.lower()) is (ranks == (2,))


def test_one_collective_everywhere_blames_no_rank() -> None:
    verdict = judged(rank(0, 5, "all_reduce"), rank(1, 5, "all_reduce"))
    assert (verdict.pattern, verdict.ranks) == ("same collective everywhere", ())


def test_ranks_in_different_steps_of_one_collective_have_drifted_apart() -> None:
    other = rank(1, 5, "all_reduce")
    frames = (other.threads[0].frames[0], replace(other.threads[0].frames[1], locals={"step": "4"}))
    looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in other.looks)
    verdict = judged(rank(0, 5, "all_reduce"), replace(other, looks=looks))
    assert verdict.pattern == "collective mismatch"


def test_ranks_that_are_half_a_step_ahead_and_half_behind_are_all_named() -> None:
    ranks = []
    for number, step in enumerate("5566"):
        one = rank(number, 5, "all_reduce", world=4)
        frames = (one.threads[0].frames[0], replace(one.threads[0].frames[1], locals={"step": step}))
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in one.looks)
        ranks.append(replace(one, looks=looks))
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (0, 1, 2, 3))


def test_one_collective_with_other_sizes_is_a_shape_mismatch() -> None:
    sizes = ("[4]", "[4]", "[5]")
    ranks = [rank(n, 5, "all_reduce", world=3, **{"shape(tensor)": size}) for n, size in enumerate(sizes)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("shape mismatch", (2,))


def test_one_broadcast_from_other_sources_is_a_mismatch() -> None:
    verdict = judged(rank(0, 5, "broadcast", src="0"), rank(1, 5, "broadcast", src="1"))
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (0, 1))
    assert verdict.restart in verdict.explanation and "again" in verdict.restart


def test_a_pair_that_names_other_sources_is_at_fault_and_not_those_who_wait_for_it() -> None:
    def one(number: int, line: int, source: str) -> Process:
        values = {"src": source} if source else {}
        made = rank(number, line, "broadcast" if source else "all_gather", world=4, **values)
        pair = Group(at=64, name="5", members=(0, 1) if number < 2 else (2, 3), rank=number % 2)
        inner, user = made.threads[0].frames
        frames = (replace(inner, addresses={"group": 64} if source else {}), user)
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in made.looks)
        return replace(made, looks=looks, inside=Inside(groups=(pair,)))

    pair = [one(0, 6, "1"), one(1, 6, "0")]
    for others in ([one(2, 5, ""), one(3, 5, "")], [one(2, 6, "3"), one(3, 6, "3")]):
        verdict = judged(*pair, *others)
        assert (verdict.pattern, verdict.ranks, verdict.sites) == ("collective mismatch", (0, 1), ("train.py:6",))
        assert "they name different roots: 1 on rank 0, 0 on rank 1" in verdict.explanation
    alike = judged(one(0, 6, "1"), one(1, 6, "1"), one(2, 5, ""), one(3, 5, ""))
    assert (alike.pattern, alike.ranks) == ("same collective everywhere", ())


@pytest.mark.parametrize("skip, pattern", [("continue", "collective mismatch"), ("", "crossed groups")])
def test_a_rank_that_may_have_left_a_group_out_has_not_gone_through_the_groups_in_another_order(
    skip: str, pattern: str
) -> None:
    first = "if not rows: continue" if skip else "prepare(rows)"
    text = f"for kind, rows in buckets.items():\n    {first}\n    dist.all_reduce(rows, group=made[kind])\n"
    groups = tuple(Group(at=at, name=str(at), members=(0, 1, 2)) for at in (64, 65))
    every = []
    for number in range(3):
        made = rank(number, 3, "all_reduce", world=3)
        inner, user = made.threads[0].frames
        frames = (replace(inner, addresses={"group": 65 if number == 2 else 64}), user)
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in made.looks)
        every.append(replace(made, looks=looks, inside=Inside(groups=groups)))
    verdict = judge(Snapshot(processes=tuple(every), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == (pattern, (2,))


def test_a_rank_that_calls_in_world_what_its_group_calls_in_that_group_is_at_fault() -> None:
    def of_pair(number: int) -> Process:
        made = rank(number, 6, "all_gather", world=4)
        inner, user = made.threads[0].frames
        frames = (replace(inner, addresses={"group": 64}), user)
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in made.looks)
        return replace(made, looks=looks, inside=Inside(groups=(Group(at=64, name="5", members=(2, 3), rank=0),)))

    beside = [rank(0, 5, "all_reduce", world=4), rank(1, 5, "all_reduce", world=4)]
    verdict = judged(*beside, of_pair(2), rank(3, 6, "all_gather", world=4))
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (3,))
    assert "at the same line" in verdict.explanation
    elsewhere = judged(*beside, of_pair(2), rank(3, 9, "all_gather", world=4))
    assert "at the same line" not in elsewhere.explanation


@pytest.mark.parametrize("shared, line", [(True, 2), (False, 5)])
def test_a_sleeping_thread_that_ranks_in_a_collective_have_too_explains_no_wait(shared: bool, line: int) -> None:
    text = (
        "def serve():\n    requests.get()\ndef control():\n    while True:\n        sleep()\n        requests.put(1)\n"
    )
    polls = Thread(name="control", os_id=7, frames=(at(5, "control"),))
    gets = (within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"), at(2, "serve"))

    def with_threads(one: Process, main: Thread, *others: Thread) -> Process:
        return replace(one, looks=tuple(replace(look, threads=(main, *others)) for look in one.looks))

    inside = rank(0, 9, "broadcast")
    inside = with_threads(inside, inside.threads[0], *([polls] if shared else []))
    waits = with_threads(rank(1, 2), Thread(name="MainThread", os_id=101, frames=gets), polls)
    verdict = judge(Snapshot(processes=(inside, waits), seconds=3.0, sources={"train.py": text}))
    assert (verdict.ranks, verdict.sites) == ((1,), (f"train.py:{line}",))


def in_library(one: Process, *inner: tuple[str, str]) -> Process:
    """Return the process with frames of a library, such as ("/selectors.py", "select"), within its user's frame."""
    library = tuple(Frame(function=name, file=f"/usr/lib/python3.11{file}", line=1) for file, name in inner)
    frames = (*library, one.threads[0].frames[-1])
    looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in one.looks)
    return replace(one, looks=looks, waits_in="ep_poll")


def test_a_rank_that_serves_while_the_others_wait_for_it_is_missing() -> None:
    serving = in_library(rank(1, 8), ("/selectors.py", "select"), ("/socketserver.py", "serve_forever"))
    verdict = judged(rank(0, 5, "broadcast", src="0"), serving)
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (1,))
    assert "waits for requests or events at train.py:8" in verdict.explanation


READS = "def read(sock):\n    return sock.recv(4)\ndef serve(sock):\n    read(sock)\ndef pull(sock):\n    read(sock)\n"


def reading(pid: int, caller: str, line: int, **more: Any) -> Process:
    """Return a process that reads from a socket in a function that others call, too."""
    frames = tuple(Frame(function=name, file="net.py", line=at) for name, at in (("read", 2), (caller, line)))
    looks = (Look(at=0.0, state="S", threads=(Thread(name="MainThread", os_id=pid, frames=frames),)),)
    return Process(pid=pid, looks=looks * 6, waits_in="wait_woken", command=("python",), **more)


def test_two_processes_that_read_from_each_other_hang_again() -> None:
    pull = reading(101, "pull", 6, peers=(8000,), awaits=((101, "socket:[1]", "socket:[2]"),), ends=("socket:[1]",))
    serve = reading(102, "serve", 4, listens=(8000,), awaits=((102, "socket:[2]", "socket:[1]"),), ends=("socket:[2]",))
    verdict = judge(Snapshot(processes=(pull, serve), sources={"net.py": READS}))
    assert (verdict.pattern, verdict.pids, verdict.restart) == ("external wait", (101, 102), AGAIN)
    assert verdict.next == "py-spy dump --locals --pid 102"
    alone = judge(Snapshot(processes=(pull,), sources={"net.py": READS}))
    assert (alone.pattern, alone.pids, alone.restart) == ("external wait", (101,), UNLESS)
    assert alone.next.startswith("ss -tnp | grep 'pid=101,'")
    paused = judge(Snapshot(processes=(pull, replace(serve, answers={"is_paused": "true"})), sources={"net.py": READS}))
    assert paused.pids == (102,) and paused.next.startswith("Resume the engine")


def test_the_callers_of_a_line_that_two_processes_share_are_named_if_they_are_on_the_main_threads() -> None:
    pull = reading(101, "pull", 6, awaits=((101, "socket:[1]", "socket:[2]"),), ends=("socket:[1]",))
    serve = reading(102, "serve", 4, awaits=((102, "socket:[2]", "socket:[1]"),), ends=("socket:[2]",))
    verdict = judge(Snapshot(processes=(pull, serve), sources={"net.py": READS}))
    assert verdict.sites == ("net.py:2", "net.py:4", "net.py:6")
    assert "Pid 101 was called there by pull at net.py:6. Pid 102 was called there by serve at" in verdict.explanation


def test_a_blocked_event_loop_that_waits_for_a_coroutine_of_its_own_says_so() -> None:
    text = "def load(self):\n    job = run_coroutine_threadsafe(fetch(), self.loop)\n    job.result()\n"

    def at(function: str, file: str, line: int = 1) -> Frame:
        return Frame(function=function, file=file, line=line)

    runs = (at("Handle._run", "/usr/lib/python3.11/asyncio/events.py"),)
    runs += (at("BaseEventLoop._run_once", "/usr/lib/python3.11/asyncio/base_events.py"),)
    result = at("Future.result", "/usr/lib/python3.11/concurrent/futures/_base.py")
    main = Thread(name="MainThread", os_id=100, frames=(result, at("load", "train.py", 3), *runs))
    other = Thread(name="loop", os_id=101, frames=runs)
    for threads, own in (((main,), True), ((main, other), False)):
        process = Process(pid=100, command=("python",), looks=(Look(at=0.0, state="S", threads=threads),) * 6)
        verdict = judge(Snapshot(processes=(process,), sources={"train.py": text}))
        assert verdict.pattern == "event loop blocked"
        assert ("given to this same loop" in verdict.explanation) is own


@pytest.mark.parametrize("blocks, pattern", [(True, "event loop blocked"), (False, "rollout blocked")])
def test_a_loop_that_blocks_in_a_thread_decides_although_the_main_thread_waits_for_a_result_too(
    blocks: bool, pattern: str
) -> None:
    text = "def call(self, job):\n    return run_coroutine_threadsafe(job, self.loop).result()\nscore()\n"
    result = (within("Condition.wait", "threading.py"), within("Future.result", "concurrent/futures/_base.py"))
    runs = (within("Handle._run", "asyncio/events.py"), within("_run_once", "asyncio/base_events.py"))
    inside = (*result, at(2, "call"), *runs) if blocks else (within("select", "selectors.py"), runs[1])
    looks = [
        main_in(*result, at(2, "call"), at(3, "<module>")),
        Thread(name="gateway", os_id=101, frames=inside),
        Thread(name="pool_0", os_id=102, frames=(*result, at(2, "call"), within("_worker", JOBS["_worker"]))),
    ]
    verdict = watched(text, *[looks] * 6)
    assert (verdict.pattern, verdict.sites) == (pattern, ("train.py:2",))
    job = Thread(name="pool_0", os_id=102, frames=(at(3, "score"), within("_worker", JOBS["_worker"])))
    busy = watched(
        "def call(self, job):\n    return pool.submit(job).result()\ntime.sleep(40)\n", *[[*looks[:2], job]] * 6
    )
    assert (busy.pattern, busy.sites) == ("slow", ("train.py:3",))


def test_a_rank_that_awaits_a_message_when_its_peers_are_through_is_to_be_looked_at_first() -> None:
    ranks = [rank(0, 9, "barrier", world=3), rank(1, 9, "barrier", world=3), rank(2, 7, "recv", src="0", world=3)]
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("pipeline micro-batch mismatch", (0, 2))
    assert "Rank 1 has come to barrier, too" in verdict.explanation
    assert "look at rank 2 first" in verdict.explanation


@pytest.mark.parametrize(
    "passed, over, turn, ranks",
    [
        ("4434", "range(n)", "3", (2,)),
        ("4443", "range(n)", "3", (3,)),
        ("4434", "range(n)", "1", (0, 1, 2, 3)),  # nobody was through yet
        ("4440", "range(n)", "3", (0, 1, 2, 3)),  # such as a stage that receives nothing
        ("4434", "range(9)", "3", (0, 1, 2, 3)),
        ("4444", "range(n)", "3", (0, 1, 2, 3)),
        ("1234", "range(n)", "3", (0, 1, 2, 3)),
        ("4433", "range(n)", "3", (0, 1, 2, 3)),
    ],
)
def test_the_rank_that_alone_passes_another_number_of_rounds_to_an_exchange_is_at_fault(
    passed: str, over: str, turn: str, ranks: tuple[int]
) -> None:
    text = "def send(self):\n    ops = [dist.P2POp(dist.isend, x, self.to), dist.P2POp(dist.irecv, y, self.frm)]\n"
    text += "    self.reqs = dist.batch_isend_irecv(ops)\ndef wait(self):\n    for r in self.reqs:\n        r.wait()\n"
    text += "for step in range(9):\n    out = ring(q, blocks)\n    dist.all_reduce(x)\n"
    text += f"def ring(q, n):\n    for i in {over}:\n        wait()\n"
    job = []
    for number, value in enumerate(passed):
        waits = (at(6, "wait"), at(12, "ring", n=value, i=turn))
        inside = waits if number % 2 else (Frame(function="all_reduce", file=f"/x/{C10D}", line=1),)
        line = at(8 if number % 2 else 9, "<module>", blocks=value, step="3", rank=str(number))
        thread = Thread(name="MainThread", os_id=100 + number, frames=(*inside, line))
        looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(thread,)) for n in range(6))
        job.append(replace(rank(number, 5, world=4), looks=looks))
    verdict = judge(Snapshot(processes=tuple(job), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("pipeline micro-batch mismatch", ranks), verdict.explanation
    pair = judged(rank(0, 9, "barrier"), rank(1, 7, "recv", src="0"))
    assert pair.pattern == verdict.pattern and "first" not in pair.explanation


def test_a_rank_that_holds_a_lock_in_a_collective_hangs_again() -> None:
    holds = replace(rank(0, 5, "all_reduce"), files=("7",))
    waits = replace(rank(1, 8), waits_in="flock_lock_inode_wait", wants=("7",))
    assert (judged(holds, waits).pattern, judged(holds, waits).restart) == ("lock or I/O", AGAIN)
    assert judged(replace(holds, files=()), waits).restart == UNLESS


def test_a_server_that_nobody_calls_is_idle_unless_its_own_coroutine_waits_for_a_semaphore() -> None:
    loop = in_library(rank(0, 8), ("/selectors.py", "select"), ("/asyncio/base_events.py", "run_forever"))
    idle = replace(loop, rank=None, world=None, listens=(8000,))
    assert judged(idle).pattern == "healthy"
    locks = Frame(function="Semaphore.acquire", file="/usr/lib/python3.11/asyncio/locks.py", line=1)
    task = Thread(name="task Task-2", os_id=0, task=True, waiter="Future", frames=(locks, loop.threads[0].frames[-1]))
    looks = tuple(replace(look, threads=(*look.threads, task)) for look in idle.looks)
    assert judged(replace(idle, looks=looks)).pattern == "rollout blocked"


SERVES = """thread.join()
threading.Event().wait()
weights.wait()
job = jobs.get()
async def answer(reader, writer):
    await reader.readline()
    await upstream.readline()
server = asyncio.start_server(answer, port)
while True:
    connection = listener.accept()
    while text := connection.recv():
        connection.send(text)
text = connection.recv()
"""


@pytest.mark.parametrize(
    "main, other, pattern",
    [
        (("Thread.join", "threading.py", 1), None, "healthy"),
        (("Thread.join", "threading.py", 1), ("Queue.get", "queue.py", 4), "rollout blocked"),
        (("Event.wait", "threading.py", 2), ("Queue.get", "queue.py", 4), "healthy"),
        (("Event.wait", "threading.py", 3), None, "rollout blocked"),
        (("_shutdown", "threading.py", 0), None, "healthy"),
        (("Connection.recv", "multiprocessing/connection.py", 11), None, "healthy"),
        (("Connection.recv", "multiprocessing/connection.py", 13), None, "external wait"),
        (("run_forever", "asyncio/base_events.py", 8), ("read", "asyncio/streams.py", 6), "healthy"),
        (("run_forever", "asyncio/base_events.py", 8), ("read", "asyncio/streams.py", 7), "external wait"),
    ],
)
def test_a_service_whose_threads_all_wait_for_requests_is_idle(
    main: tuple[str, str, int], other: tuple[str, str, int] | None, pattern: str
) -> None:
    def frames(name: str, file: str, line: int) -> tuple[Frame, ...]:
        return (within(name, file), at(line, "answer" if "streams" in file else "<module>"))[: 2 if line else 1]

    asyncio, connected = "asyncio" in main[1], main[0] in ("Connection.recv", "run_forever")
    selects = (within("select", "selectors.py"),)
    threads = [Thread(name="MainThread", os_id=100, frames=(*selects * asyncio, *frames(*main)))]
    if not connected:
        serves = (*selects, within("serve_forever", "socketserver.py"))
        threads.append(Thread(name="Thread-1 (serve_forever)", os_id=101, frames=serves))
    if other:
        waiter = "Future" if asyncio else ""
        threads.append(Thread(name="Other", os_id=102, task=asyncio, waiter=waiter, frames=frames(*other)))
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=tuple(threads)) for n in range(6))
    service = Process(pid=100, looks=looks, listens=(8000,), peers=(50001,) * connected, waits_in="futex_do_wait")
    assert judge(Snapshot(processes=(service,), seconds=3.0, sources={"train.py": SERVES})).pattern == pattern


@pytest.mark.parametrize(
    "ended, error, idle",
    [
        ("", "", True),
        ("Thread-3 (process_request_thread)", "", True),
        ("Thread-2 (refill)", "", False),
        ("", "ValueError: empty batch", False),
    ],
)
def test_a_service_of_which_a_part_has_ended_is_not_idle(ended: str, error: str, idle: bool) -> None:
    serves = (within("select", "selectors.py"), within("serve_forever", "socketserver.py"))
    threads = (
        Thread(name="MainThread", os_id=100, frames=(within("Thread.join", "threading.py"), at(1, "<module>"))),
        Thread(name="Thread-1 (serve_forever)", os_id=101, frames=serves),
    )
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=threads) for n in range(6))
    service = Process(pid=100, looks=looks, listens=(8000,), waits_in="futex_do_wait", old_error=error)
    service = replace(service, inside=Inside(ended_threads=(ended,) * bool(ended)))
    verdict = judge(Snapshot(processes=(service,), seconds=3.0, sources={"train.py": SERVES}))
    assert (verdict.pattern == "healthy") is idle


ROUNDS = """for step in range(9):
    time.sleep(0.2)
while True:
    time.sleep(30)
time.sleep(3600)
both[0].join()
"""


@pytest.mark.parametrize(
    "asks, sets, pids",
    [
        ("board.get('scored') < due", "board.set('scored', due)", (101, 102)),
        ("self.board.scored < due", "self.board.scored = due", (101, 102)),
        ("board['scored'] < due", "board['scored'] = due", (101, 102)),
        ("board['todo'] < 1", "board['scored'] = due", (100,)),
        ("not glob('jobs/*')", "board.set('scored', due)", (100,)),  # it waits for work of its parent
        ("not scored(due)", "board.set('scored', due)", (100,)),
    ],
)
def test_children_that_poll_for_one_another_are_no_idle_workers(asks: str, sets: str, pids: tuple[int, ...]) -> None:
    text = (
        f"def save():\n    while True:\n        while {asks}:\n            sleep()\n        board.set('saved', due)\n"
        f"def score():\n    while True:\n        while board.get('saved') < due:\n            sleep()\n        {sets}\n"
        "while board.get('step') < due:\n    time.sleep(1)\n"
    )

    def one(pid: int, function: str, line: int) -> Process:
        thread = Thread(name="MainThread", os_id=pid, frames=(at(line, function),))
        looks = tuple(Look(at=0.5 * n, state="S", switches=7 + n, threads=(thread,)) for n in range(6))
        parent, command = 100 if pid > 100 else 1, ("python",)
        return Process(pid=pid, parent=parent, looks=looks, waits_in="hrtimer_nanosleep", command=command)

    every = (one(100, "<module>", 12), one(101, "save", 4), one(102, "score", 9))
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("rollout blocked", pids)
    assert ("Its children wait for one another" in verdict.explanation) is (len(pids) > 1)


@pytest.mark.parametrize("line, pids", [(3, (100,)), (5, (100, 101))])
def test_a_worker_without_a_job_is_not_at_fault(line: int, pids: tuple[int, ...]) -> None:
    text = (
        "def worker():\n    while True:\n        job = tasks.get()\n        work(job)\n        more = tasks.get()\n"
        "batch = results.get()\n"
    )
    gets = within("Queue.get", "multiprocessing/queues.py")
    shared: dict[str, Any] = {"pipes": ("pipe:[1]", "pipe:[2]"), "waits_in": "pipe_read"}
    every = (below(100, gets, at(6, "<module>"), **shared), below(101, gets, at(line, "worker"), **shared))
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("rollout blocked", pids)


@pytest.mark.parametrize("line, steps, pattern", [(4, 9, "healthy"), (4, 0, "external wait"), (5, 9, "external wait")])
def test_a_process_that_sleeps_between_its_rounds_does_not_stop_another(line: int, steps: int, pattern: str) -> None:
    def one(pid: int, line: int, parent: int, steps: int, *library: Frame) -> Process:
        looks = []
        for n in range(6):
            frame = at(line, "<module>", step=str(steps and n))
            thread = Thread(name="MainThread", os_id=pid, frames=(*library, frame))
            looks.append(Look(at=0.5 * n, state="S", switches=7, threads=(thread,)))
        waits = "do_wait" if library else "hrtimer_nanosleep"
        return Process(pid=pid, parent=parent, looks=tuple(looks), waits_in=waits, command=("python",))

    main = one(100, 6, 0, 0, within("Popen.poll", "multiprocessing/popen_fork.py"))
    job = (main, one(101, 2, 100, steps), one(102, line, 100, 0))
    assert judge(Snapshot(processes=job, seconds=3.0, sources={"train.py": ROUNDS})).pattern == pattern
    own = (rank(0, 5, "all_reduce"), rank(1, 8), replace(one(102, 2, 101, steps), parent=101))
    found = judge(Snapshot(processes=own, seconds=3.0, sources={"train.py": SCRIPT + ROUNDS}))
    assert (found.pattern, found.pids) == (("slow", (102,)) if steps else ("missing rank", (101,)))


@pytest.mark.parametrize("line, pattern, pid", [(2, "slow", 102), (4, "missing rank", 101)])
def test_a_monitor_below_a_rank_that_sleeps_does_not_make_it_slow(line: int, pattern: str, pid: int) -> None:
    looks = []
    for n in range(6):
        frame = Frame(function="<module>", file="child.py", line=line, locals={"samples": str(n)})
        thread = Thread(name="MainThread", os_id=102, frames=(frame,))
        looks.append(Look(at=0.5 * n, state="S", switches=7, threads=(thread,)))
    child = Process(pid=102, parent=101, looks=tuple(looks), waits_in="hrtimer_nanosleep", command=("python",))
    processes = (rank(0, 5, "all_reduce"), rank(1, 8), child)
    verdict = judge(Snapshot(processes=processes, sources={"train.py": SCRIPT, "child.py": ROUNDS}))
    assert (verdict.pattern, verdict.pids) == (pattern, (pid,))


@pytest.mark.parametrize("fills", [0, 1])
def test_a_rank_whose_queue_is_filled_by_ranks_that_wait_for_it_is_missing(fills: int) -> None:
    reads = in_library(rank(2, 8, world=3), ("/multiprocessing/queues.py", "get"))
    reads = replace(reads, awaits=((102, "r pipe:[1]", "w pipe:[1]"),))
    others = [rank(n, 5, "all_reduce", world=3) for n in (0, 1)]
    others[fills] = replace(others[fills], ends=("w pipe:[1]",))
    verdict = judged(*others, reads)
    assert (verdict.pattern, verdict.ranks, verdict.sites) == ("missing rank", (2,), ("train.py:8",))
    assert f"Only rank {fills} could end that wait, and it waits for rank 2 in all_reduce." in verdict.explanation


def test_ranks_whose_queues_only_the_other_one_fills_are_in_no_collective() -> None:
    def reads(number: int, own: str, other: str) -> Process:
        one = in_library(rank(number, 8), ("/multiprocessing/queues.py", "get"))
        return replace(one, awaits=((100 + number, f"r {own}", f"w {own}"),), ends=(f"w {other}",))

    verdict = judged(reads(0, "pipe:[1]", "pipe:[2]"), reads(1, "pipe:[2]", "pipe:[1]"))
    assert (verdict.pattern, verdict.ranks) == ("rollout blocked", (0, 1))


def test_a_launcher_whose_ranks_were_not_there_yet_is_no_job_without_stacks() -> None:
    command = ("python", "-m", "torch.distributed.run", "train.py")
    verdict = judged(replace(rank(0, 8), rank=None, command=command))
    assert (verdict.pattern, verdict.exit_code) == ("undetermined", 3)
    assert "Only the launcher was seen" in verdict.explanation


FILLS = (
    "def fill(n):\n    while len(rows) < n:\n        rounds += 1\n        one = generate()\n        rows.append(one)\n",
    "def fill(n):\n    for rounds in count():\n        if len(rows) >= n: break\n        one = generate()\n"
    "        if one: rows.append(one)\n",
    "def fill(n):\n  while True:\n    rows, rounds = [], 0\n    while len(rows) < n:\n      rounds += generate()\n"
    "      rows += []\n",
)
WAITS = (
    "def fill(n):\n    while len(rows) < n:\n        rounds += 1\n        generate()\n        done = 0\n",
    "def fill(n):\n    while len(rows) < n:\n        rounds += 1\n        rows.extend(poll())\n        time.sleep(1)\n",
    "def fill(n):\n    for rounds in range(n):\n        one = step()\n        if one: rows.append(one)\n"
    "        if len(rows) > 9: break\n",
    "def fill(n):\n    for rounds in count():\n        one = step()\n        if one: rows.append(one)\n"
    "        if len(rows) > 9: break\n        if one > n: break\n",
)


@pytest.mark.parametrize(
    "text, last, kept, pattern",
    [
        *((text, 140, 0, "rollout blocked") for text in FILLS),
        *((text, 140, 1, "healthy") for text in FILLS),
        *((text, 40, 0, "healthy") for text in FILLS),
        *((text, 140, 0, "healthy") for text in WAITS),
    ],
)
def test_a_loop_that_keeps_nothing_in_many_rounds_never_fills_its_batch(
    text: str, last: int, kept: int, pattern: str
) -> None:
    looks = []
    for n in range(6):
        values = {"len(rows)": str(kept), "rounds": str(last - 5 + n), "n": "4"}
        frame = Frame(function="fill", file="train.py", line=5, locals=values)
        thread = Thread(name="MainThread", os_id=100, frames=(frame,))
        looks.append(Look(at=0.5 * n, state="S", switches=7 + n, threads=(thread,)))
    filling = replace(rank(0, 8), rank=None, world=None, looks=tuple(looks))
    verdict = judge(Snapshot(processes=(filling,), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern


@pytest.mark.parametrize(
    "dropped, kept, goal, pattern",
    [
        (4, 0, "len(rows) < n", "rollout blocked"),
        (1, 0, "len(rows) < n", "healthy"),  # it may keep one in ten
        (4, 1, "len(rows) < n", "healthy"),
        (4, 0, "not late()", "healthy"),
    ],
)
def test_a_filter_that_keeps_nothing_is_a_fault_although_all_processes_move(
    dropped: int, kept: int, goal: str, pattern: str
) -> None:
    text = (
        f"def collect(n):\n    while {goal}:\n        group = groups.get()\n        if not keep(group):\n"
        "            self.dropped += 1\n            continue\n        rows.append(group)\n"
        "for number in count():\n    groups.put(generate())\n"
    )

    def one(pid: int, parent: int, *frames: Frame) -> Process:
        looks = (
            Look(at=0.5 * n, state="S", switches=7 + n, threads=(Thread(name="MainThread", os_id=pid, frames=(each,)),))
            for n, each in enumerate(frames)
        )
        return Process(pid=pid, parent=parent, looks=tuple(looks), waits_in="pipe_read", command=("python",))

    values = [{"len(rows)": f"{kept}", "self.dropped": f"{50 + dropped * n}"} for n in range(6)]
    filters = one(100, 1, *(at(3, "collect", **each) for each in values))
    generates = one(101, 100, *(at(9, "generate", number=f"{dropped * n}") for n in range(6)))
    verdict = judge(Snapshot(processes=(filters, generates), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern


@pytest.mark.parametrize("call, pattern", [("db.execute(LATEST).fetchone()", "external wait"), ("work()", "healthy")])
def test_a_loop_that_asks_a_database_polls_beside_a_heartbeat_that_writes(call: str, pattern: str) -> None:
    text = (
        f"def latest():\n    return {call}\nwhile latest() < want:\n    time.sleep(0.2)\n"
        "def beat():\n    while not stop.wait(0.5):\n        report()\ndef report():\n    db.execute(BEAT)\n"
    )

    def at(function: str, line: int) -> Frame:
        return Frame(function=function, file="train.py", line=line)

    waits = Frame(function="Event.wait", file="/usr/lib/python3.11/threading.py", line=1)
    looks = []
    for n in range(6):
        frames = (at("latest", 2), at("<module>", 3)) if n == 2 else (at("<module>", 4),)
        threads = (
            Thread(name="MainThread", os_id=100, frames=frames),
            Thread(name="beat", os_id=101, frames=(waits, at("beat", 6))),
        )
        looks.append(Look(at=0.5 * n, state="S", switches=7 + n, written=4096 * n, threads=threads))
    asking = replace(rank(0, 4), rank=None, world=None, looks=tuple(looks))
    assert judge(Snapshot(processes=(asking,), seconds=3.0, sources={"train.py": text})).pattern == pattern


FEEDS = (
    "def run(self):\n    while True:\n        self.epoch += 1\n        for p in self.prompts:\n"
    "            if suitable(p): pending.append(p)\n            if len(pending) == 8: self.out.put(pending)\n"
    "batch = feeder.out.get()\n"
)


def at(line: int, function: str = "train", **values: str) -> Frame:
    """Return a user's frame at a line of train.py."""
    return Frame(function=function, file="train.py", line=line, locals=values)


def within(name: str, file: str, **values: str) -> Frame:
    """Return a frame of the standard library."""
    return Frame(function=name, file=f"/usr/lib/python3.11/{file}", line=1, locals=values)


@pytest.mark.parametrize(
    "rounds, pending, pattern",
    [(40, 0, "rollout blocked"), (4, 0, "undetermined"), (40, 1, "healthy"), (-40, 0, "undetermined")],
)
def test_a_thread_that_goes_round_and_puts_nothing_starves_the_main_thread(
    rounds: int, pending: int, pattern: str
) -> None:
    looks = []
    for n in range(6):
        epoch = str(500 + rounds * n)
        shown = {"self.epoch": epoch, "len(self.out.queue)": "0", "self.out.unfinished_tasks": "3"}
        feeds = at(5, "run", **shown, **{"len(pending)": str(pending * n)})
        gets = (within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"))
        threads = (
            Thread(name="MainThread", os_id=100, frames=(*gets, at(7, **{"feeder.epoch": epoch}))),
            Thread(name="feeder", os_id=101, active=True, frames=(within("shuffle", "random.py"), feeds)),
        )
        looks.append(Look(at=0.5 * n, state="S", switches=7, cpu_s=0.5 * n, threads=threads))
    starved = replace(rank(0, 7), rank=None, world=None, looks=tuple(looks), waits_in="futex_do_wait")
    verdict = judge(Snapshot(processes=(starved,), seconds=3.0, sources={"train.py": FEEDS}))
    assert verdict.pattern == pattern
    if pattern == "rollout blocked":
        assert verdict.sites == ("train.py:2", "train.py:7")
        assert "loops at train.py:2 and puts nothing: run.self.epoch grows" in verdict.explanation


@pytest.mark.parametrize(
    "rounds, feeder, made, tested, rejects",
    [
        (25, "", "sample()", "not keep(group)", True),
        (9, "", "sample()", "not keep(group)", False),
        (25, "QueueFeederThread", "sample()", "not keep(group)", False),
        (25, "", "sample()", "not keep(self.batch)", False),
        (25, "", "fetch()", "not group", False),
        (25, "", "fetch()", "group.empty", False),
        (25, "", "merge(group, sample())", "group.sum() < 64", False),
        (25, "", "time.time()", "group < until", False),
        (25, "", "fetch()", "group['id'] < start", False),
        (25, "", "fetch()", "not keep(group):\n            sleep(1)\n            continue\n        if done", False),
        (25, "", "fetch()", "not keep(group):\n            warn(1)\n            continue\n        if done", True),
    ],
)
def test_a_loop_that_has_never_put_anything_into_the_queue_of_another_process_rejects_everything(
    rounds: int, feeder: str, made: str, tested: str, rejects: bool
) -> None:
    text = (
        f"def produce(out):\n    while True:\n        group = {made}\n"
        f"        if {tested}:\n            continue\n        out.put(group)\nbatch = source.get()\n"
    )
    pipe = (
        within("Connection._recv", "multiprocessing/connection.py"),
        within("Queue.get", "multiprocessing/queues.py"),
    )
    trainer = below(100, *pipe, at(7), waits_in="pipe_read", awaits=((100, "r pipe:[1]", "w pipe:[1]"),))
    looks = []
    for n in range(26):
        frame = replace(at(3, "produce", **{"out._opid": "100"}), addresses={"group": 7 + min(n, rounds)})
        threads = (replace(main_in(frame), os_id=101), *([Thread(name=feeder, os_id=102)] if feeder else []))
        looks.append(Look(at=0.4 * n, state="S", switches=7 + 9 * n, threads=threads))
    maker = Process(pid=101, parent=100, looks=tuple(looks), command=("python",), ends=("w pipe:[1]",))
    verdict = judge(Snapshot(processes=(trainer, maker), seconds=10.0, sources={"train.py": text}))
    assert (verdict.pattern == "rollout blocked" and verdict.sites == ("train.py:4",)) is rejects


@pytest.mark.parametrize(
    "woken, pattern",
    [((4, 16), "healthy"), ((12,), "undetermined"), ((4,), "rollout blocked"), ((1, 4), "rollout blocked")],
)
def test_a_wait_that_returned_twice_is_progress_and_one_that_returned_once_may_be(
    woken: tuple[int, ...], pattern: str
) -> None:
    frames = (within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"), at(2))
    thread = Thread(name="MainThread", os_id=100, frames=frames)
    looks = tuple(
        Look(at=n / 2, state="S", switches=7 + sum(n >= w for w in woken), threads=(thread,)) for n in range(21)
    )
    waits = replace(rank(0, 2), rank=None, world=None, looks=looks, waits_in="futex_do_wait")
    sources = {"train.py": "while True:\n    batch = q.get()\n"}
    assert judge(Snapshot(processes=(waits,), seconds=10.0, sources=sources)).pattern == pattern


def watched(text: str, *looks: list[Thread], kernel: str = "futex_do_wait", wakes: int = 0) -> Verdict:
    """Return the verdict about one process whose threads and tasks are those of each look."""
    every = tuple(Look(at=n / 2, switches=7 + wakes * n, threads=tuple(threads)) for n, threads in enumerate(looks))
    one = replace(rank(0, 1), rank=None, world=None, looks=every, waits_in=kernel)
    return judge(Snapshot(processes=(one,), seconds=len(looks) / 2, sources={"train.py": text}))


def main_in(*frames: Frame) -> Thread:
    return Thread(name="MainThread", os_id=100, frames=frames)


LOOP = (within("select", "selectors.py"), within("run_forever", "asyncio/base_events.py"), at(99, "<module>"))


@pytest.mark.parametrize(
    ("loop", "pattern"),
    [("self.step < self.steps", "rollout blocked"), ("True", "healthy"), ("not self.stopping", "healthy")],
)
def test_a_trainer_whose_metrics_nobody_asks_for_is_no_idle_server(loop: str, pattern: str) -> None:
    text = f"async def fit(self):\n    while {loop}:\n        batch = await self.queue.get()\n        learn(batch)\n"
    get = Frame(function="Queue.get", file="/usr/lib/python3.11/asyncio/queues.py", line=1)
    main = Thread(name="task Task-1", os_id=0, task=True, waiter="Future", frames=(get, at(3, "fit")))
    looks = tuple(Look(at=n / 2, state="S", switches=7, threads=(main_in(*LOOP), main)) for n in range(6))
    one = replace(rank(0, 1), rank=None, world=None, looks=looks, listens=(9090,), waits_in="ep_poll")
    assert judge(Snapshot(processes=(one,), seconds=3, sources={"train.py": text})).pattern == pattern


def answering(*tokens: int) -> list[tuple[Thread, ...]]:
    """Return the threads of an engine in each look: a task that has made so many tokens, or no task for 0."""
    every = []
    for number, made in enumerate(tokens):
        frames = (within("sleep", "asyncio/tasks.py"), at(4, "answer", k=str(made)))
        task = Thread(name="task Task-9", os_id=0, task=True, at=64 + number // 3, frames=frames)
        every.append((main_in(*LOOP), *([task] if made else [])))
    return every


@pytest.mark.parametrize(
    ("tokens", "pattern"),
    [((0, 0, 0, 1, 4, 7, 1, 4, 0), "healthy"), ((0, 0, 0, 2, 2, 2, 3, 3, 3), "rollout blocked")],
)
def test_an_engine_moves_if_a_task_that_comes_and_goes_counts(tokens: tuple[int, ...], pattern: str) -> None:
    text = "async def answer(n):\n    made = []\n    for k in range(n):\n        await asyncio.sleep(0.2)\n"
    assert watched(text, *map(list, answering(*tokens)), kernel="ep_poll").pattern == pattern


def test_a_trainer_that_listens_at_the_port_of_its_engine_is_not_a_server() -> None:
    text = "async def train(self):\n    for step in range(9):\n        await ask(session)\n"
    http = within("ClientResponse.start", "aiohttp/client_reqrep.py")
    looks = []
    for n in range(6):
        task = Thread(name="task Task-1", os_id=0, task=True, at=64, frames=(http, at(3, "train", step=str(n // 2))))
        looks.append(Look(at=0.5 * n, state="S", switches=7 + n, threads=(main_in(*LOOP), task)))
    both = {"listens": (9090,), "waits_in": "ep_poll", "command": ("python",)}
    trainer = Process(pid=100, parent=1, looks=tuple(looks), peers=(9090,), **both)
    engine = below(101, within("sleep", "time.py"), at(9, "answer"), peers=(51001,), **both)
    verdict = judge(Snapshot(processes=(trainer, engine), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == "healthy"


@pytest.mark.parametrize(
    ("loop", "timeout", "pattern"),
    [
        ("while not stopping.wait(every):\n        tick()", "25", "slow"),
        ("while not stopping.wait(every):\n        tick()", "1", "rollout blocked"),
        ("while not stopping.wait(every):\n        tick()", "None", "rollout blocked"),
        ("while not stopping.wait(every):\n        pass", "25", "rollout blocked"),
        ("while not version.wait(every):\n        tick()", "25", "rollout blocked"),
    ],
)
def test_a_loop_that_works_between_long_waits_for_its_end_is_slow(loop: str, timeout: str, pattern: str) -> None:
    text = f"def run(every):\n    {loop}\n"
    waits = replace(within("Event.wait", "threading.py"), locals={"timeout": timeout})
    scheduler = below(100, within("Condition.wait", "threading.py"), waits, at(2, "run"))
    verdict = judge(Snapshot(processes=(scheduler,), seconds=10.0, sources={"train.py": text}))
    assert verdict.pattern == pattern


@pytest.mark.parametrize(
    ("writes", "pattern"),
    [
        ("mine = out / f'result-{rank}.json'\n    mine.write_text(text)", "missing rank"),
        ("mine = out / f'part-{rank}.json'\n    mine.write_text(text)", "external wait"),
        ("mine = out / f'result-{rank}.json'\n    mine.unlink()", "external wait"),
        ("mine = out / f'result-{rank}.json'\n    file = open(mine, 'w')", "missing rank"),
        ("mine = out / f'result-{rank}.json'\n    file = open(mine)", "external wait"),
    ],
)
def test_a_rank_that_polls_for_files_which_the_waiting_ranks_would_write_is_missing(writes: str, pattern: str) -> None:
    text = (
        f"def export(out, rank):\n    {writes}\n"
        "    wanted = [out / f'result-{each}.json' for each in range(world)]\n"
        "    while not all(each.exists() for each in wanted):\n        time.sleep(0.5)\n"
    )
    sleeps = below(101, within("sleep", "time.py"), at(6, "export"), waits_in="hrtimer_nanosleep", rank=1, world=2)
    verdict = judge(Snapshot(processes=(rank(0, 9, "all_reduce"), sleeps), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks, verdict.sites) == (pattern, (1,), ("train.py:6",))


def test_a_server_that_asks_another_machine_at_its_own_port_stays_a_server() -> None:
    text = "for step in range(9):\n    time.sleep(0.1)\n"
    looks = [
        Look(at=0.5 * n, state="S", switches=7 + n, threads=(main_in(within("sleep", "time.py"), at(2, step=str(n))),))
        for n in range(6)
    ]
    trainer = Process(pid=100, parent=1, looks=tuple(looks), command=("python",))
    router = below(101, *LOOP, listens=(8000,), peers=(8000,), waits_in="ep_poll", parent=1)
    verdict = judge(Snapshot(processes=(trainer, router), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == "healthy"


def test_a_running_main_thread_does_not_make_the_other_threads_compute() -> None:
    place = (Frame(function="work", file="train.py", line=10),)
    main, other = (Thread(name=f"{n}", os_id=n, frames=place) for n in (100, 101))
    process = Process(pid=100, looks=(Look(at=0.0, state="R", threads=(main, other)),))
    assert [activity_of(process, thread, {}).kind for thread in (main, other)] == ["compute", "unknown"]


def below(pid: int, *frames: Frame, waits_in: str = "futex_do_wait", **more: Any) -> Process:
    """Return a child of process 100 with one thread that stays in these frames."""
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(main_in(*frames),)) for n in range(6))
    looks = tuple(replace(look, threads=(replace(look.threads[0], os_id=pid),)) for look in looks)
    more = {"parent": 100 if pid > 100 else 1, "command": ("python",)} | more
    return Process(pid=pid, looks=looks, waits_in=waits_in, **more)


@pytest.mark.parametrize(("wanted", "cause"), [("4", "already"), ("5", "nobody sets")])
def test_a_condition_that_holds_already_was_signalled_to_another_thread(wanted: str, cause: str) -> None:
    text = (
        "class Buffer:\n    def take(self, n):\n        while len(self.items) < n:\n            self.cond.wait()\n"
        "    def put(self, item):\n        while len(self.items) >= 4:\n            self.cond.wait()\n"
    )
    takes, puts = at(4, "Buffer.take", n=wanted, self="<cell at 0x7>"), at(7, "Buffer.put", **{"len(self.items)": "4"})
    puts = replace(puts, locals={**puts.locals, "self": "<Buffer>"}, addresses={"self": 7})
    wait = within("Condition.wait", "threading.py")
    other = Thread(name="producer", os_id=101, frames=(wait, puts))
    verdict = watched(text, *[[main_in(wait, takes), other]] * 6)
    assert verdict.pattern == "rollout blocked"
    held = text + "    def drop(self):\n        with self.cond:\n            self.peer.recv(1)\n"
    holder = Thread(name="holder", os_id=102, frames=(replace(puts, function="Buffer.drop", line=10),))
    assert "does not hold any more" not in watched(held, *[[main_in(wait, takes), other, holder]] * 6).explanation
    notified = main_in(replace(wait, function="wait", locals={"gotit": "True"}), takes)
    assert "does not hold any more" not in watched(text, *[[notified, other]] * 6).explanation
    assert ("although `while len(self.items) < n` does not hold any more" in verdict.explanation) == (
        cause == "already"
    )
    assert cause == "already" or cause in verdict.explanation


def test_two_processes_that_each_lock_the_file_of_the_other() -> None:
    text = "def a():\n    with FileLock(one):\n        pass\ndef b():\n    with FileLock(two):\n        pass\n"
    lock = within("acquire", "site-packages/filelock/_api.py")
    first = below(101, lock, at(2, "a"), waits_in="hrtimer_nanosleep", files=(7,), wants=(8,))
    second = below(102, lock, at(5, "b"), waits_in="hrtimer_nanosleep", files=(8,), wants=(7,))
    verdict = judge(Snapshot(processes=(first, second), sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("lock or I/O", (101, 102))
    assert "Each has locked what another one of them waits for" in verdict.explanation


@pytest.mark.parametrize(
    ("written", "wakes", "ends", "rejects"),
    [(9, 12, "continue", True), (90, 12, "continue", False), (9, 3, "continue", False), (9, 12, "break", False)],
)
def test_a_filter_between_two_processes_takes_and_puts_nothing_on(
    written: int, wakes: int, ends: str, rejects: bool
) -> None:
    put, last = "outbox.put(texts)", "outbox.put(total); break" if ends == "break" else "continue"
    text = (
        f"def score(inbox, outbox):\n    while True:\n        texts = inbox.get()\n        if not usable(texts):\n"
        f"            {last}\n        {put if ends == 'continue' else 'total = total + work(texts)'}\n"
        f"def fit(scored):\n    while True:\n        scored.get()\n"
    )
    read, take = within("Connection._recv", "multiprocessing/connection.py"), "multiprocessing/queues.py"
    trains = below(100, read, within("Queue.get", take), at(9, "fit"), waits_in="pipe_read")
    scores = below(101, read, within("Queue.get", take), at(3, "score"), waits_in="pipe_read")
    looks = [replace(look, read=100 * n, switches=wakes * n, written=9) for n, look in enumerate(scores.looks, 1)]
    scores = replace(scores, looks=(*looks[:-1], replace(looks[-1], written=written)))
    verdict = judge(Snapshot(processes=(trains, scores), seconds=5.0, sources={"train.py": text}))
    assert ("rejects everything" in verdict.explanation) == rejects
    other = Thread(name="sender", os_id=109, frames=(within("Queue.get", "queue.py"), at(9, "fit")))
    sends = replace(scores, looks=tuple(replace(look, threads=(*look.threads, other)) for look in scores.looks))
    both = judge(Snapshot(processes=(trains, sends), seconds=5.0, sources={"train.py": text}))
    assert "rejects everything" not in both.explanation
    if rejects:
        assert (verdict.pattern, verdict.pids) == ("rollout blocked", (101,))
        assert "train.py:4 decides" in verdict.explanation


def test_a_server_that_still_imports_is_slow() -> None:
    """A look found vLLM at its start, and the next one where it imports: nothing else of it had moved."""
    imports = Frame(function="_find_and_load", file="<frozen importlib._bootstrap>", line=1176)
    module = within("<module>", "site-packages/vllm/routers.py")
    bottom = (within("run", "asyncio/runners.py"), within("main", "site-packages/vllm/api_server.py"))
    begun = (within("poll", "site-packages/zmq/sugar/poll.py"), *bottom)
    server = below(101, *begun)
    for last, pattern in (((imports, module, *bottom), "slow"), (begun, "undetermined")):
        threads = (replace(server.looks[0].threads[0], frames=last),)
        looks = (*server.looks[:-1], replace(server.looks[-1], threads=threads))
        asks = replace(below(100, at(1), waits_in="ep_poll"), name="rollout", waits=({
            "what": "an inference server", "unblocks": "clew serve", "numbers": "", "for_s": 60.0},))  # fmt: skip
        serve = replace(below(102, at(8), waits_in="hrtimer_nanosleep"), name="server")
        every = (asks, serve, replace(server, parent=102, looks=looks))
        verdict = judge(Snapshot(processes=every, sources={"train.py": SCRIPT}))
        assert verdict.pattern == pattern, verdict
        assert "it imports modules" in verdict.explanation or pattern != "slow"


def test_the_server_that_a_process_is_connected_to_is_at_fault_and_not_an_idle_one() -> None:
    """Every wait for a server, also those that servers report themselves, led to all servers."""
    says = {"what": "an answer of server-1", "unblocks": "the inference engine", "numbers": "", "for_s": 60.0}
    asks = replace(below(100, *LOOP, waits_in="ep_poll", peers=(5001,)), name="rollout", waits=(says,))
    idle = replace(below(101, *LOOP, waits_in="ep_poll", listens=(5000,)), name="server")
    lock = within("Lock.acquire", "threading.py")
    stuck = replace(below(102, lock, at(8), listens=(5001,)), name="server-1", waits=({**says, "what": "generations"},))
    verdict = judge(Snapshot(processes=(asks, idle, stuck), seconds=3.0, sources={"train.py": SCRIPT}))
    assert verdict.pids == (102,), verdict


@pytest.mark.parametrize("taken, pids", [("replay", (101, 102)), ("other", (101,))])
def test_two_processes_that_lock_each_other_out_are_both_at_fault(taken: str, pids: tuple[int, ...]) -> None:
    text = (
        f"def collect():\n    with weights:\n        record()\ndef record():\n    with replay:\n        pass\n"
        f"def update():\n    with {taken}:\n        publish()\ndef publish():\n    with weights:\n        pass\n"
        "value = batches.get()\n"
    )
    enter = within("SemLock.__enter__", "multiprocessing/synchronize.py")
    gets = (
        within("Connection.recv", "multiprocessing/connection.py"),
        within("Queue.get", "multiprocessing/queues.py"),
    )
    every = (
        below(100, *gets, at(13, "<module>")),
        below(101, enter, at(5, "record"), at(3, "collect")),
        below(102, enter, at(11, "publish"), at(9, "update")),
    )
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("lock or I/O", pids)
    assert ("Each has locked what another one of them waits for" in verdict.explanation) is (len(pids) > 1)


ENTERS = within("SemLock.__enter__", "multiprocessing/synchronize.py")
GETS = (within("Connection.recv", "multiprocessing/connection.py"), within("Queue.get", "multiprocessing/queues.py"))


def locking(text: str, *stacks: tuple[Frame, ...]) -> Verdict:
    """Return the verdict about a program that reads a queue at line 1, and whose children stay in these frames."""
    children = [below(101 + n, *frames) for n, frames in enumerate(stacks)]
    every = (below(100, *GETS, at(1, "<module>")), *children)
    return judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": f"x = q.get()\n{text}"}))


@pytest.mark.parametrize(
    "module, between, pids",
    [
        ("multiprocessing", "", (101, 102)),
        ("multiprocessing", "\n    b.release()", (101,)),
        ("threading", "", (101,)),
    ],
)
def test_processes_lock_each_other_out_by_acquire_too(module: str, between: str, pids: tuple[int, ...]) -> None:
    text = (
        f"import {module} as m\na, b = m.Lock(), m.Lock()\n"
        f"def collect():\n    a.acquire()\n    b.acquire()\ndef update():\n    b.acquire(){between}\n    a.acquire()\n"
    )
    verdict = locking(text, (at(6, "collect"),), (at(9 if not between else 10, "update"),))
    assert (verdict.pattern, verdict.pids) == ("lock or I/O", pids)


CROSSED = """def one():
    with a:
        with b:
            go()
def two():
    with b:
        with c:
            go()
def three():
    with c:
        go()
"""


@pytest.mark.parametrize("c, last, pids", [("a", 11, (102, 103)), ("c", 12, (104,))])
def test_a_process_that_waits_for_a_lock_is_at_fault_only_if_it_has_another_one(
    c: str, last: int, pids: tuple[int, ...]
) -> None:
    proxy = (
        within("Connection.recv", "multiprocessing/connection.py"),
        within("BaseProxy._callmethod", "multiprocessing/managers.py"),
        within("AcquirerProxy.__enter__", "multiprocessing/managers.py"),
    )
    for enters in ((ENTERS,), proxy):  # a lock of multiprocessing, and one of a manager
        sleeps = (*enters, at(last, "three")) if last == 11 else (at(last, "three"),)
        waits = ((*enters, at(7, "two")), (*enters, at(4, "one")), (*enters, at(8, "two")))
        verdict = locking(CROSSED.replace("with c", f"with {c}").replace("go()", "sleep(3600)"), *waits, sleeps)
        assert (verdict.pattern, verdict.pids) == ("lock or I/O", pids)
    assert ("pid 104 has locked that lock" in verdict.explanation) is (pids == (104,))


@pytest.mark.parametrize(
    "text, lines",
    [
        ("def one():\n    with a, b:\n        go()\ndef two():\n    with b, a:\n        go()\n", (3, 6)),
        (
            "def one():\n    with a.get_lock():\n        with b.get_lock():\n            go()\n"
            "def two():\n    with b.get_lock():\n        with a.get_lock():\n            go()\n",
            (4, 8),
        ),
    ],
)
def test_a_with_can_take_two_locks_or_the_lock_of_a_shared_value(text: str, lines: tuple[int, int]) -> None:
    verdict = locking(text, (ENTERS, at(lines[0], "one")), (ENTERS, at(lines[1], "two")))
    assert (verdict.pattern, verdict.pids) == ("lock or I/O", (101, 102))


def test_a_rank_that_has_locked_other_ranks_out_while_it_is_in_a_collective_is_at_fault() -> None:
    text = "def log():\n    with lock:\n        dist.all_reduce(x)\ndef save():\n    with lock:\n        write(x)\n"
    reduces = Frame(function="all_reduce", file=f"/x/{C10D}", line=1)
    ranks = [below(100, reduces, at(3, "log"), rank=0, world=2)]
    ranks += [below(101, ENTERS, at(5, "save"), rank=1, world=2, parent=1)]
    verdict = judge(Snapshot(processes=tuple(ranks), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("lock or I/O", (0,))


@pytest.mark.parametrize(
    "exit_code, pids", [("ended by signal 9", (103,)), ("ended with exit code 0", (101,)), ("", (101,))]
)
def test_who_is_killed_with_a_lock_is_at_fault_and_not_who_waits_for_those_that_want_it(
    exit_code: str, pids: tuple[int, ...]
) -> None:
    text = "done.acquire()\ndef work(lock, done):\n    with lock:\n        count()\n    done.release()\n"
    children = [below(pid, ENTERS, at(3, "work")) for pid in (101, 102)]
    every = [below(100, at(1, "<module>")), *children]
    if exit_code:
        every.append(Process(pid=103, parent=100, exit=exit_code, looks=(Look(at=3.0, state="Z"),)))
    verdict = judge(Snapshot(processes=tuple(every), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.sites) == ("dead" if pids == (103,) else "lock or I/O", ("train.py:3",))
    assert verdict.pids == pids


@pytest.mark.parametrize("line, pids", [(3, (101,)), (5, (100,))])
def test_a_semaphore_has_no_owner_that_could_be_killed_and_who_has_released_it_is_not_awaited(
    line: int, pids: tuple[int, ...]
) -> None:
    text = "slots.acquire()\ndef work(slots, end):\n    a.recv()\n    slots.release()\n    b.recv()\n"
    gone = Process(pid=103, parent=100, looks=(Look(at=3.0, state="Z"),))
    worker = below(101, *GETS[:1], at(line, "work"), awaits=((101, "socket:[1]", "socket:[2]"),))
    every = below(100, at(1, "<module>")), worker, *[gone] * (line == 5)
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert verdict.pids == pids and verdict.pattern != "dead" and "left it locked" not in verdict.explanation


@pytest.mark.parametrize(
    "name, file, port, pids",
    [
        ("accept", "socket.py", "8001", (100,)),
        ("urlopen", "urllib/request.py", "8002", (100,)),
        ("urlopen", "urllib/request.py", "8001", (101,)),
    ],
)
def test_a_client_without_a_connection_waits_only_for_the_server_whose_port_it_names(
    name: str, file: str, port: str, pids: tuple[int, ...]
) -> None:
    asks = below(100, within(name, file, url=f"http://127.0.0.1:{port}/"), at(1, "<module>"))
    server = below(101, at(3, "serve"), waits_in="hrtimer_nanosleep", listens=(8001,))
    text = "answer = ask()\ndef serve():\n    time.sleep(9000)\n"
    assert judge(Snapshot(processes=(asks, server), seconds=3.0, sources={"train.py": text})).pids == pids


@pytest.mark.parametrize(
    "function, end, pattern",
    [
        ("dispatch", "r pipe:[1]", "healthy"),
        ("session", "r pipe:[1]", "external wait"),
        ("dispatch", "socket:[1]", "external wait"),
    ],
)
def test_a_server_at_a_unix_socket_is_asked_if_a_thread_or_a_child_has_a_connection(
    function: str, end: str, pattern: str
) -> None:
    text = (
        "def serve():\n    while True:\n        conn = listener.accept()\n        start(session, conn)\n"
        "def dispatch():\n    while True:\n        results.get()\ndef session(conn):\n    while True:\n"
        "        conn.send(replies.get())\ntask = source.recv()\n"
    )
    accepts = main_in(within("accept", "socket.py"), at(3, "serve"))
    other = Thread(name="other", os_id=102, frames=(*GETS, at(7 if function == "dispatch" else 10, function)))
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(accepts, other)) for n in range(6))
    child = below(101, GETS[0], at(11, "<module>"), awaits=((101, end, end.replace("r ", "w ").replace("[1]", "[2]")),))
    every = replace(below(100), looks=looks), child
    assert judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text})).pattern == pattern


FLUSH = "    tool.stdin.flush()\n"


@pytest.mark.parametrize(
    "ask, tool, written, pids",
    [
        ("", "for line in sys.stdin:\n    print(reply, flush=True)", 0, (100,)),
        (FLUSH, "for line in sys.stdin:\n    print(reply)", 0, (101,)),
        (FLUSH, "for line in sys.stdin:\n    reply()\ndef reply():\n    print(1)", 0, (101,)),
        (FLUSH, "for line in sys.stdin:\n    print(reply)", 9, (100, 101)),
        (FLUSH, "while reply(input()):\n    print(reply)", 0, (100, 101)),
        (FLUSH, "for line in sys.stdin:\n    print(log, file=sys.stderr)", 0, (100, 101)),
        (
            FLUSH,
            "for line in sys.stdin:\n    reply()\ndef reply():\n    out.flush()\ndef end():\n    print()",
            0,
            (100, 101),
        ),
        (FLUSH, "for line in sys.stdin:\n    print(reply, flush=True)", 0, (100, 101)),
        ("    tool.communicate()\n", "for line in sys.stdin:\n    print(reply, flush=True)", 0, (100, 101)),
        ("", "for line in sys.stdin:\n    print(reply)", 0, (100, 101)),
    ],
)
def test_who_leaves_a_message_in_a_buffer_is_at_fault_and_not_who_reads_the_pipe(
    ask: str, tool: str, written: int, pids: tuple[int, ...]
) -> None:
    sources = {
        "train.py": f"def ask(tool):\n    tool.stdin.write(question)\n{ask}    return tool.stdout.readline()\n",
        "tool.py": tool,
    }
    ends = ("r pipe:[1]", "w pipe:[1]"), ("r pipe:[2]", "w pipe:[2]")
    pipes = [{"awaits": ((100 + n, *ends[n]),), "ends": (ends[1 - n][1],), "waits_in": "pipe_read"} for n in (0, 1)]
    asks, reads = at(3 + bool(ask), "ask"), Frame(function="<module>", file="tool.py", line=1)
    every = [below(100, asks, **pipes[0]), below(101, reads, **pipes[1])]
    for n, size in enumerate((8, written)):
        every[n] = replace(every[n], looks=tuple(replace(look, written=size) for look in every[n].looks))
    verdict = judge(Snapshot(processes=tuple(every), seconds=3.0, sources=sources))
    assert (verdict.pattern, verdict.pids) == ("external wait", pids)
    wrote: dict[tuple[int, ...], str] = {
        (100,): "train.py:2",
        (101,): f"tool.py:{tool[: tool.index('print')].count(chr(10)) + 1}",
    }
    assert (wrote.get(pids, "") in verdict.sites) is (len(pids) == 1)


def test_a_child_of_a_forkserver_works_for_whoever_started_the_forkserver() -> None:
    command = ("python", "-c", "from multiprocessing.forkserver import main; main(3)")
    serves, forks = within("select", "selectors.py"), within("main", "multiprocessing/forkserver.py")
    polls = (at(2, "score"), within("_serve_one", "multiprocessing/forkserver.py"), forks)
    every = (
        below(100, within("Future.result", "concurrent/futures/_base.py"), at(5, "<module>")),
        below(101, serves, forks, command=command),
        below(102, *polls, command=command, parent=101, waits_in="hrtimer_nanosleep"),
    )
    text = "def score(path):\n    while not path.exists(): time.sleep(0.1)\n\n\nx = pool.submit(score).result()\n"
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("external wait", (102,))


@pytest.mark.parametrize("ended, pattern", [("pump", "dead"), ("beat", "rollout blocked")])
def test_a_thread_that_has_ended_and_filled_the_queue_of_another_process_is_why_that_one_waits(
    ended: str, pattern: str
) -> None:
    text = (
        "batch = q.get()\ndef rollout(out, stop):\n    def pump():\n        for row in rows: out.put(row)\n\n"
        f"    def beat():\n        report()\n    Thread(target={ended}).start()\n    stop.wait()\n"
    )
    asks = (within("BaseProxy._callmethod", "multiprocessing/managers.py"),)
    waits = (*asks, within("EventProxy.wait", "multiprocessing/managers.py"))
    every = (
        below(100, *asks, at(1, "<module>"), pipes=("pipe:[1]",)),
        below(101, *waits, at(9, "rollout"), pipes=("pipe:[1]",), inside=Inside(ended_threads=(ended,))),
    )
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == (pattern, (101,))


def test_a_coroutine_that_asks_for_a_second_slot_of_its_semaphore_has_the_first() -> None:
    text = (
        "async def run(self):\n    async with self.slots:\n        go()\n"
        "async def episode(self):\n    async with self.box.slots:\n        await self.box.run()\n"
    )
    acquires = (within("Semaphore.acquire", "asyncio/locks.py"), within("__aenter__", "asyncio/locks.py"))
    stacks = (acquires[0], at(5, "episode")), (*acquires, at(2, "run"), at(6, "episode"))
    tasks = [Thread(name=f"task {n}", os_id=0, task=True, at=n, frames=each) for n, each in enumerate(stacks, 1)]
    verdict = watched(text, *([main_in(*LOOP), *tasks] for _ in range(6)))
    assert "task 2 has locked self.box.slots at train.py:5" in verdict.explanation
    assert verdict.sites == ("train.py:2", "train.py:5")


@pytest.mark.parametrize("line, pattern", [(3, "cpu"), (5, "undetermined")])
def test_a_loop_of_a_function_that_a_library_calls_computes_forever(line: int, pattern: str) -> None:
    text = (
        "def draw():\n    while True:\n        if fits(next(order)): yield\ndef one(row):\n    return f(row)\nrun()\n"
    )
    frames = (at(line, "draw" if line == 3 else "one"), within("__next__", "site-packages/x.py"), at(6, "<module>"))
    looks = (Look(at=0.5 * n, state="R", switches=7, cpu_s=0.4 * n, threads=(main_in(*frames),)) for n in range(6))
    one = Process(pid=100, looks=tuple(looks), command=("python",))
    assert judge(Snapshot(processes=(one,), seconds=3.0, sources={"train.py": text})).pattern == pattern


def test_a_condition_is_not_locked_while_its_owner_waits_for_it() -> None:
    text = (
        "def one():\n    with a:\n        a.wait()\ndef two():\n    with a:\n        go()\n"
        "def three():\n    with a:\n        sleep(3600)\n"
    )
    waits = (within("Condition.wait", "multiprocessing/synchronize.py"), at(4, "one"))
    verdict = locking(text, waits, (ENTERS, at(6, "two")), (at(10, "three"),))
    assert (verdict.pattern, verdict.pids) == ("lock or I/O", (103,))


@pytest.mark.parametrize("line, pids", [(9, (101, 102)), (7, (101,))])
@pytest.mark.parametrize(
    "asks",
    [
        "def poll(ready):\n    while not ready():\n        log(1)\n        sleep(1)\n",
        "def poll(ready):\n    while True:\n        if ready(): return\n        sleep(1)\n",
        "def poll(ready):\n    for _ in range(9999):\n        if ready(): return\n        sleep(1)\n",
        "def poll(path):\n    while not exists(path):\n        log(1)\n        sleep(1)\n",
        "def poll(self):\n    while not self.ready():\n        log(1)\n        sleep(1)\n",
    ],
)
def test_callers_of_one_helper_that_ask_for_different_things_may_wait_for_one_another(
    line: int, pids: tuple[int, ...], asks: str
) -> None:
    text = f"{asks}inbox.put(step)\ndef score():\n    poll(lambda: done(step))\ndef save():\n    poll(scored(step))\n"
    puts = (ENTERS, within("Queue.put", "multiprocessing/queues.py"))
    frames = (at(4, "poll"), at(7, "score")), (at(4, "poll"), at(line, "save"))
    polls = [below(101 + n, *each, waits_in="hrtimer_nanosleep") for n, each in enumerate(frames)]
    every = (below(100, *puts, at(5, "<module>")), *polls)
    verdict = judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("external wait", pids)
    if "(ready)" in asks or len(pids) > 1:
        assert verdict.sites == tuple(sorted({"train.py:4", "train.py:7", f"train.py:{line}"}))
    if "(ready)" in asks:
        assert "Pid 101 asks at train.py:7: poll(lambda: done(step))." in verdict.explanation


@pytest.mark.parametrize("library, pattern", [("tenacity/nap.py", "external wait"), ("other/nap.py", "healthy")])
def test_a_library_that_retries_forever_makes_no_progress_although_it_logs(library: str, pattern: str) -> None:
    sleeps = Frame(function="sleep", file=f"/x/site-packages/{library}", line=1)
    one = below(100, sleeps, at(2, "<module>", step="3"), waits_in="hrtimer_nanosleep")
    looks = tuple(replace(look, switches=n, written=100 * n) for n, look in enumerate(one.looks))
    text = "for step in range(9):\n    batch = fetch(step)\n"
    one = replace(one, looks=looks)
    assert judge(Snapshot(processes=(one,), seconds=3.0, sources={"train.py": text})).pattern == pattern


@pytest.mark.parametrize(
    "begin, end, ready, pattern",
    [
        ("ok, out = attempt(fn)", "if ok: return out", "False", "external wait"),
        ("ok, out = attempt(fn)", "if ok: return out", None, "healthy"),  # what it finds changes
        ("publish(fn)", "if ok: return out", "False", "healthy"),  # each round does some work
        ("ok, out = attempt(fn)", "out = act(out)", "False", "healthy"),
    ],
)
def test_a_loop_that_asks_until_a_test_holds_makes_no_progress_although_it_logs(
    begin: str, end: str, ready: str | None, pattern: str
) -> None:
    text = f"def call(fn):\n    while True:\n        {begin}\n        {end}\n        log.info(out)\n        sleep(1)\n"
    looks = []
    for n in range(6):
        thread = main_in(at(6, "call", ok=ready or f"{n}"))
        looks.append(Look(at=0.5 * n, switches=n, written=100 * n, threads=(thread,)))
    one = replace(below(100, at(6, "call"), waits_in="hrtimer_nanosleep"), looks=tuple(looks))
    assert judge(Snapshot(processes=(one,), seconds=3.0, sources={"train.py": text})).pattern == pattern


def coroutine(line: int, function: str, *inner: Frame, name: str = "Task-1") -> Thread:
    """Return a coroutine that waits at a line of train.py."""
    return Thread(name=name, os_id=0, task=True, waiter="Future", frames=(*inner, at(line, function)))


def beside(process: Process, *threads: Thread) -> Process:
    """Return the process with further threads or coroutines in each look."""
    return replace(process, looks=tuple(replace(look, threads=(*look.threads, *threads)) for look in process.looks))


READLINE = within("StreamReader.readline", "asyncio/streams.py")


@pytest.mark.parametrize(
    "text",
    [
        "async def run():\n    output = await proc.stdout.read()\n",
        "async def run(stream):\n    line = await stream.readline()\nasync def main():\n    await run(proc.stdout)\n",
    ],
)
@pytest.mark.parametrize(
    "kernel, words", [("anon_pipe_read", "reads from a pipe"), ("futex_do_wait", "does something")]
)
def test_a_coroutine_that_reads_what_a_program_prints_waits_for_the_program(kernel: str, words: str, text: str) -> None:
    one = beside(below(100, *LOOP), coroutine(2, "run", READLINE))
    program = below(101, Frame(function="<module>", file="<string>", line=2), waits_in=kernel)
    verdict = judge(Snapshot(processes=(one, program), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids, verdict.sites) == ("external wait", (100, 101), ("train.py:2",))
    assert f"its program pid 101 {words}" in verdict.explanation and "HTTP" not in verdict.explanation


JOINS = (within("Thread._wait_for_tstate_lock", "threading.py"), within("Thread.join", "threading.py"))


@pytest.mark.parametrize(
    "main, ends, says",
    [
        ((*JOINS, at(6)), "log(line)", "reads from a pipe"),
        ((within("Queue.get", "queue.py"), at(5)), "results.put(line)", "reads from a pipe"),
        ((within("Queue.get", "queue.py"), at(5)), "log(line)", "waits for an item in a queue"),
    ],
)
def test_a_thread_that_reads_a_pipe_decides_if_the_main_thread_needs_what_it_reads(
    main: tuple[Frame, ...], ends: str, says: str
) -> None:
    text = (
        f"def pump(stream):\n    for line in stream:\n        check(line)\n        {ends}\nx = results.get()\njoin()\n"
    )
    reads = Thread(name="Thread-1 (pump)", os_id=104, frames=(at(2, "pump"),))
    one = replace(beside(below(100, *main), reads), awaits=((104, "r pipe:[5]", "w pipe:[5]"),))
    program = below(101, at(7, "sample"), waits_in="hrtimer_nanosleep", ends=("w pipe:[5]",))
    sources = {"train.py": f"{text}time.sleep(3600)\n"}
    verdict = judge(Snapshot(processes=(one, program), seconds=3.0, sources=sources))
    assert verdict.pids == (101,) and f"pid 100 {says}" in " ".join(verdict.evidence)


def test_an_idle_server_whose_log_is_read_does_not_hide_an_event_that_nobody_sets() -> None:
    text = "async def log():\n    async for line in proc.stdout:\n        write(line)\n"
    text += "async def train():\n    await go.wait()\n"
    waits = coroutine(5, "train", within("Event.wait", "asyncio/locks.py"), name="Task-2")
    one = beside(below(100, *LOOP), coroutine(2, "log", READLINE), waits)
    server = below(101, *LOOP, listens=(8000,))
    verdict = judge(Snapshot(processes=(one, server), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids, verdict.sites) == ("rollout blocked", (100,), ("train.py:5",))


@pytest.mark.parametrize("step, pattern", [(1, "healthy"), (0, "rollout blocked")])
def test_a_counter_of_a_job_whose_result_is_awaited_is_progress_whatever_its_name(step: int, pattern: str) -> None:
    text = "job.result()\nfor turn in range(80):\n    obs = env.step(obs)\n    total += len(obs)\n"
    awaits = (within("Condition.wait", "threading.py"), within("Future.result", "concurrent/futures/_base.py"), at(1))
    looks = []
    for n in range(8):
        reads = within("SocketIO.readinto", "socket.py")
        job = (reads, at(3, "rollout", turn=str(step * n)), within("_worker", "concurrent/futures/thread.py"))
        looks.append([main_in(*awaits), Thread(name="pool_0", os_id=101, frames=job)])
    assert watched(text, *looks).pattern in (pattern, *(["external wait"] if not step else []))


def test_a_job_that_goes_round_is_no_progress_although_a_busy_machine_gives_it_little_time() -> None:
    awaits = (within("Condition.wait", "threading.py"), within("Future.result", "concurrent/futures/_base.py"), at(9))
    looks = []
    for n in range(8):
        job = (at(2 + n % 2, "parse"), within("_worker", "concurrent/futures/thread.py"))
        looks.append([main_in(*awaits), Thread(name="pool_0", os_id=101, active=True, frames=job)])
    assert watched("while at < end:\n    start = find(at)\n    at = find(start)\n", *looks).exit_code != 0


@pytest.mark.parametrize(
    "text, values, pattern",
    [
        ("while True:\n    act(x)\n    check(x)\n", ("", ""), "healthy"),
        ("while x != 'done':\n    read(x)\n    sleep(x)\n", ("'call'", "'result'"), "healthy"),
        ("while x != 'done':\n    read(x)\n    sleep(x)\n", ("'call'", "'call'"), "rollout blocked"),
        ("while True:\n    act(x)\n    sleep(3)\n", ("", ""), "rollout blocked"),
    ],
)
def test_a_task_that_passes_lines_is_progress_unless_it_polls_or_pauses_in_each_round(
    text: str, values: tuple[str, str], pattern: str
) -> None:
    looks = []
    for n in range(8):
        frames = (within("Future.__await__", "asyncio/futures.py"), at(2 + n % 2, "agent", x=values[n % 2]))
        looks.append([main_in(*LOOP), Thread(name="task a", os_id=0, task=True, at=5, waiter="Future", frames=frames)])
    assert watched(text, *looks, kernel="ep_poll", wakes=1).pattern == pattern


def test_tasks_that_end_one_by_one_are_progress_although_nothing_is_written() -> None:
    frames = (within("sleep", "asyncio/tasks.py"), at(1, "ask"))
    tasks = [Thread(name=f"task {n}", os_id=0, task=True, at=5 + n, frames=frames) for n in range(9)]
    looks = [[main_in(*LOOP), *tasks[n // 2 :]] for n in range(8)]
    assert watched("await answer()\n", *looks, kernel="ep_poll", wakes=1).pattern == "healthy"
    for ended in ((0, 1, 2, 2, 2, 2, 2, 2), (0, 0, 0, 0, 0, 1, 1, 1)):  # long ago, and a single one
        looks = [[main_in(*LOOP), *tasks[n:]] for n in ended]
        assert watched("await answer()\n", *looks, kernel="ep_poll", wakes=1).pattern == "rollout blocked"


@pytest.mark.parametrize("name, pattern", [("samples", "rollout blocked"), ("items", "healthy")])
def test_a_monitor_that_collects_samples_is_no_progress_unless_others_wait_for_them(name: str, pattern: str) -> None:
    text = f"while True:\n    time.sleep(1)\n    {name}.append(os.getloadavg()[0])\nitems.get()\n"
    gets = main_in(within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"), at(4))
    looks = [
        [gets, Thread(name="load", os_id=101, frames=(at(2, "watch", **{f"len({name})": str(n)}),))] for n in range(8)
    ]
    assert watched(text, *looks).pattern == pattern


@pytest.mark.parametrize(
    "value, pattern", [("time.time() - begun", "external wait"), ("progress() - begun", "healthy")]
)
def test_a_name_that_is_computed_from_the_time_is_no_counter(value: str, pattern: str) -> None:
    text = f"def f():\n    while not os.path.exists(path):\n        time.sleep(1)\n        age = int({value})\n"
    looks = [[main_in(at(3, "f", age=str(n)))] for n in range(8)]
    assert watched(text, *looks, kernel="hrtimer_nanosleep", wakes=1).pattern == pattern


@pytest.mark.parametrize(
    "written, waits, text, pattern",
    [
        (1, within("SocketIO.readinto", "socket.py"), "copy()", "slow"),
        (0, within("SocketIO.readinto", "socket.py"), "copy()", "external wait"),
        (1, within("X._get_data", "torch/utils/data/dataloader.py"), "for batch in loader: train()", "data loading"),
    ],
)
def test_a_rank_that_writes_megabytes_is_slow_unless_workers_load_its_data(
    written: int, waits: Frame, text: str, pattern: str
) -> None:
    frames = (waits, within("copyfileobj", "shutil.py"), at(1))
    copies = rank(0, 1)
    looks = tuple(
        replace(look, written=written * 1_000_000 * n, threads=(main_in(*frames),))
        for n, look in enumerate(copies.looks)
    )
    ranks = (replace(copies, looks=looks, waits_in="unix_stream_read_generic"), rank(1, 2, "barrier"))
    sources = {"train.py": f"{text}\ndist.barrier()\n"}
    assert judge(Snapshot(processes=ranks, seconds=3.0, sources=sources)).pattern == pattern


def test_a_rank_that_has_a_file_locked_and_waits_for_those_who_want_it_is_at_fault() -> None:
    acquire = Frame(function="FileLock.acquire", file="/x/site-packages/filelock/_api.py", line=1)
    waits = rank(1, 8)
    thread = replace(waits.threads[0], frames=(acquire, *waits.threads[0].frames))
    waits = replace(waits, looks=tuple(replace(look, threads=(thread,)) for look in waits.looks), wants=("77",))
    verdict = judged(replace(rank(0, 9, "barrier"), files=("77",)), waits)
    assert (verdict.pattern, verdict.ranks, verdict.sites) == ("lock or I/O", (0,), ("train.py:8", "train.py:9"))
    assert "Rank 1 (pid 101) waits for a file lock at train.py:8" in verdict.explanation
    assert verdict.explanation.partition("train.py:9")[2].startswith(": dist.barrier(). It is in a collective there")


@pytest.mark.parametrize(
    "condition, line, works, pids",
    [
        ("not self.lists[key]", 10, False, (301, 302)),
        ("self.paused", 10, False, (200,)),  # a client that resumes it may be missing
        ("not self.lists[key]", 9, False, (200,)),  # two alike: the one that brings it is elsewhere
        ("not self.lists[key]", 10, True, (200,)),
        ("not self.lists[key] and self.limit", 10, False, (200,)),  # it answers after that
    ],
)
def test_clients_that_wait_for_one_another_through_a_server_are_at_fault(
    condition: str, line: int, works: bool, pids: tuple[int, ...]
) -> None:
    limit = "self.limit" if "limit" in condition else ""
    text = (
        f"def pop(self, key):\n    with self.changed:\n        while {condition}:\n"
        f"            self.changed.wait({limit})\n"
        "def sample():\n    engine.lock.acquire()\ndef ask(key):\n    return file.readline()\n"
        "weights = ask('weights')\nrows = ask('rows')\nserver.serve_forever()\n"
    )

    def one(pid: int, *threads: tuple[Frame, ...], **more: Any) -> Process:
        every = tuple(Thread(name=f"T{n}", os_id=pid + n, frames=frames) for n, frames in enumerate(threads))
        every = (replace(every[0], name="MainThread"), *every[1:])
        looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=every) for n in range(6))
        return Process(pid=pid, command=("python",), looks=looks, waits_in="futex_do_wait", **more)

    waits = (within("Condition.wait", "threading.py"), at(4, "pop"))
    serves = (within("select", "selectors.py"), within("serve_forever", "socketserver.py"), at(11, "<module>"))
    samples = (within("Condition.wait", "threading.py"), at(6, "sample"))
    server = one(200, serves, waits, waits, *([samples] if works else []), listens=(80,))
    reads = (within("SocketIO.readinto", "socket.py"), at(8, "ask"))
    clients = [one(pid, (*reads, at(n, "<module>")), peers=(80,)) for pid, n in ((301, 9), (302, line))]
    verdict = judge(Snapshot(processes=(server, *clients), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("rollout blocked", pids)
    if len(pids) > 1:
        assert verdict.sites == ("train.py:10", "train.py:4", "train.py:8", "train.py:9")


def test_a_client_that_polls_a_server_may_wait_for_one_whose_handler_waits() -> None:
    text = (
        "def pop(self, key):\n    while not self.lists[key]:\n        self.changed.wait()\n"
        "def handle(self):\n    for line in self.rfile:\n        self.answer(line)\n"
        "def sample():\n    while ask('status') != 'done':\n        sleep(0.2)\n"
        "key = ask('prompts')\nserver.serve_forever()\n"
    )
    serves = (within("select", "selectors.py"), within("serve_forever", "socketserver.py"), at(11, "<module>"))
    waits = (within("Condition.wait", "threading.py"), at(3, "pop"))
    reads = within("SocketIO.readinto", "socket.py")
    handlers = [
        Thread(name=f"T{n}", os_id=n, frames=frames) for n, frames in enumerate((waits, (reads, at(5, "handle"))))
    ]
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(main_in(*serves), *handlers)) for n in range(6))
    server = replace(below(101), looks=looks, listens=(80,), peers=(501, 502))
    trainer, agent = below(100, at(9, "sample")), below(102, reads, at(10, "<module>"), peers=(80,))
    verdict = judge(Snapshot(processes=(trainer, server, agent), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("rollout blocked", (100, 102))
    assert "no client is left to bring it. It is asked again and again at train.py:9" in verdict.explanation


@pytest.mark.parametrize("does, idle", [("self.entries.pop(0)", True), ("if self.version() > 3: return", False)])
def test_a_thread_that_tidies_up_makes_no_service_busy(does: str, idle: bool) -> None:
    text = f"def tidy(self):\n    while not self.stopping.wait(30):\n        {does}\nserver.serve_forever()\n"
    serves = (within("select", "selectors.py"), within("serve_forever", "socketserver.py"), at(4, "<module>"))
    tidies = (within("Condition.wait", "threading.py"), within("Event.wait", "threading.py"), at(2, "tidy"))
    threads = (main_in(*serves), Thread(name="tidy", os_id=101, frames=tidies))
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=threads) for n in range(6))
    service = Process(pid=100, looks=looks, listens=(8000,), waits_in="futex_do_wait")
    verdict = judge(Snapshot(processes=(service,), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern == "healthy") is idle


@pytest.mark.parametrize("step, known, pattern", [(1, False, "slow"), (0, False, "external wait"), (1, True, "cycle")])
def test_of_two_that_seem_to_wait_for_one_another_one_that_moves_is_slow(step: int, known: bool, pattern: str) -> None:
    text = "answer = file.readline()\nreply = sys.stdin.readline()\n"
    reads = (within("SocketIO.readinto", "socket.py"), at(1, "ask"))
    looks, served = [], []
    for n in range(6):
        looks.append(
            Look(at=0.5 * n, state="S", switches=7, threads=(Thread(name="MainThread", os_id=100, frames=reads),))
        )
        frames = (at(2, "decode", **{"self.tokens": f"{9 * step * n}"}),)
        served.append(
            Look(at=0.5 * n, state="S", switches=7, threads=(Thread(name="MainThread", os_id=101, frames=frames),))
        )
    awaits = ((101, "r pipe:[7]", "w pipe:[7]"),) if known else ()
    client = Process(pid=100, looks=tuple(looks), peers=(80,), pipes=("pipe:[7]",), ends=("w pipe:[7]",))
    server = Process(pid=101, parent=100, looks=tuple(served), listens=(80,), pipes=("pipe:[7]",), awaits=awaits)
    server, client = (
        replace(each, command=("python",), waits_in=w) for each, w in ((server, "pipe_read"), (client, ""))
    )
    verdict = judge(Snapshot(processes=(client, server), seconds=3.0, sources={"train.py": text}))
    expected = ("slow", (101,)) if pattern == "slow" else ("external wait", (100, 101))
    assert (verdict.pattern, verdict.pids) == expected


@pytest.mark.parametrize("asks, site", [(False, "train.py:2"), (True, "train.py:1")])
def test_a_thread_that_reads_a_connection_that_nobody_uses_owes_no_answer(asks: bool, site: str) -> None:
    text = "for raw in self.rfile: pass\nrunning.wait()\nreturn self.file.readline()\n"

    def one(pid: int, *threads: tuple[Frame, ...]) -> Process:
        every = tuple(Thread(name=f"T{n}", os_id=pid + n, frames=frames) for n, frames in enumerate(threads))
        every = (replace(every[0], name="MainThread"), *every[1:])
        looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=every) for n in range(6))
        return Process(pid=pid, command=("python",), looks=looks, waits_in="futex_do_wait")

    reads, selects = within("SocketIO.readinto", "socket.py"), within("select", "selectors.py")
    event, serves = within("Event.wait", "threading.py"), within("serve_forever", "socketserver.py")
    server = one(200, (selects, serves, at(9)), (reads, at(1)), (event, at(2)))
    server = replace(server, listens=(80,), ends=("socket:[1]",), awaits=((201, "socket:[4]", "socket:[3]"),))
    asked = ((300, "socket:[2]", "socket:[1]"), *([(301, "socket:[3]", "socket:[4]")] if asks else []))
    client = replace(one(300, (reads, at(3))), peers=(80,), ends=("socket:[3]",), awaits=asked)
    verdict = judge(Snapshot(processes=(server, client), seconds=3.0, sources={"train.py": text}))
    assert site in verdict.sites


def test_a_barrier_says_how_many_threads_have_come() -> None:
    values = {"self.sync._parties": "8", "self.sync._count": "6"}
    frames = (within("Barrier._wait", "threading.py"), at(1, **values))
    looks = tuple(
        Look(at=0.5 * n, state="S", switches=7, threads=(Thread(name="MainThread", os_id=100, frames=frames),))
        for n in range(6)
    )
    waits = replace(rank(0, 1), rank=None, world=None, looks=looks, waits_in="futex_do_wait")
    verdict = judge(Snapshot(processes=(waits,), seconds=3.0, sources={"train.py": "self.sync.wait()\n"}))
    assert "It opens when 8 threads have come, and 6 have." in verdict.explanation


def test_a_process_that_polls_is_shown_the_old_exception_at_the_end_of_its_log() -> None:
    error = "sqlite3.IntegrityError: UNIQUE constraint failed"
    polls = replace(rank(0, 2), rank=None, world=None, old_error=error)
    sources = {"train.py": "while not ready():\n    time.sleep(1)\n"}
    verdict = judge(Snapshot(processes=(polls,), seconds=3.0, sources=sources))
    assert verdict.pattern == "external wait"
    assert f"Its log ends with {error!r}" in verdict.explanation


def test_a_list_of_an_attribute_that_grows_is_accepted_work() -> None:
    looks = []
    for n in range(6):
        values = {"len(buffer.items)": str(5 + n // 3), "buffer.rejected": str(20 * n)}
        frame = Frame(function="sample", file="train.py", line=8, locals=values)
        looks.append(Look(at=0.5 * n, state="S", threads=(Thread(name="MainThread", os_id=100, frames=(frame,)),)))
    sampling = replace(rank(0, 8), rank=None, world=None, looks=tuple(looks))
    assert judged(sampling).pattern == "healthy"


@pytest.mark.parametrize("written, pattern", [(10, "healthy"), (0, "rollout blocked")])
def test_a_filter_that_also_counts_what_it_keeps_rejects_not_everything(written: int, pattern: str) -> None:
    text = "for row in rows:\n    if long(row):\n        skipped += 1\n        continue\n    written += 1\n"
    looks = []
    for n in range(6):
        values = {"skipped": str(20 * n), "written": str(written * n)}
        frame = Frame(function="select", file="train.py", line=2, locals=values)
        looks.append(Look(at=0.5 * n, state="S", threads=(Thread(name="MainThread", os_id=100, frames=(frame,)),)))
    filters = replace(rank(0, 2), rank=None, world=None, looks=tuple(looks))
    assert judge(Snapshot(processes=(filters,), seconds=3.0, sources={"train.py": text})).pattern == pattern


TWICE = (  # the second test must not pass for one that keeps
    "        if self.cut():\n            self.dropped += 1\n            continue\n"
    "        if self.flat():\n            self.dropped += 1\n            continue\n        await self.out.put(1)\n"
)
KEEPS = "        self.tried += 1\n        if self.flat():\n            continue\n        self.kept += 1\n"
ONCE = "        if self.flat():\n            self.dropped += 1\n            continue\n        self.put()\n"


@pytest.mark.parametrize("fault", ["", "unread", "another object"])
@pytest.mark.parametrize("rounds, counter", [(ONCE, "dropped"), (TWICE, "dropped"), (KEEPS, "tried")])
def test_a_filter_in_a_coroutine_rejects_everything_although_its_counter_changes_too_fast_for_a_look(
    rounds: str, counter: str, fault: str
) -> None:
    text = (
        "async def make():\n    await asyncio.sleep(1)\nasync def work(self):\n    while True:\n        await make()\n"
    )
    text += f"{rounds}async def train(self):\n    batch = await self.out.get()\nasyncio.run(main())\n"
    end = text.count("\n")
    main = main_in(within("BaseEventLoop._run_once", "asyncio/base_events.py"), at(end, "<module>"))
    reads = coroutine(end - 1, "train", within("Queue.get", "asyncio/queues.py"))
    looks = []
    for n in range(18):
        values = {"self.kept": "4", f"self.{counter}": str(9999 if n == 16 and "object" in fault else 300 + 50 * n)}
        if n == 17 and fault == "unread":
            del values[f"self.{counter}"]
        works = coroutine(5, "work", at(2, "make"), name="worker")
        works = replace(works, at=7, frames=(works.frames[0], at(5, "work", **values)))
        looks.append(Look(at=0.5 * n, state="S", switches=7 + 90 * n, threads=(main, reads, works)))
    process = replace(rank(0, 2), rank=None, world=None, looks=tuple(looks))
    verdict = judge(Snapshot(processes=(process,), seconds=9.0, sources={"train.py": text}))
    assert (verdict.pattern, f"self.{counter}" in verdict.explanation) == ("rollout blocked", True)
    assert (verdict.sites == ("train.py:6",)) == (rounds == ONCE)


@pytest.mark.parametrize("function, pattern", [("finalize_metrics", "collective mismatch"), ("shutdown", "cleanup")])
def test_a_function_that_the_training_loop_calls_each_round_is_no_cleanup_for_its_name(
    function: str, pattern: str
) -> None:
    text = f"def {function}():\n    dist.all_reduce(t)\nfor step in range(9):\n    {function}()\n    dist.barrier()\n"
    first, second = rank(0, 2, "all_reduce"), rank(1, 5, "barrier")
    frames = (*first.looks[0].threads[0].frames, Frame(function="<module>", file="train.py", line=4, locals={}))
    looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in first.looks)
    snapshot = Snapshot(processes=(replace(first, looks=looks), second), seconds=3.0, sources={"train.py": text})
    assert judge(snapshot).pattern.startswith(pattern)


@pytest.mark.parametrize("raised, pattern", [("ValueError", "cleanup deadlock"), ("None", "collective mismatch")])
def test_a_callback_of_an_exit_stack_is_cleanup_if_there_was_an_exception(raised: str, pattern: str) -> None:
    left = within("_BaseExitStack._create_cb_wrapper.<locals>._exit_wrapper", "contextlib.py", exc_type=raised)
    first, second = rank(0, 5, "all_reduce"), rank(1, 9, "barrier")
    frames = (*second.looks[0].threads[0].frames, left)
    looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in second.looks)
    assert judged(first, replace(second, looks=looks)).pattern == pattern


@pytest.mark.parametrize("cleaning, ranks", [((3,), (3,)), ((1, 2, 3), (0,)), ((2, 3), (2, 3))])
def test_of_most_ranks_in_a_finally_the_one_that_still_trains_is_at_fault(
    cleaning: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    text = "try:\n    for row in rows[rank::4]:\n        dist.all_reduce(row)\nfinally:\n    dist.barrier()\n"
    every = [
        rank(n, 5 if n in cleaning else 3, "barrier" if n in cleaning else "all_reduce", world=4) for n in range(4)
    ]
    verdict = judge(Snapshot(processes=tuple(every), seconds=3.0, sources={"train.py": text}))
    pattern = "cleanup deadlock" if ranks == cleaning else "collective mismatch"
    assert (verdict.pattern, verdict.ranks) == (pattern, ranks)


def test_a_rank_that_joins_a_group_with_an_engine_is_at_fault_for_the_others_barrier() -> None:
    text = "if rank == 0:\n    init_custom_process_group(url)\ndist.barrier()\n"
    meets = Frame(function="_create_c10d_store", file="/x/torch/distributed/rendezvous.py", line=1)
    joins = rank(0, 2)
    frames = (meets, joins.threads[0].frames[-1])
    looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in joins.looks)
    joins = replace(joins, looks=looks, inside=Inside(groups=(Group(at=64, name="0", members=(0, 1, 2)),)))
    others = [rank(number, 3, "barrier", world=3) for number in (1, 2)]
    first = replace(joins, world=3)
    verdict = judge(Snapshot(processes=(first, *others), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("initialisation", (0,)), verdict


@pytest.mark.parametrize("op, pattern", [("all_gather", "shape mismatch"), ("all_gather_object", "same collective")])
def test_the_sizes_of_pickled_objects_are_no_shapes(op: str, pattern: str) -> None:
    ranks = [rank(n, 5, op, world=3, **{"shape(input_tensor)": f"[{70 + (n == 1)}]"}) for n in range(3)]
    assert judged(*ranks).pattern.startswith(pattern)


def test_what_the_multiprocess_package_does_is_what_multiprocessing_does() -> None:
    def about(package: str) -> Verdict:
        manager = below(101, within("Event.wait", "threading.py"), within("serve_forever", f"{package}/managers.py"))
        asks = (within("Connection._recv", f"{package}/connection.py"), within("_callmethod", f"{package}/managers.py"))
        parent = below(100, *asks, at(4))
        return judge(Snapshot(processes=(parent, manager), seconds=3.0, sources={"train.py": SCRIPT}))

    ours, theirs = about("multiprocessing"), about("multiprocess")
    assert (theirs.pattern, theirs.pids, theirs.explanation) == (ours.pattern, ours.pids, ours.explanation)
    assert theirs.pids == (100,)


@pytest.mark.parametrize("does, line", [("self.pool.submit(self.episode)", 4), ("self.beat(self.episodes)", 9)])
def test_a_thread_that_hands_on_what_fills_the_main_threads_queue_explains_its_wait(does: str, line: int) -> None:
    text = (
        "def dispatch(self):\n    while True:\n        while self.room() <= 0:\n            time.sleep(0.05)\n"
        f"        {does}\ndef episode(self):\n    self.results.put(1)\n"
        "def wait(self):\n    rows.append(self.results.get())\n"
    )
    gets = main_in(within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"), at(9, "wait"))
    sleeps = Thread(name="dispatcher", os_id=101, frames=(at(4, "dispatch"),))
    assert watched(text, *([gets, sleeps] for _ in range(6))).sites == (f"train.py:{line}",)


@pytest.mark.parametrize("does, line", [("write(state)", 5), ("published.set()", 3)])
def test_an_idle_thread_explains_the_main_threads_wait_only_if_it_could_end_it(does: str, line: int) -> None:
    text = f"def saver():\n    while True:\n        state = saves.get()\n        {does}\npublished.wait()\n"
    waits = (within("Condition.wait", "threading.py"), within("Event.wait", "threading.py"))
    gets = (within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"))
    threads = (
        Thread(name="MainThread", os_id=100, frames=(*waits, at(5, "<module>"))),
        Thread(name="saver", os_id=101, frames=(*gets, at(3, "saver"))),
    )
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=threads) for n in range(6))
    program = Process(pid=100, looks=looks, waits_in="futex_do_wait", command=("python",))
    assert judge(Snapshot(processes=(program,), seconds=3.0, sources={"train.py": text})).sites == (f"train.py:{line}",)


@pytest.mark.parametrize("step, rows, blocked", [(0, [48] * 6, True), (1, [48] * 6, False), (0, [*range(6)], False)])
@pytest.mark.parametrize(
    "waits", ["while len(self.rows) < 64: self.full.wait()", "self.full.wait_for(lambda: len(self.rows) >= 64)"]
)
def test_a_thread_woken_up_for_a_condition_that_never_holds_is_blocked(
    step: int, rows: list[int], blocked: bool, waits: str
) -> None:
    text = f"def take(self):\n    {waits}\ndef learn(buffer):\n    for update in range(9):\n        buffer.take()\n"
    looks = []
    for n in range(6):
        taking = at(2, "take", **{"len(self.rows)": f"{rows[n]}", "self.seen": f"{9 * n}"})
        frames = (within("Condition.wait", "threading.py"), taking, at(5, "learn", update=f"{step * n}"))
        threads = (Thread(name="MainThread", os_id=100, frames=frames),)
        looks.append(Look(at=0.5 * n, state="S", switches=7 + 20 * n, threads=threads))
    program = Process(pid=100, looks=tuple(looks), waits_in="futex_do_wait", command=("python",))
    verdict = judge(Snapshot(processes=(program,), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.sites) == (("rollout blocked", ("train.py:2",)) if blocked else ("healthy", ()))


def test_what_another_thread_counts_is_no_progress_of_a_process_that_waits_for_its_child() -> None:
    looks, locked = [], []
    poll = within("Popen.poll", "multiprocessing/popen_fork.py")
    for n in range(6):
        frames = (poll, at(9, "<module>", **{"journal.flushed": str(n)}))
        joins = Thread(name="MainThread", os_id=100, frames=frames)
        looks.append(Look(at=0.5 * n, state="S", switches=7, threads=(joins,)))
        acquires = Thread(name="MainThread", os_id=101, frames=(at(2, "count"),))
        locked.append(Look(at=0.5 * n, state="S", switches=7, threads=(acquires,)))
    parent = Process(pid=100, looks=tuple(looks), waits_in="do_wait", command=("python",))
    child = Process(pid=101, parent=100, looks=tuple(locked), waits_in="futex_do_wait", command=("python",))
    text = "def count():\n    with mutex:\n        pass\n"
    verdict = judge(Snapshot(processes=(parent, child), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.pids) == ("lock or I/O", (101,))


def test_of_workers_that_starve_on_one_queue_one_is_blamed_and_not_what_joins_them() -> None:
    text = "def work():\n    while True:\n        item = items.get()\n        item.run()\nthread.join()\n"
    gets = (within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"))
    joins = (within("Thread._wait_for_tstate_lock", "threading.py"), within("Thread.join", "threading.py"))
    threads = (
        Thread(name="MainThread", os_id=100, frames=(*joins, at(5, "<module>"))),
        *(Thread(name=f"worker-{n}", os_id=100 + n, frames=(*gets, at(3, "work"))) for n in (1, 2)),
    )
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=threads) for n in range(6))
    program = Process(pid=100, looks=looks, waits_in="futex_do_wait", command=("python",))
    assert judge(Snapshot(processes=(program,), seconds=3.0, sources={"train.py": text})).sites == ("train.py:3",)


def test_a_program_of_a_shell_that_has_ended_is_no_death() -> None:
    waits = replace(rank(0, 2), rank=None, world=None, waits_in="do_wait")
    shell = Process(pid=200, parent=100, looks=tuple(Look(at=0.5 * n, state="S") for n in range(6)), command=("sh",))
    ended = Process(pid=201, parent=200, looks=(Look(at=0.0, state="R"), Look(at=2.5, state="X")), command=("sleep",))
    verdict = judge(Snapshot(processes=(waits, shell, ended), seconds=3.0, sources={"train.py": "\nrun('sh')\n"}))
    assert verdict.pattern != "dead"
    worker = replace(ended, command=("python", "worker.py"))
    assert judge(Snapshot(processes=(waits, shell, worker), seconds=3.0)).pattern == "dead"
    unread = Process(pid=202, looks=(Look(at=0.0, state="X"), Look(at=2.5, state="X")))
    assert judge(Snapshot(processes=(waits, shell, unread), seconds=3.0)).pattern != "dead"


def test_threads_without_a_number_are_not_taken_for_one_that_moves() -> None:
    """py-spy gives no numbers for Python 3.10."""
    text = "one.wait()\ntwo.wait()\nthree.wait()\n"
    waits = (within("Condition.wait", "threading.py"), within("Event.wait", "threading.py"))
    names = ("MainThread", "a", "b")
    threads = [Thread(name=name, os_id=0, frames=(*waits, at(n + 1))) for n, name in enumerate(names)]
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=tuple(threads)) for n in range(6))
    program = Process(pid=100, looks=looks, waits_in="futex_do_wait", command=("python",))
    verdict = judge(Snapshot(processes=(program,), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == "rollout blocked"


@pytest.mark.parametrize(
    "loop, body, expected",
    [
        ("while self.running:", "        await push()\n        await asyncio.sleep(5)\n", True),
        (
            "while True:",
            "        try:\n            await asyncio.sleep(5)\n        except CancelledError:\n            raise\n",
            True,
        ),
        ("while len(batch) < 8:", "        await asyncio.sleep(5)\n", False),
        ("while True:", "        await step()\n        if done:\n            break\n", False),
    ],
)
def test_a_loop_that_pauses_until_it_is_stopped_is_periodic(loop: str, body: str, expected: bool) -> None:
    assert source.periodic(f"async def run():\n    {loop}\n{body}", 3) == expected


def test_a_program_that_has_started_the_other_ranks_and_takes_part_is_rank_0() -> None:
    text = "import torch.distributed as dist\nstore = dist.TCPStore(host, 1, 4)\nfor rank in range(1, 4):\n    "
    text += "batch = store.get(key(rank))\ndef work(rank):\n    weights = store.get(key(0))\n"

    def one(pid: int, line: int, rank: str, state: str = "S") -> Process:
        frame = Frame(function="run", file="train.py", line=line, locals={"rank": rank, "world": "4"})
        threads = () if state == "Z" else (Thread(name="MainThread", os_id=pid, frames=(frame,)),)
        looks = tuple(Look(at=0.5 * n, state=state, switches=7, threads=threads) for n in range(6))
        return Process(pid=pid, parent=104 if pid > 104 else 0, looks=looks, command=("python",))

    processes = (one(104, 4, "2"), one(105, 6, "1"), one(106, 6, "2", "Z"), one(107, 6, "3"))
    verdict = judge(Snapshot(processes=processes, seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("dead", (2,))


def test_a_program_that_goes_over_its_ranks_is_none_of_them() -> None:
    text = "import torch.distributed as dist\nfor rank in range(1, 4):\n    batch = store.get(key(rank))\n"
    frame = Frame(function="step", file="train.py", line=3, locals={"rank": "2"})
    threads = (Thread(name="MainThread", os_id=104, frames=(frame,)),)
    trainer = Process(pid=104, looks=(Look(at=0.0, threads=threads),), command=("python",))
    assert with_ranks([trainer], {"train.py": text})[0][0].rank is None
    assert with_ranks([trainer], {"train.py": text.replace("for rank in", "for other in")})[0][0].rank == 2


@pytest.mark.parametrize(
    "loop, polls_file",
    [("while step < 10", False), ("while not os.path.exists(path)", True), ("while log_stat(1)", False)],
)
def test_a_loop_polls_a_file_if_it_calls_what_looks_at_files(loop: str, polls_file: bool) -> None:
    text = f"{loop.replace('step', 'global_step')}:\n    time.sleep(1)\n"
    verdict = judge(Snapshot(processes=(rank(0, 2), rank(1, 9, "barrier")), seconds=3.0, sources={"train.py": text}))
    assert ("polls for a file" in verdict.explanation) == polls_file and verdict.ranks == (0,)


@pytest.mark.parametrize(
    "around, gpus, pattern",
    [("", (), "slow"), ("while True:\n    ", (), "cpu"), ("", ("/dev/nvidia0",), "cpu")],
)
def test_a_rank_in_one_call_of_a_numeric_library_is_slow_unless_it_may_spin_for_its_gpu(
    around: str, gpus: tuple[str, ...], pattern: str
) -> None:
    text = f"import torch\n{around}torch.linalg.svd(weights)\n"
    line = 3 if around else 2
    computes = rank(0, line, state="R")
    looks = tuple(replace(look, switches=0, cpu_s=look.at) for look in computes.looks)
    first = replace(computes, looks=looks, waits_in="", gpus=gpus)
    verdict = judge(Snapshot(processes=(first, rank(1, 9, "barrier")), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == (pattern, (0,))


def test_a_group_in_memory_decides_who_belongs_to_it() -> None:
    pair = Group(at=64, name="5", members=(1, 2), rank=1)
    waiting = rank(1, 6, "all_reduce", world=3)
    looks = [
        replace(
            look,
            threads=(
                replace(
                    look.threads[0],
                    frames=(replace(look.threads[0].frames[0], addresses={"group": 64}), look.threads[0].frames[1]),
                ),
            ),
        )
        for look in waiting.looks
    ]
    inside = replace(waiting, looks=tuple(looks), inside=Inside(groups=(pair,)))
    assert judged(rank(0, 9, "barrier", world=3), inside, rank(2, 8, world=3)).ranks == (2,)


def test_a_stopped_rank_is_at_fault_before_everything_else() -> None:
    verdict = judged(rank(0, 5, "all_reduce"), rank(1, 9, "barrier", state="T"))
    assert (verdict.pattern, verdict.ranks, verdict.next) == ("stopped", (1,), "kill -CONT 101")
    assert "debugger" in judged(rank(0, 5, "all_reduce"), rank(1, 9, "barrier", state="t")).next  # no signal helps


def test_a_job_that_came_to_a_complete_hang_a_moment_ago_is_watched_on() -> None:
    def one(number: int, still: int) -> Process:
        """Return a rank that went through steps, and has been in another collective for the last looks."""
        pid = (1 << 22) + number  # no process has such a pid
        last = rank(number, 9 if number else 5, "barrier" if number else "all_reduce").looks[0]
        ends = replace(last, threads=(replace(last.threads[0], os_id=pid),))
        moves = replace(rank(number, 5, "all_reduce").threads[0], os_id=pid)
        looks = []
        for n in range(12):
            frame = replace(moves.frames[-1], locals={"step": str(n)})
            thread = replace(moves, frames=(moves.frames[0], frame))
            look = ends if n >= 12 - still else replace(ends, threads=(thread,))
            looks.append(replace(look, at=0.5 * n, switches=20 * min(n, 12 - still)))
        return replace(rank(number, 5), pid=pid, looks=tuple(looks))

    begun = [replace(one(number, 12), looks=one(number, 12).looks[:1]) for number in (0, 1)]
    assert not enough(begun, 5.5) and not enough(begun, 10.5)  # on a busy machine a first look can take that long
    assert enough([one(0, 0), one(1, 0)], 5.5)
    assert not enough([one(0, 2), one(1, 2)], 5.5)


def test_a_rank_without_a_process_is_dead() -> None:
    verdict = judged(rank(0, 5, "all_reduce", world=3), rank(2, 5, "all_reduce", world=3))
    assert (verdict.pattern, verdict.ranks) == ("dead", (1,))


def test_ranks_that_were_merged_while_they_join_keep_their_numbers() -> None:
    joined = [rank(n, 5, "init_process_group", world=7, rank=f"{n}", world_size="7") for n in range(6)]
    verdict = judge(to_judge(reduced(Snapshot(processes=tuple(joined), sources={"train.py": SCRIPT}))))
    assert (verdict.pattern, verdict.ranks) == ("initialisation", (6,)) and "joined as" not in verdict.explanation


def joining(pid: int, number: int | str, port: int = 29500) -> Process:
    """Return a process that a program started, and that is in init_process_group as a rank of three."""
    address = f'"tcp://127.0.0.1:{port}"'
    one = rank(pid - 100, 5, "init_process_group", rank=f"{number}", world_size="3", init_method=address)
    user = replace(one.threads[0].frames[-1], locals={"local_rank": "0"})
    looks = tuple(
        replace(x, threads=(replace(x.threads[0], frames=(x.threads[0].frames[0], user)),)) for x in one.looks
    )
    return replace(one, rank=None, world=None, looks=looks, parent=99)


def test_two_processes_that_join_as_one_rank_are_at_fault_for_the_rank_that_nobody_is() -> None:
    sources = {"train.py": SCRIPT}
    verdict = judge(Snapshot(processes=(joining(100, 0), joining(101, 1), joining(102, 1)), sources=sources))
    assert (verdict.pattern, verdict.ranks, verdict.pids) == ("initialisation", (1,), (101, 102))
    assert "Pid 101 and pid 102 each joined as rank 1, and nobody as rank 2." in verdict.explanation
    assert verdict.sites == ("train.py:5",)
    # The rank that torch was given counts, and not a variable that is 0 everywhere.
    verdict = judge(Snapshot(processes=(joining(100, 0), joining(101, 2)), sources=sources))
    assert (verdict.pattern, verdict.ranks) == ("initialisation", (1,))
    assert "Rank 1 never joined: there is no such process" in verdict.explanation
    assert verdict.next == "clew hang --stacks --pid 100"


def test_a_process_that_joins_elsewhere_or_as_an_unknown_rank_is_not_called_the_same_one_or_absent() -> None:
    other = joining(102, 1, port=29600)
    unknown = joining(102, "?")
    for process in (other, unknown, replace(joining(102, 1), peers=(29600,))):
        processes = (joining(100, 0), replace(joining(101, 1), peers=(29500,)), process)
        verdict = judge(Snapshot(processes=processes, sources={"train.py": SCRIPT}))
        assert verdict.pattern == "initialisation" and "each joined" not in verdict.explanation
        assert "no such process" not in verdict.explanation and "pid 102" in verdict.explanation


def test_a_receiver_waits_for_its_source() -> None:
    verdict = judged(rank(0, 7, "recv", src="1"), rank(1, 8))
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (1,))


def test_nothing_readable_is_undetermined() -> None:
    look = Look(at=0.0, state="S", error="permission denied")
    verdict = judged(Process(pid=5, rank=0, command=("python",), looks=(look,)))
    assert (verdict.pattern, verdict.exit_code) == ("undetermined", 3)
    assert "permission denied" in verdict.notes[0]


def test_a_counter_that_advances_is_progress() -> None:
    one = rank(0, 8)
    looks = []
    for n, look in enumerate(one.looks):
        frame = replace(look.threads[0].frames[-1], locals={"step": str(n)})
        looks.append(replace(look, threads=(replace(look.threads[0], frames=(frame,)),)))
    assert judged(replace(one, looks=tuple(looks), world=1)).pattern == "healthy"


def test_a_counter_that_goes_round_in_a_while_loop_is_no_progress() -> None:
    text = "def find():\n    while tokens[place] != 7:\n        place = (place + 1) % len(tokens)\n"
    one = rank(1, 8)
    looks = []
    for n, place in enumerate((0, 2, 1, 0, 1, 2)):
        frame = Frame(function="find", file="train.py", line=3, locals={"place": str(place)})
        thread = Thread(name="MainThread", os_id=101, active=True, frames=(frame,))
        looks.append(Look(at=0.5 * n, state="R", cpu_s=0.5 * n, switches=7, threads=(thread,)))
    spinning = replace(one, looks=tuple(looks), waits_in="")
    waiting = rank(0, 2, "all_reduce")
    verdict = judge(Snapshot(processes=(waiting, spinning), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("cpu", (1,))


@pytest.mark.parametrize("last, stopped", [((9, 9, 9), True), ((9, 10, 10), False)])
def test_a_job_has_just_stopped_only_if_no_number_changed_in_the_last_three_looks(
    last: tuple[int, ...], stopped: bool
) -> None:
    text = "def count():\n    while number < 99:\n        number = number + work()\n"
    looks = []
    for n, number in enumerate((*range(9), *last)):
        frame = Frame(function="count", file="train.py", line=3, locals={"number": str(number)})
        thread = Thread(name="MainThread", os_id=101, active=True, frames=(frame,))
        looks.append(Look(at=0.5 * n, state="R", cpu_s=0.5 * n, switches=7, threads=(thread,)))
    counting = replace(rank(1, 8), looks=tuple(looks), waits_in="")
    waiting = rank(0, 2, "all_reduce")
    seen = Snapshot(processes=(waiting, counting), seconds=6.0, sources={"train.py": text})
    assert judge(seen).pattern == "slow" and just_stopped(seen) is stopped


def test_a_snapshot_survives_json() -> None:
    import json

    snapshot = Snapshot(processes=(rank(0, 5, "all_reduce"),), sources={"train.py": SCRIPT})
    assert snapshot_from(json.loads(json.dumps(snapshot.as_dict()))) == snapshot


def test_a_wait_within_another_call_has_the_receiver_of_the_method_that_runs() -> None:
    text = "rows.append(self.answers.get())\nwith lock:\n    pass\nrows.append(take())\n"
    assert (receiver(text, 1, "get"), receiver(text, 1), receiver(text, 2)) == ("self.answers", "rows", "lock")
    assert receiver(text, 4, "get") == "rows"


def test_groups_are_evaluated_without_running_code() -> None:
    assert new_group_members(SCRIPT, "tp", {}) == (0, 1)
    assert new_group_members(SCRIPT, "dp", {"world_size": 4}) == (0, 2)
    assert new_group_members("g = new_group(os.listdir())", "g", {}) is None
    assert new_group_members("g = new_group(range(10**12))", "g", {}) is None


def test_a_line_knows_its_branch_and_cleanup() -> None:
    text = "try:\n    train()\nfinally:\n    dist.barrier()\nif rank == 0:\n    save()\n"
    assert source.in_cleanup(text, 4) == "finally" and source.in_cleanup(text, 2) == ""
    assert source.branch_of_rank(text, 6) == "alone" and source.branch_of_rank(text, 4) == ""
    for one in ("rank == 0", "is_main", "not rank", "0 == rank", "self.is_main and x", "rank < 1"):
        assert source.branch_of_rank(f"if {one}:\n    save()\n", 2) == "alone", one
    derived = "me = int(os.environ['RANK'])\nmaster = me == 0\nif master and step == 9:\n    save()\n"
    assert source.branch_of_rank(derived, 4) == "alone"
    assert source.branch_of_rank("if cfg.lora_rank == 0:\n    save()\n", 2) == ""
    for leaves, branch in {"return": "alone", "return log()": "", "print(1)": ""}.items():
        guard = f"def save():\n    if not is_main:\n        {leaves}\n    dist.barrier()\n"
        assert source.branch_of_rank(guard, 4) == branch, leaves
    for guard, branch in {
        "rank != 0": "alone",
        "i % world != rank": "",
        "not self.rerank": "",
        "rank > 1": "",
        "not remaining_ranks": "",
        "dead_ranks != 0": "",
        "get_rank() != 0": "alone",
    }.items():
        text = f"for i in rows:\n    if {guard}: continue\n    dist.barrier()\n"
        assert source.branch_of_rank(text, 3) == branch, guard
    for others in ("rank != 0", "not is_main", "self.rank", "local_rank", "0 < rank", "rank >= 1"):
        text = f"if {others}:\n    train()\nelse:\n    save()\n"
        assert (source.branch_of_rank(text, 2), source.branch_of_rank(text, 4)) == ("", "side"), others


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("dist.all_reduce(x)\nraise", "except"),
        ("if ok:\n    dist.all_reduce(x)\nraise", "except"),
        ("dist.all_reduce(x)\nsys.exit(1)", source.WITHOUT_RAISE),
        ("dist.barrier()", source.WITHOUT_RAISE),
        ("self.save_checkpoint()\nif fatal:\n    raise", "except"),
        ("dist.all_reduce(x)", ""),
        ("return train(half) + train(half)\nraise", ""),
        ("if retry:\n    train(half)\n    return\nraise", ""),
        ("for half in halves:\n    if ok:\n        train(half)\n        break\nraise", "except"),
    ],
)
def test_an_except_is_cleanup_if_it_ends_in_a_raise_or_calls_a_cleanup(handler: str, expected: str) -> None:
    body = handler.replace("\n", "\n        ")
    text = f"def step():\n    try:\n        train(batch)\n    except MemoryError:\n        {body}\n"
    call = next(n for n, line in enumerate(text.splitlines(), 1) if n > 4 and "(" in line)
    assert source.in_cleanup(text, call) == expected and source.in_handler(text, call)
    assert not source.in_handler(text, 3)


def test_a_retry_in_an_except_is_a_mismatch_and_a_cleanup_without_raise_hides_nothing() -> None:
    def with_handler(op: str) -> Verdict:
        text = f"try:\n    dist.all_reduce(x)\nexcept MemoryError:\n    dist.{op}(x)\ndist.barrier()\n"
        ranks = (rank(0, 5, "barrier", world=3), rank(1, 4, op, world=3), rank(2, 5, "barrier", world=3))
        return judge(Snapshot(processes=ranks, sources={"train.py": text}))

    verdict = with_handler("all_reduce")
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", (1,))
    verdict = with_handler("monitored_barrier")
    assert (verdict.pattern, verdict.ranks) == ("cleanup deadlock", (1,))
    assert "is not raised again" in verdict.explanation and "hidden" not in verdict.explanation


def test_sinks_are_where_the_waiting_ends() -> None:
    assert sinks({0: {2, 3}, 1: {2, 3}, 3: {2}}) == [{2}]
    assert sinks({0: {1}, 1: {0}, 2: {0}}) == [{0, 1}]


@given(st.sets(st.integers(0, 40)))
def test_ranges_hold_each_rank_once(ranks: set[int]) -> None:
    pairs = equal_stacks.as_ranges(ranks)
    assert [n for first, last in pairs for n in range(first, last + 1)] == sorted(ranks)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(pairs))


def test_a_rank_that_imports_a_module_within_torch_is_in_no_collective() -> None:
    """DDP imports for seconds when it is made first, and with a cold disk for longer than one watches."""

    def importing(number: int) -> Process:
        one = rank(number, 5)
        torch = Frame(
            function="DistributedDataParallel.__init__",
            file="/x/site-packages/torch/nn/parallel/distributed.py",
            line=1,
        )
        load = Frame(function="_call_with_frames_removed", file="<frozen importlib._bootstrap>", line=241)
        looks = []
        for n, look in enumerate(one.looks):
            module = Frame(function=f"define_{n}", file="/x/site-packages/torch/_dynamo/config.py", line=n)
            thread = replace(look.threads[0], active=True, frames=(module, load, torch, *look.threads[0].frames))
            looks.append(replace(look, state="R", cpu_s=0.2 * n, threads=(thread,)))
        return replace(one, looks=tuple(looks), waits_in="")

    assert judged(importing(0), importing(1)).pattern == "healthy"


def with_locals(process: Process, **values: str) -> Process:
    """Return the rank with these local variables of its user's frame."""
    frames = (*process.threads[0].frames[:-1], replace(process.threads[0].frames[-1], locals=values))
    looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in process.looks)
    return replace(process, looks=looks)


@pytest.mark.parametrize("name", ["i", "self.step", "len(pending)", "shape(tensor)"])
def test_a_rank_that_deviates_is_found_when_equal_ranks_are_merged(name: str) -> None:
    def one(number: int) -> Process:
        values = {name: "[5]" if "shape" in name else "5"} if number == 5 else {name: "[4]" if "shape" in name else "4"}
        if "shape" in name:
            return rank(number, 5, "all_reduce", world=8, **values)
        return with_locals(rank(number, 5, "all_reduce", world=8), **values)

    alone = Snapshot(processes=tuple(map(one, range(8))), sources={"train.py": SCRIPT})
    merged = reduced(alone)
    assert len(merged.processes) == 3
    assert Report(merged).verdict.ranks == judge(alone).ranks == (5,)


def test_a_node_that_meets_at_another_port_is_found_when_equal_ranks_are_merged() -> None:
    def one(number: int) -> Process:
        at = {"hostname": "'node0'", "port": "29500" if number < 4 else "29501"}
        file = "/x/site-packages/torch/distributed/rendezvous.py"
        process = rank(number, 10, "all_reduce", world=8)
        meets = Frame(function="_create_c10d_store", file=file, line=1, locals=at)
        frames = (meets, process.threads[0].frames[-1])
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in process.looks)
        return replace(process, looks=looks)

    alone = Snapshot(processes=tuple(map(one, range(8))), sources={"train.py": SCRIPT})
    assert Report(reduced(alone)).verdict.ranks == judge(alone).ranks != ()


def test_the_next_command_keeps_the_users_own_numbers() -> None:
    command = ("python", "train.py", "--seed", "20240101")
    ranks = [rank(n, 5, "all_reduce" if n < 2 else "barrier", world=3) for n in range(3)]
    processes = tuple(replace(each, command=command) for each in ranks)
    report = Report(Snapshot(processes=processes, sources={"train.py": SCRIPT}))
    assert report.verdict.ranks == (2,)
    assert "--nproc-per-node 3 train.py --seed 20240101" in report.next
    fewer = [replace(rank(n, 5, "barrier" if n == 1 else "all_reduce", world=4), command=command) for n in range(4)]
    report = Report(Snapshot(processes=tuple(fewer), sources={"train.py": SCRIPT}))
    assert report.next.endswith("# uses 2 of 4 ranks; a mismatch raises")
    one_per_node = [replace(each, command=command, local_world=1) for each in ranks]
    assert (
        "--nproc-per-node 2 train" in Report(Snapshot(processes=tuple(one_per_node), sources={"train.py": SCRIPT})).next
    )
    joins = below(100, Frame(function="main", file="main.py", line=1), command=command)
    spawned = [replace(each, pid=200 + number, parent=100) for number, each in enumerate(ranks)]
    report = Report(Snapshot(processes=(joins, *spawned), sources={"train.py": SCRIPT}))
    assert "DETAIL python train.py --seed 20240101  #" in report.next


@pytest.mark.parametrize(
    "call, group",
    [
        ("dist.all_reduce(group_loss)", "world"),
        ("dist.all_reduce(group_loss, op, my_pg)", "my_pg"),
        ("dist.barrier(my_pg)", "my_pg"),
    ],
)
def test_a_group_is_an_argument_behind_the_tensor(call: str, group: str) -> None:
    operation = call.partition("(")[0].removeprefix("dist.")
    frame = Frame(function=operation, file=f"/x/{C10D}", line=1)
    thread, process = Thread(name="MainThread", os_id=100, frames=(frame, at(1))), rank(0, 5)
    place = Place(process=process, thread=thread, user=at(1), sources={"train.py": f"{call}\n"}, names={})
    assert group_of(frame, place)[0] == group


def test_what_torch_does_not_compare_is_no_mismatch_that_raises() -> None:
    command = ("python", "train.py")
    roots = [rank(n, 5, "broadcast", world=3, src="1" if n == 2 else "0") for n in range(3)]
    messages = [rank(0, 7, "send", dst="2", world=3), rank(1, 7, "recv", src="0", world=3)]
    messages.append(rank(2, 7, "recv", src="1", world=3))
    for ranks in (roots, messages):
        report = Report(Snapshot(processes=tuple(replace(each, command=command) for each in ranks)))
        assert report.verdict.exit_code == 1 and report.next.startswith("py-spy dump --locals --pid "), report.verdict
    assert report.verdict.runner_up == ""


def test_ranks_that_make_a_mesh_are_beyond_the_initialisation() -> None:
    ranks = [rank(n, 6, "new_group" if n < 2 else "broadcast", world=3) for n in range(3)]
    mesh = Frame(function="init_device_mesh", file="/x/torch/distributed/device_mesh.py", line=1)

    def making(one: Process) -> Process:
        inner, user = one.threads[0].frames
        frames = (inner, mesh, user)
        looks = tuple(replace(look, threads=(replace(look.threads[0], frames=frames),)) for look in one.looks)
        return replace(one, looks=looks)

    verdict = judged(*map(making, ranks[:2]), ranks[2])
    assert (verdict.pattern, verdict.ranks) == ("initialisation", (2,))
    assert "Ranks 0-1 are in new_group" in verdict.explanation


def test_a_client_is_served_on_its_own_host() -> None:
    def one(pid: int, host: str, listens: tuple[int, ...] = (), peers: tuple[int, ...] = ()) -> Actor:
        process = Process(pid=pid, host=host, looks=(Look(at=0.0, state="S"),), listens=listens, peers=peers)
        return Actor(process=process, activity=Activity(kind="http" if peers else "select"))

    clients = [one(1, "a", peers=(8000,)), one(11, "b", peers=(8000,))]
    servers = [one(2, "a", listens=(8000,)), one(12, "b", listens=(8000,))]
    edges = application_edges([*clients, *servers])
    assert edges[1] == {2} and edges[11] == {12}


def test_an_ended_thread_of_a_rank_that_waits_in_a_collective_is_not_the_cause() -> None:
    waits = replace(rank(0, 5, "all_reduce"), inside=Inside(ended_threads=("checkpoint writer",)))
    verdict = judged(waits, rank(1, 8))
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (1,))


ENDED = """def collect(out):
    out.put(1)
def save():
    write(checkpoint)
def learn(rollouts):
    batch = rollouts.get()
    updated.wait()
def share():
    answer.wait()
    rollouts.put(1)
async def rollout():
    raise ValueError("bad prompt")
"""


@pytest.mark.parametrize(
    "kind, ended, code, pattern, structural",
    [
        ("queue", "Thread-1 (collect)", "", "dead", False),
        ("queue", "Thread-1 (save)", "", "rollout blocked", False),
        ("queue and one that fills it", "Thread-1 (collect)", "", "rollout blocked", False),
        ("event", "Thread-1 (other)", "", "rollout blocked", False),
        ("event", "", "0", "rollout blocked", False),
        ("event", "", "1", "dead", True),
        ("gather", "", "", "rollout blocked", False),
        ("task", "", "", "dead", True),
    ],
)
def test_what_has_ended_normally_explains_only_a_wait_that_it_could_have_ended(
    kind: str, ended: str, code: str, pattern: str, structural: bool
) -> None:
    frames = (within("Condition.wait", "threading.py"), within("Queue.get", "queue.py"), at(6, "learn"))
    if kind == "event":
        frames = (within("Event.wait", "threading.py"), at(7, "learn"))
    threads = [Thread(name="MainThread", os_id=100, frames=frames)]
    if kind.endswith("fills it"):
        fills = (within("Event.wait", "threading.py"), at(9, "share"))
        threads.append(Thread(name="Thread-2 (share)", os_id=101, frames=fills))
    elif kind in ("gather", "task"):
        failed = Thread(name="task Task-3", os_id=0, task=True, ended="ValueError", frames=(at(12, "rollout"),))
        waits = Thread(name="task Task-1", os_id=0, task=True, waiter="_GatheringFuture", frames=(at(7, "learn"),))
        threads += [failed, waits] if kind == "gather" else [failed]
    looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=tuple(threads)) for n in range(6))
    main = Process(pid=100, looks=looks, waits_in="futex_do_wait", inside=Inside(ended_threads=(ended,) * bool(ended)))
    zombie = Process(pid=101, parent=100, looks=(Look(at=2.5, state="Z"),), exit=f"with exit code {code}")
    seen = (main, zombie) if code else (main,)
    verdict = judge(Snapshot(processes=seen, seconds=3.0, sources={"train.py": ENDED}))
    assert (verdict.pattern, verdict.structural) == (pattern, structural)
    if pattern != "dead" and kind != "gather" and not kind.endswith("fills it"):
        assert "Beside it, " in verdict.explanation


@pytest.mark.parametrize(
    ("does", "pattern"),
    [
        ("self.pending.pop(number).set_result(text)", "dead"),
        ("self.pending.pop(number).append(text)", "rollout blocked"),
        ("future = self.pending[number]\n    future.set_exception(text)", "dead"),
        ("self.ready.set_result(text)", "rollout blocked"),
    ],
)
def test_a_thread_that_has_ended_explains_the_wait_for_a_future_that_it_took_from_a_table(
    does: str, pattern: str
) -> None:
    text = (
        f"def answers(self):\n    number, text = self.conn.recv()\n    {does}\n"
        f"Thread(target=self.answers, name='answers')\nanswer = self.submit(prompt).result()\n"
    )
    line = text.count("\n")
    future = (
        within("Condition.wait", "threading.py"),
        within("Future.result", "concurrent/futures/_base.py"),
        at(line),
    )
    ended = Inside(ended_threads=("answers",))
    verdict = judge(Snapshot(processes=(below(100, *future, inside=ended),), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern and "its thread answers" in verdict.explanation


@pytest.mark.parametrize("line, pattern", [(6, "dead"), (3, "rollout blocked")])
def test_a_worker_that_starves_at_the_same_place_does_not_feed_the_other_one(line: int, pattern: str) -> None:
    text = (
        "def feed(prompts):\n    prompts.put(row)\n    link.recv()\ndef answer(prompts, answers):\n    while True:\n"
        "        row = prompts.get()\n        answers.put(row)\nProcess(target=feed)\nProcess(target=answer)\n"
        "answers.get()\n"
    )
    gets = (within("Connection._recv", "multiprocessing/connection.py"), within("get", "multiprocessing/queues.py"))

    def one(pid: int, function: str, line: int, reads: int, *ends: str) -> Process:
        thread = Thread(name="MainThread", os_id=pid, frames=(*gets, at(line, function)))
        looks = tuple(Look(at=0.5 * n, state="S", switches=7, threads=(thread,)) for n in range(6))
        awaits = ((pid, f"r pipe:[{reads}]", f"w pipe:[{reads}]"),)
        return Process(pid=pid, parent=100, looks=looks, waits_in="pipe_read", awaits=awaits, ends=ends)

    pipes = ("w pipe:[1]", "w pipe:[2]")
    main = replace(one(100, "<module>", 10, 2, *pipes), parent=1)
    workers = [one(101, "answer", 6, 1, *pipes), one(102, "feed" if line == 3 else "answer", line, 1, *pipes)]
    feeder = Process(pid=103, parent=100, name="feeder", looks=(Look(at=2.5, state="Z"),), exit="with exit code 0")
    verdict = judge(Snapshot(processes=(main, *workers, feeder), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern
    if pattern == "dead":
        assert (verdict.pids, verdict.sites) == ((103,), ("train.py:10", "train.py:6"))
        assert "Nothing that lives can end this wait: pid 101 waits for an item" in verdict.explanation


@pytest.mark.parametrize("kind, edges", [("condition", set()), ("future", set()), ("process", {2, 3})])
def test_a_child_that_waits_for_its_parent_cannot_end_another_wait_of_it(kind: str, edges: set[int]) -> None:
    def one(pid: int, kind: str, parent: int, awaits: int, *ends: int) -> Actor:
        awaited = ((pid, f"socket:[{awaits}]", f"socket:[{awaits + 1}]"),) if awaits else ()
        names = tuple(f"socket:[{end}]" for end in ends)
        looks = (Look(at=0.0, state="S", threads=(Thread(name="MainThread", os_id=pid),)),)
        process = Process(pid=pid, parent=parent, looks=looks, awaits=awaited, ends=names)
        return Actor(process=process, activity=Activity(kind=kind, thread="MainThread"))

    main, first, second = one(1, kind, 0, 0, 11, 21), one(2, "pipe", 1, 10), one(3, "pipe", 1, 20, 11)
    assert application_edges([main, first, second])[1] == edges


@pytest.mark.parametrize("reads, edges", [("w pipe:[9]", set()), ("", {1}), ("w pipe:[7]", {1})])
def test_a_process_that_reads_its_programs_output_waits_for_no_parent_that_has_another_pipe(
    reads: str, edges: set[int]
) -> None:
    def one(pid: int, kind: str, **more: Any) -> Actor:
        looks = (Look(at=0.0, state="S", threads=(Thread(name="MainThread", os_id=pid),)),)
        process = Process(pid=pid, looks=looks, pipes=("pipe:[7]",), ends=("w pipe:[7]",), **more)
        return Actor(process=process, activity=Activity(kind=kind, thread="MainThread"))

    client = one(1, "http", peers=(80,))
    server = one(2, "process", parent=1, listens=(80,), awaits=((2, "r pipe:[8]", reads),) * bool(reads))
    assert application_edges([client, server]) == {1: {2}, 2: edges}


def test_only_a_fork_of_a_server_is_no_server_of_the_port_that_it_is_connected_to() -> None:
    def one(pid: int, parent: int, listens: tuple[int, ...] = (), peers: tuple[int, ...] = ()) -> Actor:
        looks = (Look(at=0.0, state="S"),)
        process = Process(pid=pid, parent=parent, looks=looks, listens=listens, peers=peers)
        return Actor(process=process, activity=Activity(kind="network" if peers else "lock"))

    checks_itself = [one(1, 0, listens=(8000,), peers=(8000,)), one(2, 0, peers=(8000,))]
    assert application_edges(checks_itself)[2] == {1}
    forked = [one(1, 0, listens=(8000,)), one(2, 1, listens=(8000,), peers=(8000,)), one(3, 1, (8000,), (8000,))]
    assert application_edges(forked)[2] == application_edges(forked)[3] == {1}


@pytest.mark.parametrize("name", ["timestep", "entries", "self.num_timesteps", "report", "known", "errors"])
def test_a_counter_of_work_is_not_taken_for_one_of_waiting(name: str) -> None:
    assert not WAITING_NAMES.search(name)


@pytest.mark.parametrize("name", ["timestamp", "retries", "self.wait_s", "last_time", "n_attempts"])
def test_a_counter_of_waiting_is_known(name: str) -> None:
    assert WAITING_NAMES.search(name)


def test_a_port_that_speaks_no_http_does_not_hide_the_answer_of_another() -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    def greet(server: socket.socket) -> None:  # as ZeroMQ does
        with suppress(OSError):
            while True:
                connection = server.accept()[0]
                connection.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\n")
                connection.close()

    frame = Frame(function="serve", file="/x/site-packages/uvicorn/server.py", line=1)
    thread = Thread(name="MainThread", os_id=1, frames=(frame,))
    process = Process(pid=1, looks=(Look(at=0.0, state="S", threads=(thread,)),))
    with HTTPServer(("127.0.0.1", 0), Answers) as server, socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=greet, args=(other,), daemon=True).start()
        http, mute = server.server_port, other.getsockname()[1]
        assert answers(process, (mute, http), "") == answers(process, (http, mute), "") == {"health": "200"}
        server.shutdown()


def test_the_launchers_of_deepspeed_are_no_ranks() -> None:
    sleeps = Frame(function="main", file="/x/deepspeed/launcher/launch.py", line=1, locals={"local_rank": "1"})
    runner = below(90, sleeps, command=("python", "/usr/bin/deepspeed", "--num_gpus", "2", "train.py"))
    launch = below(91, sleeps, parent=90, command=("python", "-m", "deepspeed.launcher.launch", "train.py"))
    ranks = [replace(rank(n, 8 if n == 0 else 5, "all_reduce" if n else ""), parent=91) for n in range(2)]
    verdict = judged(runner, launch, *ranks)
    assert (verdict.pattern, verdict.ranks) == ("missing rank", (0,))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("moves", [True, False])
def test_an_engine_whose_counter_of_tokens_grows_is_moving(engine: str, moves: bool) -> None:
    asked = 0

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal asked
            asked += moves
            self.send_response(200)
            self.end_headers()
            labels = f'{{engine="0",model_name="my model"}} {27453.0 + asked}'
            self.wfile.write(f"# TYPE x counter\n{engine}:generation_tokens_total{labels}\n".encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    frame = Frame(function="serve", file="/x/site-packages/uvicorn/server.py", line=1)
    thread = Thread(name="MainThread", os_id=1, frames=(frame,))
    process = Process(pid=1, looks=(Look(at=0.0, state="S", threads=(thread,)),))
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert answers(process, (server.server_port,), "")["metrics"] == ("moving" if moves else "still")
        server.shutdown()


@pytest.mark.parametrize(
    ("options", "blamed"),
    [(["a", "a", "b", "a"], (2,)), (["a", "a", "a", "a"], ()), (["a", "b", "a"], ()), (["b", "a", "a", "a"], ())],
)
def test_the_rank_whose_options_alone_differ_is_named_in_init(options: list[str], blamed: tuple[int, ...]) -> None:
    ranks = []
    for number, option in enumerate(options):
        made = rank(number, 5, "init_process_group", world=len(options))
        torch, user = made.threads[0].frames
        thread = replace(made.threads[0], frames=(torch, replace(user, locals={"run": option, "stage": str(number)})))
        ranks.append(replace(made, looks=tuple(replace(look, threads=(thread,)) for look in made.looks)))
    verdict = judged(*ranks)
    assert (verdict.pattern, verdict.ranks) == ("initialisation", blamed)


def stays(process: Process, *frames: Frame) -> Process:
    """Return the process with the same frames in each look."""
    thread = replace(process.looks[0].threads[0], frames=frames)
    return replace(process, looks=tuple(replace(look, threads=(thread,)) for look in process.looks))


@pytest.mark.parametrize(
    ("rounds", "group", "over", "pattern", "ranks"),
    [
        ("011", "[0, 2]", "range(9)", "collective mismatch", (2,)),
        ("111", "[0, 2]", "range(9)", "pipeline micro-batch mismatch", (0, 1)),
        ("101", "[0, 2]", "range(9)", "pipeline micro-batch mismatch", (0, 1)),
        ("011", "[0, 1, 2]", "range(9)", "pipeline micro-batch mismatch", (0, 1)),
        ("011", "[0, 2]", "range(rank, 9, world)", "pipeline micro-batch mismatch", (0, 1)),
    ],
)
def test_ranks_a_round_ahead_have_left_a_collective_out(
    rounds: str, group: str, over: str, pattern: str, ranks: tuple[int, ...]
) -> None:
    text = (
        f"tied = dist.new_group({group})\nfor step in {over}:\n    if stage:\n        dist.recv(x, src=stage - 1)\n"
        "    if x.grad is not None:\n        dist.all_reduce(x.grad, group=tied)\n"
    )
    every = []
    for number, step in enumerate(rounds):
        inside = rank(number, 6, "all_reduce", world=3) if not number else rank(number, 4, "recv", src=str(number - 1))
        frame = at(6 if not number else 4, "<module>", step=step)
        every.append(stays(replace(inside, world=3), inside.looks[0].threads[0].frames[0], frame))
    verdict = judge(Snapshot(processes=tuple(every), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == (pattern, ranks)


@pytest.mark.parametrize(("asked", "pattern"), [(False, "dead"), (True, "rollout blocked")])
def test_a_failed_task_whose_exception_was_asked_for_may_have_been_handled(asked: bool, pattern: str) -> None:
    text = "async def score(n):\n    raise ValueError(n)\n\nasync def main():\n    print(await kept.get())\n"
    inner = Frame(function="Queue.get", file="/usr/lib/python3.11/asyncio/queues.py", line=158)
    raised = replace(at(2, "score"), locals={})
    failed = Thread(name="task Task-2", os_id=0, task=True, at=2, ended="ValueError", asked=asked, frames=(raised,))
    waits = Thread(name="task Task-1", os_id=0, task=True, at=1, waiter="Future", frames=(inner, at(5, "main")))
    loop = Frame(function="EpollSelector.select", file="/usr/lib/python3.11/selectors.py", line=468)
    main = Thread(name="MainThread", os_id=100, frames=(loop, at(9, "<module>")))
    looks = tuple(Look(at=float(n), state="S", switches=7, threads=(main, waits, failed)) for n in range(6))
    one = Process(pid=100, looks=looks)
    assert judge(Snapshot(processes=(one,), seconds=5.0, sources={"train.py": text})).pattern == pattern


@pytest.mark.parametrize(
    ("source", "pattern", "ranks"), [(2, "collective mismatch", (2,)), (0, "crossed groups", None)]
)
def test_the_rank_that_broadcasts_from_the_same_source_in_another_group_forgot_the_group(
    source: int, pattern: str, ranks: tuple[int, ...] | None
) -> None:
    text = (
        "sync = dist.new_group([0, 1, 2])\ntrains = dist.new_group([2, 3])\nfor step in range(9):\n    if samples:\n"
        "        dist.broadcast(w, src=2, group=sync)\n    else:\n        dist.all_reduce(g, group=trains)\n"
        f"        dist.broadcast(w, src={source})\n"
    )
    places = [(5, "broadcast", "2"), (5, "broadcast", "2"), (8, "broadcast", str(source)), (7, "all_reduce", "")]
    every = []
    for number, (line, op, root) in enumerate(places):
        inside = rank(number, line, op, world=4, **({"src": root} if root else {}))
        frame = at(line, "<module>", step=str(1 + (number == 3)))
        every.append(stays(inside, inside.looks[0].threads[0].frames[0], frame))
    verdict = judge(Snapshot(processes=tuple(every), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern and verdict.ranks == (ranks or verdict.ranks), verdict


@pytest.mark.parametrize(("woken", "wakes", "line"), [(True, 0, 6), (False, 0, 3), (True, 9, 3)])
def test_a_task_that_could_go_on_while_its_loop_sleeps_is_named(woken: bool, wakes: int, line: int) -> None:
    text = (
        "def work(self):\n    while True:\n        self.cond.wait()\n        self.ready.set()\n"
        "async def main(self):\n    await self.ready.wait()\n"
    )
    works = Thread(name="trainer", os_id=101, frames=(within("Condition.wait", "threading.py"), at(3, "work")))
    task = replace(coroutine(6, "main", within("Event.wait", "asyncio/locks.py")), woken=woken)
    verdict = watched(text, *([main_in(*LOOP), works, task] for _ in range(6)), kernel="do_epoll_wait", wakes=wakes)
    assert verdict.sites == (f"train.py:{line}",)
    assert ("call_soon_threadsafe" in verdict.explanation) == (line == 6)


@pytest.mark.parametrize(
    "apart, wakes, kept, rejects",
    [
        (0.5, 40, "3", True),
        (5.0, 40, "3", False),  # each `get` may have reached its limit
        (0.5, 4, "3", False),  # too few items to say so
        (0.5, 40, "", False),
        (0.5, 40, "unread", False),
    ],
)
def test_a_loop_that_takes_items_from_a_queue_and_keeps_none_rejects_everything(
    apart: float, wakes: int, kept: str, rejects: bool
) -> None:
    text = (
        "while len(batch) < 16:\n    item = inbox.get(timeout=5)\n    if stale(item):\n        continue\n"
        "    batch.append(item)\n"
    )
    looks = []
    for n in range(9):
        get = within("Queue.get", "multiprocessing/queues.py", deadline=str(90.25 + apart * n), timeout="5.0")
        values = {} if kept == "unread" else {"len(batch)": kept or str(n)}
        looks.append([main_in(get, at(2, "collect", **values))])
    verdict = watched(text, *looks, kernel="poll_schedule_timeout", wakes=wakes)
    assert verdict.pattern == ("rollout blocked" if kept else "healthy")
    assert ("rejects everything" in verdict.explanation) == rejects


@pytest.mark.parametrize("amount, pattern", [("0", "missing rank"), ("1", "healthy")])
def test_a_rank_that_reads_a_counter_of_the_store_by_adding_nothing_polls(amount: str, pattern: str) -> None:
    text = (
        f"def key(step):\n    return f'read/{{step}}'\nwhile store.add(key(step), {amount}) < 2:\n"
        "    time.sleep(0.05)\nstore.wait(['weights'])\n"
    )
    looks = []
    for n in range(6):
        looks.append(Look(at=0.5 * n, switches=7 + 9 * n, threads=(main_in(at(3 if n == 3 else 4, "publish")),)))
    polls = replace(rank(0, 3), looks=tuple(looks))
    waits = replace(rank(1, 5), looks=tuple(replace(x, threads=(main_in(at(5)),)) for x in STILL))
    waits = replace(waits, looks=tuple(replace(x, threads=(replace(x.threads[0], os_id=101),)) for x in waits.looks))
    verdict = judge(Snapshot(processes=(polls, waits), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern


@pytest.mark.parametrize(("versions", "blamed"), [("778", (2,)), ("777", (0, 1, 2))])
def test_of_ranks_that_wait_for_keys_of_the_store_the_one_with_another_number_is_at_fault(
    versions: str, blamed: tuple[int, ...]
) -> None:
    text = "store.wait([f'{version}/open'])\n"
    ranks = [rank(number, 1, world=3) for number in range(3)]
    waits = []
    for one, version in zip(ranks, versions, strict=True):
        thread = replace(main_in(at(1, version=version)), os_id=one.pid)
        waits.append(replace(one, looks=tuple(replace(look, threads=(thread,)) for look in one.looks)))
    verdict = judge(Snapshot(processes=tuple(waits), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("missing rank", blamed)
    assert ("rank 0-1: version is 7; rank 2: version is 8" in verdict.explanation) == (blamed == (2,))


@pytest.mark.parametrize(("ends", "pattern"), [("", "dead"), ("atexit.register(close)\n", "cleanup deadlock")])
def test_a_thread_that_only_an_atexit_function_would_end_is_a_cleanup_deadlock(ends: str, pattern: str) -> None:
    text = f"item = events.get()\n{ends}"
    writer = Thread(name="writer", os_id=101, frames=(within("Queue.get", "queue.py"), at(1, "drain")))
    verdict = watched(text, *[[main_in(within("_shutdown", "threading.py")), writer]] * 6)
    assert (verdict.pattern, verdict.sites) == (pattern, ("train.py:1",))


@pytest.mark.parametrize("after, pattern", [(0, "dead"), (1, "rollout blocked")])
def test_a_queue_is_abandoned_only_if_its_reader_was_started(after: int, pattern: str) -> None:
    starts, goes_on = "        Thread(target=self.score).start()\n", "        self.todo.put(self.requests.get())\n"
    text = (
        "class Scorer:\n    def score(self):\n        while True:\n            self.todo.get()\n    def run(self):\n"
        + (goes_on + starts if after else starts + goes_on)
        + "Scorer().run()\nreward = rewards.get()\n"
    )
    frame = replace(at(7 - after, "Scorer.run"), locals={"len(self.todo.queue)": "3"})
    scores = below(101, *GETS, frame, at(8, "<module>"))
    every = (below(100, *GETS, at(9, "<module>")), scores)
    assert judge(Snapshot(processes=every, seconds=3.0, sources={"train.py": text})).pattern == pattern


@pytest.mark.parametrize("waits, pattern", [(True, "stopped"), (False, "rollout blocked")])
def test_a_stopped_idle_worker_counts_only_if_its_parent_waits_for_it(waits: bool, pattern: str) -> None:
    waiting = within("ApplyResult.get", "multiprocessing/pool.py"), within("Pool.map", "multiprocessing/pool.py")
    main = below(100, *(waiting if waits else GETS), at(1, "<module>"))
    worker = below(101, *GETS, within("worker", "multiprocessing/pool.py"), at(2, "<module>"))
    worker = replace(worker, looks=tuple(replace(look, state="T") for look in worker.looks))
    text = "rewards = pool.map(score, answers) or results.get()\n\n"
    verdict = judge(Snapshot(processes=(main, worker), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern


@pytest.mark.parametrize(
    ("outer", "locals_0", "locals_1", "ranks"),
    [
        # Rank 1 is a round ahead, and has left the gather out.
        ("while step < 5", {"step": "2"}, {"step": "3"}, (0, 1)),
        ("while step < 5", {"step": "2"}, {"step": "2"}, (0,)),
        ("while True", {"step": "2"}, {"step": "2"}, (0, 1)),
        ("for step, batch in rows", {"step": "2", "batch": "<A at 0x1>"}, {"step": "2", "batch": "<A at 0x2>"}, (0,)),
        ("for batch in rows", {"batch": "<A at 0x1>"}, {"batch": "<A at 0x2>"}, (0, 1)),
    ],
)
def test_a_rank_has_left_an_inner_loop_if_all_are_in_the_same_round_of_the_outer_ones(
    outer: str, locals_0: dict[str, str], locals_1: dict[str, str], ranks: tuple[int, ...]
) -> None:
    text = f"for epoch in range(3):\n  {outer}:\n    for micro in range(2):\n        dist.all_reduce(x)\n"
    text += "    dist.all_gather(parts, x)\n    step += 1\n"
    left, within_it = rank(0, 5, "all_gather"), rank(1, 4, "all_reduce")
    left = stays(left, left.looks[0].threads[0].frames[0], at(5, "<module>", epoch="1", micro="1", **locals_0))
    within_it = stays(
        within_it, within_it.looks[0].threads[0].frames[0], at(4, "<module>", epoch="1", micro="0", **locals_1)
    )
    verdict = judge(Snapshot(processes=(left, within_it), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("collective mismatch", ranks)


@pytest.mark.parametrize(
    ("keeps", "ranks"),
    [
        ("if y is not None: done.append(y)", (0,)),
        ("if good(micro): done.append(y)", (0,)),
        ("if micro < 2: done.append(y)", (0, 1)),  # in all ranks
        ("if len(done) < 2: done.append(y)", (0, 1)),
        ("done.append(y); done = done[-2:]", (0, 1)),
    ],
)
def test_a_stage_has_dropped_a_micro_batch_if_its_list_should_grow_in_each_round(
    keeps: str, ranks: tuple[int, ...]
) -> None:
    text = f"for micro in range(3):\n    dist.recv(x, src=0)\n    {keeps}\ndist.recv(x, src=1)\n"
    left, still = rank(0, 4, "recv", src="1"), rank(1, 2, "recv", src="0")
    counts = {"micro": "2", "len(done)": "2"}
    left = stays(left, left.looks[0].threads[0].frames[0], at(4, "<module>", **counts))
    still = stays(still, still.looks[0].threads[0].frames[0], at(2, "<module>", **counts))
    verdict = judge(Snapshot(processes=(left, still), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("pipeline micro-batch mismatch", ranks)


@pytest.mark.parametrize(("again", "ranks"), [("work(x)", (0,)), ("if late(): dist.recv(x, src=rank - 1)", (0, 1))])
def test_the_first_of_a_chain_may_have_taken_a_message_too_many(again: str, ranks: tuple[int, ...]) -> None:
    text = f"for micro in range(3):\n    dist.recv(x, src=rank - 1)\n    {again}\ndist.all_reduce(x)\n"
    gone = rank(0, 4, "all_reduce", world=3)
    job = [stays(gone, gone.looks[0].threads[0].frames[0], at(4, "<module>", micro="2"))]
    for number in (1, 2):
        one = rank(number, 2, "recv", src=str(number - 1), world=3)
        job.append(stays(one, one.looks[0].threads[0].frames[0], at(2, "<module>", micro="2")))
    verdict = judge(Snapshot(processes=tuple(job), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, verdict.ranks) == ("pipeline micro-batch mismatch", ranks)


@pytest.mark.parametrize(
    ("loop", "blamed"), [("while True", 1), ("while not exists(stop_file)", 1), ("while not exists(weights)", 2)]
)
def test_who_looks_for_files_until_the_end_does_not_keep_others_waiting(loop: str, blamed: int) -> None:
    text = f"{loop}:\n    glob(path)\n    time.sleep(1)\nwhile not exists(rollout):\n    time.sleep(1)\n"
    job = [replace(rank(number, line), rank=None, world=None) for number, line in ((0, 3), (1, 5))]
    verdict = judge(Snapshot(processes=tuple(job), seconds=3.0, sources={"train.py": text}))
    assert (verdict.pattern, len(verdict.pids)) == ("external wait", blamed)
    assert 101 in verdict.pids and "train.py:5" in verdict.sites


def test_a_failed_task_has_no_lock() -> None:
    text = "async def add(lock):\n    async with lock:\n        check()\nasync def main():\n    await gather(*tasks)\n"
    failed = Thread(name="task Task-2", os_id=0, task=True, at=2, ended="ValueError", frames=(at(3, "add"),))
    acquire = within("acquire", "asyncio/locks.py")
    tasks = [
        Thread(name="task Task-1", os_id=0, task=True, at=1, waiter="_GatheringFuture", frames=(at(5, "main"),)),
        Thread(name="task Task-3", os_id=0, task=True, at=3, waiter="Future", frames=(acquire, at(2, "add"))),
    ]
    verdict = watched(text, *[[main_in(*LOOP), *tasks, failed]] * 6)
    assert verdict.sites == ("train.py:2",) and "No coroutine" in verdict.explanation, verdict.explanation


@pytest.mark.parametrize(
    ("puts", "reads", "pattern"),
    [
        ("out.put(1)", "f.result()", "dead"),
        ("out.put(1)", "f.exception()", "rollout blocked"),  # it may have been tried again
        ("\n    try: work()\n    finally: out.put(1)", "f.result()", "rollout blocked"),
    ],
)
def test_a_failed_job_explains_a_wait_that_only_its_success_would_have_ended(
    puts: str, reads: str, pattern: str
) -> None:
    text = f"def wait():\n  return (\n    out.get())\ndef produce(): {puts}\nfor f in futures:\n    {reads}\n"
    get = within("get", "queue.py")
    failed = Inside(failed_jobs=(("produce", "ValueError", "train.py:2"),))
    looks = tuple(Look(at=n / 2, switches=7, threads=(main_in(get, at(3, "<module>")),)) for n in range(6))
    one = replace(rank(0, 1), rank=None, world=None, looks=looks, waits_in="futex_do_wait", inside=failed)
    verdict = judge(Snapshot(processes=(one,), seconds=3.0, sources={"train.py": text}))
    assert verdict.pattern == pattern and "the job produce() (ValueError at train.py:2)" in verdict.explanation
